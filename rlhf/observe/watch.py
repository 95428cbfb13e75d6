"""The usual ways in which training goes wrong, recognised in what a stage logs, each with what to try.

The published H100 guide's troubleshooting list, and what practice has added. A check looks at the logged values so far
and says what it has seen, or nothing; thresholds are ours unless a source stands beside them.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.errors import UserError
from rlhf.recipe import GROUPS, ONLINE, Group, OnlineOptions, OnPolicy, Optimization, Recipe, as_yaml
from rlhf.run.directory import Run
from rlhf.run.reader import read_lines
from rlhf.run.records import FindingLine, MetricsLine
from rlhf.stats import sigmoid
from rlhf.terminal import say

SUPERVISED = ("pretrain", "sft", "rm", "dpo")
FEW = 5  # logged rows whose mean is looked at, and that a check waits for
MANY = 20  # rows before a trend is judged
KL_LIMIT = 5 * math.log(2)  # nats per token: the guide's 5 bits


class Finding(NamedTuple):
    check: str
    step: int
    seen: str
    cause: str
    remedies: dict[str, Any]  # recipe keys and the values to try, the first one first

    def __str__(self) -> str:
        tries = " or ".join(f"{key}={as_yaml(value)}" for key, value in self.remedies.items())
        return f"step {self.step}: {self.seen} [{self.check}]. {self.cause}." + (f" Try {tries}" if tries else "")


class History:
    """What a stage has logged, by key, oldest first; and responses that it has sampled last."""

    def __init__(self, recipe: Recipe, stage: str):
        self.recipe, self.stage = recipe, stage
        self.rows: list[Mapping[str, float | None]] = []
        self.responses: list[str] = []

    @property
    def options(self) -> Optimization | OnlineOptions:
        """The recipe's section of the stage."""
        found = self.recipe.section(self.stage)
        assert isinstance(found, Optimization | OnPolicy)
        return found

    @property
    def supervised(self) -> Optimization:
        """The section of a stage that learns from given rows."""
        assert isinstance(self.options, Optimization)
        return self.options

    @property
    def online(self) -> OnlineOptions:
        """The section of a stage that learns from its own samples."""
        assert not isinstance(self.options, Optimization)
        return self.options

    def values(self, key: str) -> list[float]:
        found = (row.get(key) for row in self.rows)
        return [value for value in found if value is not None and math.isfinite(value)]

    def last(self, key: str, count: int = FEW) -> float | None:
        """Mean of the newest `count` values; None while there are fewer."""
        found = self.values(key)[-count:]
        return statistics.fmean(found) if len(found) == count else None

    def first(self, key: str, count: int = FEW) -> float | None:
        """Mean of the oldest `count` values; None while there are fewer than twice as many."""
        found = self.values(key)
        return statistics.fmean(found[:count]) if len(found) >= 2 * count else None


class Check(NamedTuple):
    name: str
    stages: tuple[str, ...]
    seen: Callable[[History], str | None]
    cause: str
    remedies: Callable[[History], dict[str, Any]]


def see_nan(h: History) -> str | None:
    wrong = [key for key, value in h.rows[-1].items() if value is None or not math.isfinite(value)]
    wrong = [key for key in wrong if not key.startswith("eval/")]  # where nothing varies there is no gain to tell
    return f"{wrong[0]} is not a number" if wrong else None


def see_flat_loss(h: History) -> str | None:
    found = h.values("loss")
    if len(found) < MANY:
        return None
    quarter = len(found) // 4
    first, last = found[:quarter], found[-quarter:]
    noise = noise_of_difference(last, quarter)
    fallen = statistics.fmean(first) - statistics.fmean(last)
    if fallen > 2 * noise:
        return None
    return f"the loss has fallen by {fallen:.3g}, which its noise of {noise:.2g} explains"


def noise_of_difference(values: Sequence[float], count: int) -> float:
    """Standard error of the difference of two means of `count` values each, that vary from step to step as `values` do.

    Half of the mean square of their steps is the variance of one value, whatever slow trend they have.
    """
    steps = [b - a for a, b in itertools.pairwise(values)]
    return math.sqrt(statistics.fmean(x * x for x in steps) / count)


def see_rising_loss(h: History) -> str | None:
    last, found = h.last("loss"), h.values("loss")
    if last is None or len(found) < 2 * FEW:
        return None
    best = min(found[0], *(statistics.fmean(found[at : at + FEW]) for at in range(len(found) - 2 * FEW + 1)))
    return f"the loss has risen from {best:.3g} to {last:.3g}" if last > 1.2 * best else None


def see_large_updates(h: History) -> str | None:
    moved = h.last("policy/approxkl_avg")
    return f"an update moves the policy by {moved:.2g} (approxkl)" if moved is not None and moved > 0.1 else None


def see_same_scores(h: History) -> str | None:
    low, high = h.last("min_reward"), h.last("max_reward")
    if low is None or high is None or high - low > 0.01:
        return None
    return f"the scores of a batch lie within {high - low:.2g} of each other"


def see_chance(h: History) -> str | None:
    found = h.values("accuracy")
    if len(found) < MANY:
        return None
    late = found[len(found) // 2 :]
    pairs = len(late) * h.options.logging_steps * h.supervised.per_device_train_batch_size
    pairs *= h.supervised.gradient_accumulation_steps
    accuracy, noise = statistics.fmean(late), math.sqrt(0.25 / pairs)
    return f"accuracy is {accuracy:.3f} on {pairs} pairs: a guess" if accuracy < 0.5 + 2 * noise else None


def see_overconfident(h: History) -> str | None:
    """The guide: scores between 0.3 and 0.7 after a sigmoid, not at 0 and 1."""
    low, high = h.last("min_reward"), h.last("max_reward")
    if low is None or high is None or not (sigmoid(low) < 0.01 and sigmoid(high) > 0.99):
        return None
    return f"scores reach from {sigmoid(low):.4f} to {sigmoid(high):.4f} after a sigmoid"


def see_high_kl(h: History) -> str | None:
    limit = min(h.online.best_kl_limit or KL_LIMIT, KL_LIMIT)
    found = h.last("objective/kl_per_token", 3)
    if found is None or found <= limit:
        return None
    return f"KL to the reference is {found:.3g} nats per token, above {limit:.3g}"


def see_negative_kl(h: History) -> str | None:
    found = h.last("objective/kl_per_token", 3)
    if found is None or found >= -0.01 or h.online.kl_estimator != "k1":
        return None
    return f"KL to the reference is negative, {found:.3g} nats per token"


def see_longer(h: History) -> str | None:
    first, last = h.first("response/length"), h.last("response/length")
    worse, better = h.first("objective/scores"), h.last("objective/scores")
    if first is None or last is None or worse is None or better is None:
        return None
    if not (last > 1.5 * first and better > worse):
        return None
    return f"responses have grown from {first:.0f} to {last:.0f} tokens while the score rose"


def see_fewer_ends(h: History) -> str | None:
    first, last = h.first("response/eos_rate"), h.last("response/eos_rate")
    if first is None or last is None or last > first - 0.2:
        return None
    return f"{last:.0%} of the responses end, {first:.0%} did at first"


def see_repetition(h: History) -> str | None:
    shares = [share for text in h.responses if (share := repeated(text)) is not None]
    if not shares or (mean := statistics.fmean(shares)) < 0.5:
        return None
    return f"{mean:.0%} of what the sampled responses say they have said before"


def see_entropy_collapse(h: History) -> str | None:
    first, last = h.first("policy/entropy_avg"), h.last("policy/entropy_avg")
    if first is None or last is None or last > 0.3 * first:
        return None
    return f"entropy has fallen from {first:.3g} to {last:.3g} nats per token"


def see_no_signal(h: History) -> str | None:
    found = h.last("groups/no_signal")
    return (
        f"{found:.0%} of the groups have equal rewards and teach nothing" if found is not None and found > 0.7 else None
    )


def see_clipping(h: History) -> str | None:
    found = h.last("policy/clipfrac_avg")
    return f"{found:.0%} of the tokens are clipped" if found is not None and found > 0.3 else None


def see_value_explosion(h: History) -> str | None:
    found = h.values("loss/value_avg")
    if len(found) < 2 * FEW:
        return None
    usual, last = min(found[0], statistics.median(found[:FEW])), statistics.fmean(found[-FEW:])
    grown = last > max(1.0, 10 * usual) or last > 1000  # some explode in the first step
    return f"the value loss has gone from {usual:.3g} to {last:.3g}" if grown else None


def see_flat_reward(h: History) -> str | None:
    """From the first to the last quarter of the rows so far, once they are a quarter of the run. The score is compared
    before KL and penalties; steps in which only the critic learns are left out."""
    only_critic = h.recipe.ppo.value_warmup_steps if h.stage == "ppo" else 0
    found = h.values("objective/scores")[only_critic // h.options.logging_steps :]
    if len(found) < max(MANY, h.online.steps // h.options.logging_steps // 4):
        return None
    quarter = len(found) // 4
    first, last = statistics.fmean(found[:quarter]), statistics.fmean(found[-quarter:])
    noise = noise_of_difference(found, quarter)
    if last - first > 2 * noise:
        return None
    return f"the score went from {first:.3g} to {last:.3g} in {len(found)} rows: no rise beyond the noise, {noise:.2g}"


def slower(h: History) -> dict[str, Any]:
    """Half the learning rate, as the guide has it for divergence."""
    return {f"{h.stage}.learning_rate": h.options.learning_rate / 2}


def faster(h: History) -> dict[str, Any]:
    epochs = {f"{h.stage}.num_train_epochs": 2 * h.supervised.num_train_epochs}
    return {f"{h.stage}.learning_rate": 2 * h.options.learning_rate} | epochs


def bolder(h: History) -> dict[str, Any]:
    """The guide: twice the learning rate (2e-5 instead of 1e-5) where PPO does not converge."""
    return {f"{h.stage}.learning_rate": 2 * h.options.learning_rate}


def calmer(h: History) -> dict[str, Any]:
    """The guide's remedies for divergence during PPO, those that are left."""
    found = slower(h)
    epochs = "num_ppo_epochs" if h.stage == "ppo" else "num_iterations"
    if h.online.passes > 2:
        found[f"{h.stage}.{epochs}"] = 2
    if h.online.num_mini_batches > 1:
        found[f"{h.stage}.num_mini_batches"] = h.online.num_mini_batches // 2
    return found


def tighter(h: History) -> dict[str, Any]:
    """More weight on the divergence; where the coefficient follows a target, a smaller target."""
    if h.online.kl_target is not None:
        return {f"{h.stage}.kl_target": h.online.kl_target / 2}
    key = "kl_coef" if h.stage == "ppo" else "beta"
    return {f"{h.stage}.{key}": 2 * h.online.kl_coef or 0.05}


def closer(h: History) -> dict[str, Any]:
    return tighter(h) | calmer(h)


def ending(h: History) -> dict[str, Any]:
    return {f"{h.stage}.missing_eos_penalty": 2 * (h.online.missing_eos_penalty or 0.5)} | tighter(h)


def better_rewards(h: History) -> dict[str, Any]:
    return {"rm.num_train_epochs": 2 * h.recipe.rm.num_train_epochs, "rm.learning_rate": 2 * h.recipe.rm.learning_rate}


def humbler(h: History) -> dict[str, Any]:
    return {"rm.num_train_epochs": h.recipe.rm.num_train_epochs / 2, "rm.center_rewards_coefficient": 0.01}


def lively(h: History) -> dict[str, Any]:
    return tighter(h) | {f"{h.stage}.entropy_coef": 2 * h.online.entropy_coef or 0.01}


def livelier_groups(h: History) -> dict[str, Any]:
    assert isinstance(h.online, Group)
    return {f"{h.stage}.num_generations": 2 * h.online.num_generations, f"{h.stage}.resample_groups": 4}


CHECKS = (
    Check("nan", (*SUPERVISED, *ONLINE), see_nan, "Numbers overflow, mostly after steps that are too large", slower),
    Check("flat_loss", SUPERVISED, see_flat_loss, "The learning rate is too low, or the data teach nothing", faster),
    Check("rising_loss", SUPERVISED, see_rising_loss, "The learning rate is too high", slower),
    Check(
        "flat_reward",
        ONLINE,
        see_flat_reward,
        "The learning rate is too low, or the reward model scores what the policy cannot change",
        bolder,
    ),
    Check("large_updates", ONLINE, see_large_updates, "The learning rate is too high", calmer),
    Check(
        "same_scores",
        ("rm",),
        see_same_scores,
        "The reward model tells nothing apart yet",
        better_rewards,
    ),
    Check("chance", ("rm",), see_chance, "The pairs carry no preference, or labels are wrong: look at them", faster),
    Check("overconfident", ("rm",), see_overconfident, "The reward model has learned its pairs by heart", humbler),
    Check("high_kl", ONLINE, see_high_kl, "The policy leaves what the reward model knows", closer),
    Check(
        "negative_kl",
        ONLINE,
        see_negative_kl,
        "Responses are not sampled from the policy that is scored: look at temperature, top-p and the sampler",
        lambda h: {f"{h.stage}.old_logprobs": "recompute"} if h.online.old_logprobs == "rollout" else {},
    ),
    Check("longer", ONLINE, see_longer, "The reward model likes length, and the policy has found out", closer),
    Check("fewer_ends", ONLINE, see_fewer_ends, "Running on pays more than ending", ending),
    Check("repetition", ONLINE, see_repetition, "The policy repeats what the reward model likes", closer),
    Check("entropy_collapse", ONLINE, see_entropy_collapse, "The policy has settled on few answers", lively),
    Check(
        "no_signal",
        GROUPS,
        see_no_signal,
        "The responses to a prompt get the same reward: the task is too easy, too hard, or sampling too narrow",
        livelier_groups,
    ),
    Check("clipping", ONLINE, see_clipping, "Updates are too large for one batch of rollouts", calmer),
    Check(
        "value_explosion",
        ("ppo",),
        see_value_explosion,
        "The critic diverges, and advantages with it",
        lambda h: {"ppo.value_learning_rate": h.recipe.ppo.value_learning_rate / 4},
    ),
)
NAMES = tuple(check.name for check in CHECKS)


class Watch:
    """Looks at each row that a run logs; says each finding once, keeps it in findings.jsonl, and stops when told to."""

    def __init__(self, run: Run, stop_on: Iterable[str] = ()):
        self.run, self.stop_on = run, set(NAMES if "all" in stop_on else stop_on)
        self.history = History(run.loaded.recipe, run.stage)
        self.history.rows += read_lines(run.path / "metrics.jsonl", MetricsLine)  # of the run that this one resumes
        self.told = {row["check"] for row in read_lines(run.path / "findings.jsonl", FindingLine)}

    def see(self, step: int, values: Mapping[str, float]) -> None:
        """Take a logged row. Raises UserError for a finding on which the run is to stop."""
        self.history.rows.append(values)
        for finding in findings(self.history, step):
            if finding.check not in self.told:
                self.told.add(finding.check)
                self.run.log_finding(step, finding._asdict())
                say(f"{self.run.stage}, {finding}")
            if finding.check in self.stop_on:
                raise UserError(
                    f"{self.run.stage}: stopped on {finding.check}; with another setting it begins anew (--set, and "
                    "--out elsewhere), with --resume and without --stop-on it goes on from its checkpoint"
                )

    def read(self, responses: Sequence[str]) -> None:
        """Take responses that were sampled last."""
        self.history.responses = list(responses)


def findings(history: History, step: int) -> list[Finding]:
    """What is wrong after the newest row."""
    found = []
    for check in CHECKS:
        if history.stage in check.stages and (seen := check.seen(history)) is not None:
            found.append(Finding(check.name, step, seen, check.cause, check.remedies(history)))
    return found


def repeated(text: str) -> float | None:
    """Share of a text's runs of six characters that have stood in it before; None for a text of fewer than twenty."""
    runs = [text[at : at + 6] for at in range(len(text) - 5)]
    return 1 - len(set(runs)) / len(runs) if len(text) >= 20 else None
