"""What figures of held-out prompts prove: the gain of a policy over its start, and the verdict on a difference.

Tables, reports, comparisons and live checks take their verdicts from here. A difference is better or worse only where
its 95 % interval excludes zero; without an interval nothing is known yet, whatever its sign.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from rlhf.recipe import StageName
from rlhf.recipe.stages import EVALUATE, POLICIES, SFT, STAGE_TABLE, PolicyStart
from rlhf.run.records import Summary
from rlhf.stats import Z95
from rlhf.terminal import counted

Metrics = Mapping[str, float | None]
Word = Literal["better", "worse", "no difference", "not known yet"]
Ends = tuple[float, float]  # of a 95 % interval

IS_BETTER: Final = "better"
IS_WORSE: Final = "worse"
NO_DIFFERENCE: Final = "no difference"
NOT_KNOWN: Final = "not known yet"
OF_EVALUATIONS: Final = "eval/"  # how keys of metrics.jsonl begin that were measured on held-out rows
HELDOUT_PROMPTS: Final = "heldout_prompts"  # metric: the number of prompts that a policy's figures are of
OF_FUNCTION: Final = "reward_"  # how the names of metrics of a reward function begin
NO_VERDICT: Final = "_no_verdict"  # how keys end of the share of answers without a verdict of what stands before it
CHOSEN_AMONG: Final = "chosen_among_checkpoints"  # metric: of how many the rows of the figures chose the result
START_IN_WORDS: dict[PolicyStart, str] = {SFT: "SFT", "base": "the base"}
SD = "standard deviations"
NEGLIGIBLE_SD = 0.1  # standard deviations; Cohen calls twice that small
DETECTED = Z95 + 0.8416  # standard errors from zero at which an interval excludes it in four of five repetitions


def verdict(interval: Ends | None, negligible: float = 0.0) -> Word:
    """Return what the interval of a difference says, where more is better.

    A difference of up to `negligible`, in its own unit, is none: an interval within it says so.
    """
    if interval is None:
        return NOT_KNOWN
    low, high = interval
    if low > 0 or high < 0:
        return IS_BETTER if low > 0 else IS_WORSE
    return NO_DIFFERENCE if negligible and -negligible <= low and high <= negligible else NOT_KNOWN


def judgements(functions: Iterable[str]) -> tuple[str, ...]:
    """Return what judges answers, in the order in which it counts: the first that is known says what a policy gained.

    Only a toy world knows the true reward. A function is exact; the score of a reward model may be fooled.
    """
    return ("true_reward", *functions, "score")


def of_prompts(prompts: int | None) -> str:
    """Return in words what a figure is of: ` on 512 held-out prompts`; "" where a record does not say how many."""
    return "" if prompts is None else f" on {counted(prompts, 'held-out prompt')}"


def way_to_know(value: float, interval: Ends | None, prompts: int | None) -> str:
    """Return how to know what is not known yet, as a clause.

    The interval narrows with the root of the number of prompts. At the number that is given it excludes zero in four of
    five repetitions, if the difference is as large as `value`.
    """
    if interval is None:
        if prompts is not None:  # whoever counts prompts measures intervals, but where nothing varies
            return "the same difference for every prompt has no interval"
        return "`rlhf run evaluate` measures an interval"
    error = (interval[1] - interval[0]) / (2 * Z95)
    needed = (prompts or math.inf) * (DETECTED * error / value) ** 2 if value else math.inf
    if needed > 1_000_000:
        return "more prompts would tell"
    number = math.ceil(float(f"{needed:.2g}"))
    return f"about {number:,} prompts would tell (evaluate.max_samples={number})"


class Gain(NamedTuple):
    """A metric of the answers of the start and of the trained policy, and the gain with its 95 % interval, if any.

    `unit` is that of the gain; "" is the metric's own. `prompts` is None where a record does not say of how many the
    figures are. `key` is the metric's name in records. `no_verdict` are the shares of the start's and the policy's
    answers that have none; they are in no figure. `chosen_among` is the number of checkpoints among which the prompts
    of these figures chose the policy; None where others chose, or nothing did.
    """

    stage: StageName
    name: str
    start: float
    end: float
    value: float
    interval: Ends | None
    unit: str
    origin: PolicyStart = SFT
    prompts: int | None = None
    key: str = ""
    no_verdict: tuple[float, float] = (0.0, 0.0)
    chosen_among: int | None = None

    @property
    def end_interval(self) -> Ends | None:
        """Return the ends of the gain's interval in the metric's own unit, around `end`; None without them."""
        if self.interval is None or not self.value:
            return None
        unit = (self.end - self.start) / self.value
        return self.start + self.interval[0] * unit, self.start + self.interval[1] * unit

    @property
    def verdict(self) -> Word:
        """Return whether the policy is better than its start."""
        return verdict(self.interval, NEGLIGIBLE_SD if self.unit == SD else 0.0)

    @property
    def kind(self) -> str:
        """Return good, bad, or "" where neither is known."""
        return {IS_BETTER: "good", IS_WORSE: "bad"}.get(self.verdict, "")

    @property
    def title(self) -> str:
        """Return whose gain it is, over what: `PPO against SFT`."""
        return f"{STAGE_TABLE[self.stage].title} against {START_IN_WORDS[self.origin]}"

    def caveats(self) -> str:
        """Return what else to know of the figures, as clauses that follow them; "" for nothing."""
        text = ""
        if any(self.no_verdict):
            before, after = (f"{100 * share:.3g} %" for share in self.no_verdict)
            text += f"; of the answers {before} before and {after} after have no verdict and count nowhere"
        if self.chosen_among is not None:
            text += f"; these prompts also chose the policy among {self.chosen_among} checkpoints, so it looks too good"
        return text

    def in_words(self) -> str:
        """Return the gain with its interval, number of prompts and verdict, and how to know where that is not known."""
        text = f"{self.value:+.2f}{self.unit and ' '}{self.unit}"
        if self.interval is not None:
            text += f" (95 %: {self.interval[0]:+.2f} to {self.interval[1]:+.2f})"
        text += f"{of_prompts(self.prompts)}: {self.verdict}{self.caveats()}"
        return text if self.verdict != NOT_KNOWN else f"{text}; {way_to_know(self.value, self.interval, self.prompts)}"


def gains_over_start(summaries: Mapping[str, Summary]) -> list[Gain]:
    """Return the gain of each policy for which one was measured, from the evaluation if that has it."""
    evaluated = summaries[EVALUATE].metrics if EVALUATE in summaries else {}
    origin: PolicyStart = SFT if any(key.startswith(f"{SFT}/") for key in evaluated) else "base"
    gains = []
    for stage in POLICIES:
        own = summaries[stage].metrics if stage in summaries else {}
        gain = _gain(stage, evaluated, f"{stage}/", origin, "{origin}/{name}") or gain_of_stage(stage, own)
        if gain is not None:
            among = own.get(CHOSEN_AMONG)
            gains.append(gain._replace(chosen_among=None if among is None else int(among)))
    return gains


def gain_of_stage(stage: StageName, metrics: Metrics, prefix: str = "") -> Gain | None:
    """Return the gain that a stage itself measured, from metrics whose keys have a `prefix`; None without one.

    Its metrics name where the policy started beside the length of the start's responses.
    """
    origin: PolicyStart = "base" if f"{prefix}response_length_base" in metrics else SFT
    return _gain(stage, metrics, prefix, origin, f"{prefix}{{name}}_{{origin}}")


def _gain(stage: StageName, metrics: Metrics, prefix: str, origin: PolicyStart, start_key: str) -> Gain | None:
    """Return the gain from metrics whose keys have a `prefix`. `start_key` is the form of the keys of the start."""
    own = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    functions = [key.removesuffix("_gain") for key in own if key.startswith(OF_FUNCTION) and key.endswith("_gain")]
    prompts = own.get(HELDOUT_PROMPTS)
    for name in judgements(functions):
        key = f"{name}_gain" if name in functions else f"{name}_gain_sd"
        start, end, value = metrics.get(start_key.format(origin=origin, name=name)), own.get(name), own.get(key)
        if start is None or end is None or value is None:
            continue
        low, high = own.get(f"{key}_low"), own.get(f"{key}_high")
        of_start = metrics.get(start_key.format(origin=origin, name=f"{name}{NO_VERDICT}"))
        return Gain(
            stage,
            name.removeprefix(OF_FUNCTION).replace("_", " "),
            start,
            end,
            value,
            None if low is None or high is None else (low, high),
            SD * key.endswith("_sd"),
            origin,
            None if prompts is None else int(prompts),
            name,
            (of_start or 0.0, own.get(f"{name}{NO_VERDICT}") or 0.0),
        )
    return None
