"""Live checks: eight ways in which training goes wrong, looked for in each row that a stage logs.

`CHECKS` is the whole list. A check is asked where its column was logged, and compares the mean of the newest values
with a threshold, or with the mean of the oldest. Thresholds are ours unless a source stands beside them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from rlhf.errors import UserError
from rlhf.recipe import Recipe
from rlhf.recipe.schema_model import Model
from rlhf.recipe.schema_online import OnlineBase
from rlhf.recipe.stages import StageName
from rlhf.run.directory import StageRun
from rlhf.run.layout import FINDINGS, METRICS
from rlhf.run.reader import read_lines
from rlhf.run.records import FindingLine, MetricsLine
from rlhf.terminal import say

FEW = 5  # values that a mean is taken of
KL_LIMIT = 5 * math.log(2)  # nats per token: 5 bits, of the published H100 guide
# Mean |difference| of log-probabilities between sampler and trainer, nats per token. A float32 trainer and a bfloat16
# server were 0.04 to 0.06 apart, two float32 ones 1e-5, and servers with another base or other settings 0.09 to 0.29.
MISMATCH = {"float32": 0.02, "bfloat16": 0.1}
MISMATCH_4BIT = 0.5  # of a server, which has the weights that NF4 rounds in training; not measured


Seen = Callable[[Sequence[float], Recipe, StageName], str | None]  # (values of the column, oldest first; …)


class Check(NamedTuple):
    """A check: its name, the column that it reads, what it sees in the column's values, and what to try."""

    name: str
    column: str
    seen: Seen
    advice: str


def mismatch_limit(model: Model, served: bool) -> float:
    """Return how far log-probabilities of sampling and training may differ on average, in nats per token."""
    return MISMATCH_4BIT if served and model.quantization == "nf4" else MISMATCH[model.dtype]


def _above(limit: float, what: str) -> Seen:
    """Return what sees a mean of the newest values above a limit."""

    def seen(values: Sequence[float], recipe: Recipe, stage: StageName) -> str | None:
        newest = fmean(values[-FEW:])
        return f"{what} is {newest:.3g}, above {limit:.3g}" if len(values) >= FEW and newest > limit else None

    return seen


def _times_first(what: str, low: float | None, high: float | None, least: float = 0.0) -> Seen:
    """Return what sees the newest mean below `low` times the oldest, or above `high` times it and above `least`."""

    def seen(values: Sequence[float], recipe: Recipe, stage: StageName) -> str | None:
        first, newest = fmean(values[:FEW]), fmean(values[-FEW:])
        fallen = low is not None and newest < low * first
        risen = high is not None and newest > max(high * first, least)
        found = len(values) >= 2 * FEW and (fallen or risen)
        return f"{what} has gone from {first:.3g} to {newest:.3g}" if found else None

    return seen


def _not_finite(values: Sequence[float], recipe: Recipe, stage: StageName) -> str | None:
    return None if math.isfinite(values[-1]) else "a logged number is not finite"


def _far_from_reference(values: Sequence[float], recipe: Recipe, stage: StageName) -> str | None:
    options = recipe.section(stage)
    limit = (options.best_kl_limit if isinstance(options, OnlineBase) else None) or KL_LIMIT
    return _above(min(limit, KL_LIMIT), "KL to the reference, in nats per token,")(values, recipe, stage)


def _other_sampler(values: Sequence[float], recipe: Recipe, stage: StageName) -> str | None:
    options = recipe.section(stage)
    served = isinstance(options, OnlineBase) and options.vllm_url is not None
    what = "the difference of log-probabilities in sampling and training, in nats,"
    return _above(mismatch_limit(recipe.model, served), what)(values, recipe, stage)


ANY = ""  # all columns: the newest number that is not finite
CHECKS = (
    Check("nan", ANY, _not_finite, "halve the learning rate"),
    Check("rising_loss", "loss", _times_first("the loss", None, 1.5), "halve the learning rate"),
    Check("high_kl", "objective/kl_per_token", _far_from_reference, "raise the coefficient of the KL"),
    Check(
        "sampling_mismatch", "rollout/logprob_diff_avg", _other_sampler, "give the sampler the trainer's base and dtype"
    ),
    Check("entropy_collapse", "policy/entropy_avg", _times_first("entropy", 0.3, None), "raise entropy_coef"),
    Check("no_signal", "groups/no_signal", _above(0.7, "the share of groups without signal"), "raise num_generations"),
    Check("clipping", "policy/clipfrac_avg", _above(0.3, "the share of clipped tokens"), "lower the learning rate"),
    Check("value_explosion", "loss/value_avg", _times_first("the value loss", None, 10, 1), "lower the critic's rate"),
)
CHECK_NAMES = tuple(check.name for check in CHECKS)


class LiveChecks:
    """Live checks of a run. Each finding is printed once and kept in findings.jsonl.

    Findings named in `stop_on` end the run.
    """

    def __init__(self, run: StageRun, stop_on: Collection[str] = ()):
        self.run, self.stop_on = run, set(CHECK_NAMES if "all" in stop_on else stop_on)
        self._columns: dict[str, list[float]] = defaultdict(list)
        for line in read_lines(run.path / METRICS, MetricsLine):  # of the run that is resumed
            self._add(line.values)
        self.reported = {line.check for line in read_lines(run.path / FINDINGS, FindingLine)}

    def on_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Check a logged row. Raises UserError for a finding on which the run shall stop."""
        self._add(values)
        recipe, stage = self.run.loaded.recipe, self.run.stage
        for check in CHECKS:
            column = self._columns[check.column]
            if (check.column != ANY and check.column not in values) or not column:
                continue
            if (seen := check.seen(column, recipe, stage)) is None:
                continue
            if check.name not in self.reported:
                self.reported.add(check.name)
                finding = FindingLine(step=step, check=check.name, seen=seen, cause=check.advice)
                self.run.logs.finding(step, finding.plain())
                say(f"{stage}, step {step}: {seen} [{check.name}]: {check.advice}")
            if check.name in self.stop_on:
                go_on = "--resume goes on" if self.run.checkpoints.steps() else "begin anew"
                raise UserError(
                    f"{stage}: stopped on {check.name} in step {step}: {check.advice}, with --set and another --out; "
                    f"{go_on} without --stop-on"
                )

    def _add(self, row: Mapping[str, float | None]) -> None:
        """Add a logged row. Figures of an evaluation are undefined where scores do not vary."""
        numbers = {key: math.nan if x is None else x for key, x in row.items() if not key.startswith("eval/")}
        broken = [x for x in numbers.values() if not math.isfinite(x)]
        self._columns[ANY] = broken or [0.0]
        for key, value in numbers.items():
            if math.isfinite(value):
                self._columns[key].append(value)
