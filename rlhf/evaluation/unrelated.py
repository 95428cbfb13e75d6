"""What was not trained: whether a policy still solves checked tasks as its start does, beyond the noise of sampling."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

from rlhf.evaluation.best_of_n import PerPrompt
from rlhf.recipe.schema_evaluate import UnrelatedTask
from rlhf.recipe.stages import PolicyLabel
from rlhf.run.evidence import NO_VERDICT
from rlhf.stats import Z95
from rlhf.terminal.wording import number

ANSWERS_EACH = 3  # answers of each policy to each prompt; what differs between them is noise
MEAN, CHANGE, NOISE = "unrelated_", "change_of_unrelated_", "noise_of_unrelated_"  # of metrics, before the task's name


class Change(NamedTuple):
    """What a policy gets in a task more than its start, and how much more or less chance alone gives (95 %)."""

    task: str
    change: float
    noise: float

    @property
    def is_loss(self) -> bool:
        """Return whether the policy lost more than chance explains."""
        return self.change < -self.noise


def task_name(task: UnrelatedTask) -> str:
    """Return the name of a task in metrics, that of its file."""
    return Path(task.file).stem


def changes(start: Mapping[str, PerPrompt], policy: Mapping[str, PerPrompt]) -> list[Change]:
    """Return the change of each task from the rewards of the repeats by prompt, for the same prompts on both sides.

    A prompt counts where each side has two repeats with a verdict; a task without such a prompt has no change.
    The change is the difference of the means over prompts. The noise is z·√(V_start + V_policy), with V = Σ s²/r / n²
    for the variance s² between the r repeats of each of n prompts: it is that of sampling again, and not of other
    prompts.
    """
    found = []
    for task, of_start in start.items():
        judged = [(a, b) for a, b in zip(of_start, policy[task], strict=True) if len(a) > 1 and len(b) > 1]
        if judged:
            before, after = ([pair[side] for pair in judged] for side in (0, 1))
            noise = Z95 * math.sqrt(_variance_of_mean(before) + _variance_of_mean(after))
            found.append(Change(task, mean_of(after) - mean_of(before), noise))
    return found


def mean_of(repeats: PerPrompt) -> float:
    """Return the mean reward of a task over its prompts, those with a verdict; NaN without any."""
    means = [fmean(rewards) for rewards in repeats if rewards]
    return fmean(means) if means else math.nan


def _variance_of_mean(repeats: PerPrompt) -> float:
    return math.fsum(variance(rewards) / len(rewards) for rewards in repeats) / len(repeats) ** 2


def metrics_of(
    label: PolicyLabel, start: PolicyLabel, rewards: Mapping[PolicyLabel, Mapping[str, PerPrompt]]
) -> dict[str, float]:
    """Return the metrics of a policy, given the rewards by policy and task: means, and changes of what learned."""
    metrics = {f"{MEAN}{task}": mean_of(repeats) for task, repeats in rewards[label].items()}
    for task, repeats in rewards[label].items():
        if unjudged := 1 - fmean(map(len, repeats)) / ANSWERS_EACH:
            metrics[f"{MEAN}{task}{NO_VERDICT}"] = unjudged
    for found in changes(rewards[start], rewards[label]) if label not in ("base", start) else ():
        metrics |= {f"{CHANGE}{found.task}": found.change, f"{NOISE}{found.task}": found.noise}
    return metrics


def changes_in(metrics: Mapping[str, float | None], policy: str) -> list[Change]:
    """Return the changes that an evaluation has written about a policy."""
    found = []
    for key, change in metrics.items():
        of, _, task = key.partition(CHANGE)
        noise = metrics.get(f"{policy}/{NOISE}{task}")
        if of == f"{policy}/" and change is not None and noise is not None:
            found.append(Change(task, change, noise))
    return found


def verdict(found: Sequence[Change]) -> str:
    """Return in words what a policy lost of all tasks: of each loss the mean reward, and the noise."""
    losses = [f"{c.task} {number(c.change)} (noise {number(c.noise)})" for c in found if c.is_loss]
    return f"loss beyond noise: {', '.join(losses)}" if losses else "no loss beyond noise"
