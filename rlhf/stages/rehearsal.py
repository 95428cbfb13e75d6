"""The stages of a dress rehearsal, each in a process of its own, and what they showed."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlhf.process import children
from rlhf.process.task import run_child, task_of
from rlhf.recipe import PinnedRecipe, parents
from rlhf.recipe.stages import STAGES, TRAINING_STAGES
from rlhf.run.directory import StageRun
from rlhf.run.finished import read_manifest, read_summary

STOPPED = 128 + signal.SIGTERM  # exit code of a stage that was stopped
RLHF = (sys.executable, "-P", "-m", "rlhf.cli")


class Outcome(NamedTuple):
    """What the rehearsal of a stage, or of the report, showed."""

    stage: str
    seconds: float
    code: int  # of its process
    resumed: str = ""  # the checkpoint that it was resumed from
    found: str = ""


def outcomes(loaded: PinnedRecipe, root: Path) -> Iterator[Outcome]:
    """Run every stage of a recipe below `root`, then the report, and yield what each showed.

    A stage that trains is stopped at its first checkpoint and resumed. One that builds on a stage that failed is not
    run, and then there is no report either.
    """
    failed: list[str] = []
    for stage in (stage for stage in STAGES if loaded.recipe.section(stage) is not None):
        missing = [parent for parent in parents(loaded.recipe, stage) if parent in failed]
        if missing:
            outcome = Outcome(stage, 0.0, 1, found=f"not run: it builds on {missing[0]}")
        else:
            outcome = _of_stage(StageRun(root, loaded, stage))
        failed += [stage] if outcome.code else []
        yield outcome
    if not failed:
        began = time.monotonic()
        code = children.run_child([*RLHF, "report", str(root / loaded.name / loaded.version)])
        yield Outcome("report", time.monotonic() - began, code, found=_failure(code))


def _of_stage(run: StageRun) -> Outcome:
    """Run a stage, in two parts if it trains, and return what it showed. A number that is not finite ends it."""
    began = time.monotonic()
    task = task_of(run.loaded, run.stage, run.run_directory.parents[1], stop_on=["nan"])
    if run.stage in TRAINING_STAGES:
        code = run_child(task, stop_when=lambda: bool(run.checkpoints.steps()))
        if code == STOPPED:
            code = run_child(task.of(run.stage, resume=True))
    else:
        code = run_child(task)
    seconds, summary = time.monotonic() - began, read_summary(run.path)
    if code or summary is None:
        return Outcome(run.stage, seconds, 128 - code if code < 0 else code or 1, found=_failure(code or 1))
    # A gain is not defined where all scores are equal.
    if undefined := [key for key, value in summary.metrics.items() if value is None and "gain" not in key]:
        return Outcome(run.stage, seconds, 1, found=f"not finite: {', '.join(undefined)}")
    resumed = read_manifest(run.path).resumed_from or ""
    return Outcome(run.stage, seconds, code, resumed, ", ".join(summary.findings or ()))


def _failure(code: int) -> str:
    """Return in words that a process failed; "" if it did not."""
    return f"{children.ending_in_words(code)}; its error stands above" if code else ""
