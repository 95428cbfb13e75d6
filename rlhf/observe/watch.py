"""Checks for the usual ways in which training goes wrong, on what a stage logs, each with remedies.

They come from the troubleshooting list of the published H100 guide and from practice. A check looks at the values
logged so far and returns what it sees, or None. Thresholds are ours unless a source stands beside them.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from rlhf.errors import UserError
from rlhf.recipe import GROUPS, ONLINE, GroupOptions, OnlineOptions, OnPolicy, Optimization, Recipe, StageName, as_yaml
from rlhf.run.directory import Run
from rlhf.run.reader import read_lines
from rlhf.run.records import FindingLine, MetricsLine
from rlhf.stats import sigmoid
from rlhf.terminal import say

SUPERVISED: tuple[StageName, ...] = ("pretrain", "sft", "rm", "dpo")
FEW = 5  # logged rows that a mean is taken over, and that a check waits for
MANY = 20  # rows before a trend is judged
KL_LIMIT = 5 * math.log(2)  # nats per token: the guide's 5 bits


class Finding(NamedTuple):
    """A sign of trouble: the check, the step, what was seen, its usual cause and remedies."""

    check: str
    step: int
    seen: str
    cause: str
    remedies: Mapping[str, float | str]  # recipe keys and values to try, in the order to try them

    def __str__(self) -> str:
        tries = " or ".join(f"{key}={as_yaml(value)}" for key, value in self.remedies.items())
        return f"step {self.step}: {self.seen} [{self.check}]. {self.cause}." + (f" Try {tries}" if tries else "")


class History:
    """The values that a stage has logged, by key, oldest first, and the responses sampled last."""

    def __init__(self, recipe: Recipe, stage: StageName):
        self.recipe, self.stage = recipe, stage
        self.rows: list[Mapping[str, float | None]] = []
        self.responses: list[str] = []

    @property
    def options(self) -> Optimization | OnlineOptions:
        """Return the stage's section of the recipe."""
        section = self.recipe.section(self.stage)
        assert isinstance(section, Optimization | OnPolicy)
        return section

    @property
    def supervised(self) -> Optimization:
        """Return the section of a stage that learns from given rows."""
        assert isinstance(self.options, Optimization)
        return self.options

    @property
    def online(self) -> OnlineOptions:
        """Return the section of a stage that learns from its own samples."""
        assert not isinstance(self.options, Optimization)
        return self.options

    def values(self, key: str) -> list[float]:
        """Return the finite values logged under a key, oldest first."""
        logged = (row.get(key) for row in self.rows)
        return [value for value in logged if value is not None and math.isfinite(value)]

    def last(self, key: str, count: int = FEW) -> float | None:
        """Return the mean of the newest `count` values; None while there are fewer."""
        newest = self.values(key)[-count:]
        return statistics.fmean(newest) if len(newest) == count else None

    def first(self, key: str, count: int = FEW) -> float | None:
        """Return the mean of the oldest `count` values; None while there are fewer than twice as many."""
        values = self.values(key)
        return statistics.fmean(values[:count]) if len(values) >= 2 * count else None


class Check(NamedTuple):
    """A check: its name, the stages it applies to, what it sees, the usual cause and remedies."""

    name: str
    stages: tuple[StageName, ...]
    seen: Callable[[History], str | None]
    cause: str
    remedies: Callable[[History], Mapping[str, float | str]]


def find_nan(h: History) -> str | None:
    """Return the first key of the newest row that is not finite."""
    wrong = [key for key, value in h.rows[-1].items() if value is None or not math.isfinite(value)]
    wrong = [key for key in wrong if not key.startswith("eval/")]  # a gain is undefined where scores do not vary
    return f"{wrong[0]} is not a number" if wrong else None


def find_flat_loss(h: History) -> str | None:
    """Return how far the loss has fallen, if its noise explains the fall."""
    losses = h.values("loss")
    if len(losses) < MANY:
        return None
    quarter = len(losses) // 4
    first, last = losses[:quarter], losses[-quarter:]
    noise = noise_of_difference(last, quarter)
    fall = statistics.fmean(first) - statistics.fmean(last)
    if fall > 2 * noise:
        return None
    return f"the loss has fallen by {fall:.3g}, which its noise of {noise:.2g} explains"


def noise_of_difference(values: Sequence[float], count: int) -> float:
    """Return the standard error of the difference of two means of `count` values that are as noisy as `values`.

    Half of the mean square of their steps is the variance of one value, whatever slow trend they have.
    """
    steps = [b - a for a, b in itertools.pairwise(values)]
    return math.sqrt(statistics.fmean(x * x for x in steps) / count)


def find_rising_loss(h: History) -> str | None:
    """Return how far the loss has risen above its best, beyond 20 %."""
    last, losses = h.last("loss"), h.values("loss")
    if last is None or len(losses) < 2 * FEW:
        return None
    best = min(
        losses[0], *(statistics.fmean(losses[start : start + FEW]) for start in range(len(losses) - 2 * FEW + 1))
    )
    return f"the loss has risen from {best:.3g} to {last:.3g}" if last > 1.2 * best else None


def find_large_updates(h: History) -> str | None:
    """Return how far an update moves the policy, above 0.1 of approxkl."""
    distance = h.last("policy/approxkl_avg")
    return (
        f"an update moves the policy by {distance:.2g} (approxkl)" if distance is not None and distance > 0.1 else None
    )


def find_same_scores(h: History) -> str | None:
    """Return how close together the scores of a batch lie, within 0.01."""
    low, high = h.last("min_reward"), h.last("max_reward")
    if low is None or high is None or high - low > 0.01:
        return None
    return f"the scores of a batch lie within {high - low:.2g} of each other"


def find_chance(h: History) -> str | None:
    """Return the accuracy of the later half of the rows, if it is not better than a guess."""
    accuracies = h.values("accuracy")
    if len(accuracies) < MANY:
        return None
    late = accuracies[len(accuracies) // 2 :]
    pairs = len(late) * h.options.logging_steps * h.supervised.per_device_train_batch_size
    pairs *= h.supervised.gradient_accumulation_steps
    accuracy, noise = statistics.fmean(late), math.sqrt(0.25 / pairs)
    return f"accuracy is {accuracy:.3f} on {pairs} pairs: a guess" if accuracy < 0.5 + 2 * noise else None


def find_overconfident(h: History) -> str | None:
    """Return the range of scores after a sigmoid if it reaches 0 and 1; the guide has 0.3 to 0.7."""
    low, high = h.last("min_reward"), h.last("max_reward")
    if low is None or high is None or not (sigmoid(low) < 0.01 and sigmoid(high) > 0.99):
        return None
    return f"scores reach from {sigmoid(low):.4f} to {sigmoid(high):.4f} after a sigmoid"


def find_high_kl(h: History) -> str | None:
    """Say that the KL to the reference is above the recipe's limit or the guide's; None otherwise."""
    limit = min(h.online.best_kl_limit or KL_LIMIT, KL_LIMIT)
    kl = h.last("objective/kl_per_token", 3)
    if kl is None or kl <= limit:
        return None
    return f"KL to the reference is {kl:.3g} nats per token, above {limit:.3g}"


def find_negative_kl(h: History) -> str | None:
    """Say that k1 estimates the KL to the reference below -0.01; None otherwise."""
    kl = h.last("objective/kl_per_token", 3)
    if kl is None or kl >= -0.01 or h.online.kl_estimator != "k1":
        return None
    return f"KL to the reference is negative, {kl:.3g} nats per token"


def find_longer(h: History) -> str | None:
    """Return the growth of responses by half or more while the score rose."""
    first, last = h.first("response/length"), h.last("response/length")
    worse, better = h.first("objective/scores"), h.last("objective/scores")
    if first is None or last is None or worse is None or better is None:
        return None
    if not (last > 1.5 * first and better > worse):
        return None
    return f"responses have grown from {first:.0f} to {last:.0f} tokens while the score rose"


def find_fewer_ends(h: History) -> str | None:
    """Return the fall of the share of responses that end, from 20 points."""
    first, last = h.first("response/eos_rate"), h.last("response/eos_rate")
    if first is None or last is None or last > first - 0.2:
        return None
    return f"{last:.0%} of the responses end, {first:.0%} did at first"


def find_repetition(h: History) -> str | None:
    """Return the share of repeated text in the responses sampled last, from one half."""
    shares = [share for text in h.responses if (share := repeated(text)) is not None]
    if not shares or (mean := statistics.fmean(shares)) < 0.5:
        return None
    return f"{mean:.0%} of what the sampled responses say they have said before"


def find_entropy_collapse(h: History) -> str | None:
    """Return the fall of the entropy to less than a third of its first values."""
    first, last = h.first("policy/entropy_avg"), h.last("policy/entropy_avg")
    if first is None or last is None or last > 0.3 * first:
        return None
    return f"entropy has fallen from {first:.3g} to {last:.3g} nats per token"


def find_no_signal(h: History) -> str | None:
    """Return the share of groups with equal rewards, above 70 %."""
    share = h.last("groups/no_signal")
    return (
        f"{share:.0%} of the groups have equal rewards and teach nothing" if share is not None and share > 0.7 else None
    )


def find_clipping(h: History) -> str | None:
    """Return the share of clipped tokens, above 30 %."""
    share = h.last("policy/clipfrac_avg")
    return f"{share:.0%} of the tokens are clipped" if share is not None and share > 0.3 else None


def find_value_explosion(h: History) -> str | None:
    """Return the growth of the value loss to ten times its first values, or to more than 1000."""
    losses = h.values("loss/value_avg")
    if len(losses) < 2 * FEW:
        return None
    first_loss, last = min(losses[0], statistics.median(losses[:FEW])), statistics.fmean(losses[-FEW:])
    exploded = last > max(1.0, 10 * first_loss) or last > 1000  # some explode in the first step
    return f"the value loss has gone from {first_loss:.3g} to {last:.3g}" if exploded else None


def find_flat_reward(h: History) -> str | None:
    """Return the change of the score from the first to the last quarter of the rows, unless it rises beyond the noise.

    The check waits for a quarter of the run. The score is the one before KL and penalties. Steps in which only the
    critic learns do not count.
    """
    only_critic = h.recipe.ppo.value_warmup_steps if h.stage == "ppo" else 0
    scores = h.values("objective/scores")[only_critic // h.options.logging_steps :]
    if len(scores) < max(MANY, h.online.steps // h.options.logging_steps // 4):
        return None
    quarter = len(scores) // 4
    first, last = statistics.fmean(scores[:quarter]), statistics.fmean(scores[-quarter:])
    noise = noise_of_difference(scores, quarter)
    if last - first > 2 * noise:
        return None
    return f"the score went from {first:.3g} to {last:.3g} in {len(scores)} rows: no rise beyond the noise, {noise:.2g}"


def half_rate(h: History) -> dict[str, float]:
    """Return half the learning rate, the guide's remedy for divergence."""
    return {f"{h.stage}.learning_rate": h.options.learning_rate / 2}


def double_rate_and_epochs(h: History) -> dict[str, float]:
    """Return twice the learning rate and twice the epochs."""
    epochs = {f"{h.stage}.num_train_epochs": 2 * h.supervised.num_train_epochs}
    return {f"{h.stage}.learning_rate": 2 * h.options.learning_rate} | epochs


def double_rate(h: History) -> dict[str, float]:
    """Return twice the learning rate, the guide's remedy (2e-5 instead of 1e-5) where PPO does not converge."""
    return {f"{h.stage}.learning_rate": 2 * h.options.learning_rate}


def smaller_updates(h: History) -> dict[str, float]:
    """Return the guide's remedies for divergence during PPO that the recipe does not use yet."""
    remedies = half_rate(h)
    epochs = "num_ppo_epochs" if h.stage == "ppo" else "num_iterations"
    if h.online.passes > 2:
        remedies[f"{h.stage}.{epochs}"] = 2
    if h.online.num_mini_batches > 1:
        remedies[f"{h.stage}.num_mini_batches"] = h.online.num_mini_batches // 2
    return remedies


def more_kl(h: History) -> dict[str, float]:
    """Return twice the weight of the KL, or half the target where the weight follows one."""
    if h.online.kl_target is not None:
        return {f"{h.stage}.kl_target": h.online.kl_target / 2}
    key = "kl_coef" if h.stage == "ppo" else "beta"
    return {f"{h.stage}.{key}": 2 * h.online.kl_coef or 0.05}


def stay_near_reference(h: History) -> dict[str, float]:
    """Return remedies that keep the policy close to the reference: more KL penalty, smaller updates."""
    return more_kl(h) | smaller_updates(h)


def ending_penalty(h: History) -> dict[str, float]:
    """Return remedies for responses that do not end."""
    return {f"{h.stage}.missing_eos_penalty": 2 * (h.online.missing_eos_penalty or 0.5)} | more_kl(h)


def fit_more(h: History) -> dict[str, float]:
    """Return remedies for a reward model that has learned too little."""
    return {"rm.num_train_epochs": 2 * h.recipe.rm.num_train_epochs, "rm.learning_rate": 2 * h.recipe.rm.learning_rate}


def fit_less(h: History) -> dict[str, float]:
    """Return remedies for a reward model that has learned its pairs by heart."""
    rm = h.recipe.rm
    fewer_epochs = {"rm.num_train_epochs": rm.num_train_epochs / 2}
    if rm.loss_type != "bradley_terry":  # the other loss refuses centred rewards
        return fewer_epochs
    return fewer_epochs | {"rm.center_rewards_coefficient": 2 * rm.center_rewards_coefficient or 0.01}


def more_entropy(h: History) -> dict[str, float]:
    """Return remedies for a policy of low entropy."""
    return more_kl(h) | {f"{h.stage}.entropy_coef": 2 * h.online.entropy_coef or 0.01}


def larger_groups(h: History) -> dict[str, float]:
    """Return remedies for groups whose responses all get the same reward."""
    assert isinstance(h.online, GroupOptions)
    return {f"{h.stage}.num_generations": 2 * h.online.num_generations, f"{h.stage}.resample_groups": 4}


CHECKS = (
    Check(
        "nan",
        (*SUPERVISED, *ONLINE),
        find_nan,
        "Numbers overflow, mostly after steps that are too large",
        half_rate,
    ),
    Check(
        "flat_loss",
        SUPERVISED,
        find_flat_loss,
        "The learning rate is too low, or the data teach nothing",
        double_rate_and_epochs,
    ),
    Check("rising_loss", SUPERVISED, find_rising_loss, "The learning rate is too high", half_rate),
    Check(
        "flat_reward",
        ONLINE,
        find_flat_reward,
        "The learning rate is too low, or the reward model scores what the policy cannot change",
        double_rate,
    ),
    Check("large_updates", ONLINE, find_large_updates, "The learning rate is too high", smaller_updates),
    Check("same_scores", ("rm",), find_same_scores, "The reward model tells nothing apart yet", fit_more),
    Check(
        "chance",
        ("rm",),
        find_chance,
        "The pairs carry no preference, or labels are wrong: look at them",
        double_rate_and_epochs,
    ),
    Check("overconfident", ("rm",), find_overconfident, "The reward model has learned its pairs by heart", fit_less),
    Check("high_kl", ONLINE, find_high_kl, "The policy leaves what the reward model knows", stay_near_reference),
    Check(
        "negative_kl",
        ONLINE,
        find_negative_kl,
        "Responses are not sampled from the policy that is scored: look at temperature, top-p and the sampler",
        lambda h: {f"{h.stage}.old_logprobs": "recompute"} if h.online.old_logprobs == "rollout" else {},
    ),
    Check(
        "longer",
        ONLINE,
        find_longer,
        "The reward model likes length, and the policy has found out",
        stay_near_reference,
    ),
    Check("fewer_ends", ONLINE, find_fewer_ends, "Running on pays more than ending", ending_penalty),
    Check("repetition", ONLINE, find_repetition, "The policy repeats what the reward model likes", stay_near_reference),
    Check("entropy_collapse", ONLINE, find_entropy_collapse, "The policy has settled on few answers", more_entropy),
    Check(
        "no_signal",
        GROUPS,
        find_no_signal,
        "The responses to a prompt get the same reward: the task is too easy, too hard, or sampling too narrow",
        larger_groups,
    ),
    Check("clipping", ONLINE, find_clipping, "Updates are too large for one batch of rollouts", smaller_updates),
    Check(
        "value_explosion",
        ("ppo",),
        find_value_explosion,
        "The critic diverges, and advantages with it",
        lambda h: {"ppo.value_learning_rate": h.recipe.ppo.value_learning_rate / 4},
    ),
)
CHECK_NAMES = tuple(check.name for check in CHECKS)


class LiveChecks:
    """Live checks of a run. Each finding is printed once and kept in findings.jsonl.

    Findings named in `stop_on` end the run.
    """

    def __init__(self, run: Run, stop_on: Collection[str] = ()):
        self.run, self.stop_on = run, set(CHECK_NAMES if "all" in stop_on else stop_on)
        self.history = History(run.loaded.recipe, run.stage)
        earlier = read_lines(run.path / "metrics.jsonl", MetricsLine)  # of the run that is resumed
        self.history.rows += [line.values for line in earlier]
        self.reported = {line.check for line in read_lines(run.path / "findings.jsonl", FindingLine)}

    def on_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Check a logged row. Raises UserError for a finding on which the run shall stop."""
        self.history.rows.append(values)
        for finding in findings(self.history, step):
            if finding.check not in self.reported:
                self.reported.add(finding.check)
                self.run.logs.finding(step, finding._asdict())
                say(f"{self.run.stage}, {finding}")
            if finding.check in self.stop_on:
                raise UserError(
                    f"{self.run.stage}: stopped on {finding.check}; start again with another setting (--set and "
                    "another --out), or continue from the checkpoint with --resume and without --stop-on"
                )

    def on_samples(self, responses: Sequence[str]) -> None:
        """Keep the responses that were sampled last, for the checks."""
        self.history.responses = list(responses)


def findings(history: History, step: int) -> list[Finding]:
    """Return what is wrong after the newest row."""
    signs = []
    for check in CHECKS:
        if history.stage in check.stages and (seen := check.seen(history)) is not None:
            signs.append(Finding(check.name, step, seen, check.cause, check.remedies(history)))
    return signs


def repeated(text: str) -> float | None:
    """Return the share of a text's six-character runs that occurred in it before; None below 20 characters."""
    runs = [text[start : start + 6] for start in range(len(text) - 5)]
    return 1 - len(set(runs)) / len(runs) if len(text) >= 20 else None
