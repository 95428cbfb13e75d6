"""Live checks: the usual ways in which training goes wrong, looked for in what a stage logs, each with advice.

They come from the troubleshooting list of the published H100 guide and from practice. `CHECKS` is the whole list. A
check calls a function of `checks` after each logged row; where that sees something, the finding names the usual cause
and settings from `advice`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from rlhf.errors import UserError
from rlhf.observe import advice, checks
from rlhf.observe.history import FEW, History
from rlhf.recipe import StageName, as_yaml
from rlhf.recipe.stages import STAGE_TABLE
from rlhf.run.directory import StageRun
from rlhf.run.evidence import IS_BETTER, Gain
from rlhf.run.layout import FINDINGS, METRICS
from rlhf.run.reader import read_lines
from rlhf.run.records import FindingLine, MetricsLine
from rlhf.terminal import say


class Check(NamedTuple):
    """A check: its name, what it sees, the usual cause and advice. The table of stages names the checks of each.

    `{rewards}` in a cause stands for what rewards the policy: the reward model, functions or both. A check sees nothing
    before `rows` rows are logged; a check of a trend may wait longer in a long run. It is given the `columns` that it
    speaks of, and no others, and is not asked while one of them was not logged. One that says that nothing is learned
    (`denies_learning`) is not asked while the run's own figures show that something is.
    """

    name: str
    seen: Callable[[History], str | None]
    cause: str
    advice: Callable[[History], Mapping[str, float | str]]
    rows: int
    columns: tuple[str, ...] = ()
    denies_learning: bool = False


CHECKS = (
    Check(
        "nan",
        checks.find_nan,
        "Numbers overflow, mostly after steps that are too large",
        advice.half_rate,
        1,
    ),
    Check(
        "flat_loss",
        checks.find_flat_loss,
        "The learning rate is too low, or the data teach nothing",
        advice.higher_rate_and_epochs,
        checks.MANY,
        columns=("loss",),
        denies_learning=True,
    ),
    Check(
        "rising_loss",
        checks.find_rising_loss,
        "The learning rate is too high",
        advice.half_rate,
        2 * FEW,
        columns=("loss",),
    ),
    Check(
        "flat_reward",
        checks.find_flat_reward,
        "The learning rate is too low, or the policy cannot change what counts for {rewards}",
        advice.higher_rate,
        checks.MANY,
        columns=("objective/scores",),
        denies_learning=True,
    ),
    Check(
        "large_updates",
        checks.find_large_updates,
        "The learning rate is too high",
        advice.smaller_updates,
        FEW,
        columns=("policy/approxkl_avg",),
    ),
    Check(
        "same_scores",
        checks.find_same_scores,
        "The reward model tells nothing apart yet",
        advice.fit_more,
        FEW,
        columns=("min_reward", "max_reward"),
        denies_learning=True,
    ),
    Check(
        "chance",
        checks.find_chance,
        "The pairs carry no preference, or labels are wrong: look at them",
        advice.higher_rate_and_epochs,
        checks.MANY,
        columns=("accuracy",),
    ),
    Check(
        "overconfident",
        checks.find_overconfident,
        "The reward model has learned its pairs by heart",
        advice.fit_less,
        FEW,
        columns=("min_reward", "max_reward"),
    ),
    Check(
        "high_kl",
        checks.find_high_kl,
        "The policy has gone far from its reference, where {rewards} may pay for the wrong things",
        advice.stay_near_reference,
        3,
        columns=("objective/kl_per_token",),
    ),
    Check(
        "negative_kl",
        checks.find_negative_kl,
        "Responses are not sampled from the policy that is scored: look at temperature, top-p and the sampler",
        advice.nearer_sampler,
        3,
        columns=("objective/kl_per_token",),
    ),
    Check(
        "sampling_mismatch",
        checks.find_sampling_mismatch,
        "The sampler has another base, another precision or other settings than the trainer",
        advice.nearer_sampler,
        3,
        columns=("rollout/logprob_diff_avg",),
    ),
    Check(
        "longer",
        checks.find_longer,
        "Length pays with {rewards}, and the policy has found out",
        advice.stay_near_reference,
        2 * FEW,
        columns=("response/length", "objective/scores"),
    ),
    Check(
        "fewer_ends",
        checks.find_fewer_ends,
        "Running on pays more than ending",
        advice.ending_penalty,
        2 * FEW,
        columns=("response/eos_rate",),
    ),
    Check(
        "repetition",
        checks.find_repetition,
        "Repetition pays with {rewards}",
        advice.stay_near_reference,
        1,
    ),
    Check(
        "entropy_collapse",
        checks.find_entropy_collapse,
        "The policy has settled on few answers",
        advice.more_entropy,
        2 * FEW,
        columns=("policy/entropy_avg",),
    ),
    Check(
        "no_signal",
        checks.find_no_signal,
        "The responses to a prompt get the same reward: the task is too easy, too hard, or sampling too narrow",
        advice.larger_groups,
        FEW,
        columns=("groups/no_signal",),
    ),
    Check(
        "clipping",
        checks.find_clipping,
        "Updates are too large for one batch of rollouts",
        advice.smaller_updates,
        FEW,
        columns=("policy/clipfrac_avg",),
    ),
    Check(
        "value_explosion",
        checks.find_value_explosion,
        "The critic diverges, and advantages with it",
        advice.slower_critic,
        2 * FEW,
        columns=("loss/value_avg",),
    ),
)
CHECK_NAMES = tuple(check.name for check in CHECKS)


def unused_checks(stage: StageName, rows: int) -> list[str]:
    """Return the checks of a stage that could see nothing in `rows` logged rows."""
    return [check.name for check in CHECKS if check.name in STAGE_TABLE[stage].checks and rows < check.rows]


def refuted(name: str, gain: Gain | None) -> bool:
    """Return whether a finding, that nothing is learned, is refuted by a policy's gain on held-out prompts."""
    denies = any(check.name == name and check.denies_learning for check in CHECKS)
    return denies and gain is not None and gain.verdict == IS_BETTER


class Finding(NamedTuple):
    """What a check found, in the keys of its record: the check, the step, what was seen, its usual cause and advice."""

    check: str
    step: int
    seen: str
    cause: str
    remedies: Mapping[str, float | str]  # recipe keys and values to try, in the order to try them

    def __str__(self) -> str:
        tries = " or ".join(f"{key}={as_yaml(value)}" for key, value in self.remedies.items())
        return f"step {self.step}: {self.seen} [{self.check}]. {self.cause}." + (f" Try {tries}" if tries else "")


def findings(history: History, step: int) -> list[Finding]:
    """Return what is wrong after the newest row."""
    found = []
    for check in CHECKS:
        if check.name not in STAGE_TABLE[history.stage].checks or (known := history.of(check.columns)) is None:
            continue
        if (seen := check.seen(known)) is not None and not (check.denies_learning and checks.find_learning(history)):
            cause = check.cause.format(rewards=history.rewards)
            found.append(Finding(check.name, step, seen, cause, check.advice(history)))
    return found


class LiveChecks:
    """Live checks of a run. Each finding is printed once and kept in findings.jsonl.

    Findings named in `stop_on` end the run.
    """

    def __init__(self, run: StageRun, stop_on: Collection[str] = ()):
        self.run, self.stop_on = run, set(CHECK_NAMES if "all" in stop_on else stop_on)
        self.history = History(run.loaded.recipe, run.stage)
        for line in read_lines(run.path / METRICS, MetricsLine):  # of the run that is resumed
            self.history.add(line.values)
        self.reported = {line.check for line in read_lines(run.path / FINDINGS, FindingLine)}

    def on_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Check a logged row. Raises UserError for a finding on which the run shall stop."""
        self.history.total_steps = self.run.total_steps
        self.history.add(values)
        for finding in findings(self.history, step):
            if finding.check not in self.reported:
                self.reported.add(finding.check)
                self.run.logs.finding(step, finding._asdict())
                say(f"{self.run.stage}, {finding}")
            if finding.check in self.stop_on:
                go_on = "begin anew without --stop-on"
                if self.run.checkpoints.steps():
                    go_on = "continue from the checkpoint with --resume and without --stop-on"
                raise UserError(
                    f"{self.run.stage}: stopped on {finding.check}; start again with another setting, as in "
                    f"{self.run.path / FINDINGS} (--set and another --out), or {go_on}"
                )

    def on_samples(self, responses: Sequence[str]) -> None:
        """Keep the responses that were sampled last, for the checks."""
        self.history.responses = list(responses)
