"""The stages of a dress rehearsal, each in a process of its own, and what they showed."""

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rlhf.process import children
from rlhf.process.task import run_child, task_of
from rlhf.recipe import PinnedRecipe, parents
from rlhf.recipe.stages import STAGES, TRAINING_STAGES
from rlhf.run import reader
from rlhf.run.directory import StageRun
from rlhf.run.finished import read_manifest, read_summary
from rlhf.run.layout import METRICS
from rlhf.run.records import MetricsLine

STOPPED = 128 + signal.SIGTERM  # exit code of a stage that was stopped
RLHF = (sys.executable, "-P", "-m", "rlhf.cli")


class Outcome(NamedTuple):
    """What the rehearsal of a stage, or of the report, showed."""

    stage: str
    seconds: float
    code: int  # of its process
    not_finite: list[str] | None = None  # keys with a NaN or infinity; None where nothing was computed
    resumed: str = ""  # the checkpoint that it was resumed from
    found: str = ""

    @property
    def is_well(self) -> bool:
        """Return whether it ended, and all that it computed is finite."""
        return self.code == 0 and not self.not_finite


def outcomes(loaded: PinnedRecipe, root: Path) -> Iterator[Outcome]:
    """Run every stage of a recipe below `root`, then the report, and yield what each showed.

    A stage that trains is stopped at its first checkpoint and resumed. One that builds on a stage that failed is not
    run, and then there is no report either.
    """
    ill: list[str] = []
    for stage in (stage for stage in STAGES if loaded.recipe.section(stage) is not None):
        missing = [parent for parent in parents(loaded.recipe, stage) if parent in ill]
        if missing:
            outcome = Outcome(stage, 0.0, 1, found=f"not run: it builds on {missing[0]}")
        else:
            outcome = _of_stage(StageRun(root, loaded, stage))
        ill += [] if outcome.is_well else [stage]
        yield outcome
    if not ill:
        began = time.monotonic()
        code = children.run_child([*RLHF, "report", str(root / loaded.name / loaded.version)])
        yield Outcome("report", time.monotonic() - began, code, found=_failure(code))


def _of_stage(run: StageRun) -> Outcome:
    """Run a stage, in two parts if it trains an adapter, and return what it showed."""
    began, loaded = time.monotonic(), run.loaded
    task = task_of(loaded, run.stage, run.run_directory.parents[1])
    if run.stage in TRAINING_STAGES:
        code = run_child(task, stop_when=lambda: bool(run.checkpoints.steps()))
        if code == STOPPED:
            code = run_child(task.of(run.stage, resume=True))
    else:
        code = run_child(task)
    seconds, summary = time.monotonic() - began, read_summary(run.path)
    if code or summary is None:
        return Outcome(run.stage, seconds, 128 - code if code < 0 else code or 1, found=_failure(code or 1))
    lines = reader.read_lines(run.path / METRICS, MetricsLine)
    not_finite = [key for values in (*(line.values for line in lines), summary.metrics) for key in _undefined(values)]
    resumed = read_manifest(run.path).resumed_from or ""
    return Outcome(run.stage, seconds, code, [*dict.fromkeys(not_finite)], resumed, ", ".join(summary.findings or ()))


def _undefined(values: Mapping[str, float | None]) -> list[str]:
    """Return the keys whose values were not finite, but for gains: they are undefined where scores do not vary."""
    return [key for key, value in values.items() if value is None and "gain" not in key]


def _failure(code: int) -> str:
    """Return in words that a process failed; "" if it did not."""
    return f"{children.ending_in_words(code)}; its error stands above" if code else ""
