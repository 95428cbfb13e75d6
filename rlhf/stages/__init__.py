"""One stage, one file. A stage takes a started run directory and returns its metrics and costs."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf import tracking
from rlhf.console import quiet_libraries
from rlhf.recipe import PARENTS, Loaded
from rlhf.run import Run, RunError, read_json


class Result(NamedTuple):
    metrics: dict[str, float]
    costs: dict[str, Any]
    sample: tuple[str, dict[str, str]] | None = None  # a prompt, and {"before": …, "after": …}


def execute(
    stage: str, loaded: Loaded, out: Path, *, resume: bool = False, report_to: Sequence[str] = ()
) -> tuple[dict[str, Any], Result | None, Path]:
    """Run one stage unless it is done. Returns its summary, what it returned (None if it was done), its directory."""
    run = Run(out, loaded, stage)
    with run.locked():
        summary = run.done()
        if summary is not None and not _outdated(run):
            return summary, None, run.path
        if summary is not None:
            run.set_aside()
        if getattr(loaded.recipe, stage) is None:
            raise RunError(f"{stage}: {loaded.directory} has no such stage; it starts from {loaded.recipe.model.name}")
        for parent in _parents(run):
            run.parent(parent)
        tracking.check(report_to)
        with quiet_libraries():
            from rlhf.models.loading import set_up_torch
            from rlhf.telemetry import device_facts

            device = set_up_torch(loaded.recipe)
            run.start(resume, sys.argv, device_facts(device))
            project = f"{loaded.name}-{loaded.version}"
            with tracking.trackers(report_to, run.path, project, loaded.recipe.model_dump(mode="json")) as logs:
                run.trackers = logs
                result: Result = importlib.import_module(f"rlhf.stages.{stage}").run_stage(run, device)
        return run.finish(result.metrics, result.costs), result, run.path


def trained_policies(run: Run) -> list[str]:
    """The finished stages whose policies an evaluation compares with SFT."""
    return [stage for stage in ("ppo", "dpo") if (run.root / stage / "summary.json").exists()]


def _outdated(run: Run) -> bool:
    """An evaluation made before another policy was trained."""
    manifest = read_json(run.path / "manifest.json") or {}
    return run.stage == "evaluate" and manifest.get("policies") != trained_policies(run)


def _parents(run: Run) -> list[str]:
    """The stages that must be finished, nearest first, so that an error names the one to run now."""
    parents = list(PARENTS[run.stage])
    if run.stage == "merge":
        parents.append(run.loaded.recipe.merge.stage)
    return [parent for parent in parents if getattr(run.loaded.recipe, parent) is not None]
