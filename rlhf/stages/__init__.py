"""One stage, one file. A stage takes a started run directory and returns its metrics and costs."""

import importlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf import cuda, distributed, tracking
from rlhf.console import quiet_libraries
from rlhf.recipe import Loaded, parents
from rlhf.run import Follower, Run, RunError
from rlhf.watch import Watch

FULL_DISK_BYTES = 1_000_000


class Result(NamedTuple):
    metrics: dict[str, float]
    costs: dict[str, Any]
    sample: tuple[str, dict[str, str]] | None = None  # a prompt, and {"before": …, "after": …}


def execute(
    stage: str,
    loaded: Loaded,
    out: Path,
    *,
    resume: bool = False,
    report_to: Sequence[str] = (),
    preflight: Callable[[], int | None] = lambda: None,
    stop_on: Sequence[str] = (),
    parents_root: Path | None = None,
) -> tuple[dict[str, Any], Result | None, Path]:
    """Run one stage unless it is done. Returns its summary, what it returned (None if it was done), its directory.

    `preflight` predicts the bytes of the stage's peak, or raises RunError, before anything is loaded. `stop_on`: names
    of checks (rlhf/watch.py) whose findings end the stage; `all` for any. `parents_root`: another root of runs, whose
    finished stages are used where `out` has none.
    """
    cuda.set_environment(loaded.recipe)
    run = (Follower if distributed.rank() else Run)(out, loaded, stage, parents_root)
    if getattr(loaded.recipe, stage) is None:
        raise RunError(f"{stage}: {loaded.directory} has no such stage; it starts from {loaded.recipe.model.name}")
    with run.locked():
        summary = run.done()
        if summary is not None:
            return summary, None, run.path
        with distributed.joined(loaded, stage):
            for parent in parents(loaded.recipe, stage):
                run.parent(parent)
            tracking.check(report_to)
            with quiet_libraries():
                from rlhf.models.loading import device_of, set_up_torch
                from rlhf.telemetry import device_facts

                device_of(loaded.recipe)  # without a GPU nothing more need be predicted
                predicted = distributed.from_main(preflight)
                device = set_up_torch(loaded.recipe)
                devices = {"processes": distributed.world(), "engine": loaded.recipe.hardware.engine}
                run.start(resume, sys.argv, device_facts(device) | (devices if distributed.world() > 1 else {}))
                run.resumed_from, run.resumed_data = distributed.from_main(lambda: (run.resumed_from, run.resumed_data))
                project = f"{loaded.name}-{loaded.version}"
                told = report_to if run.leads else ()
                with tracking.trackers(told, run.path, project, loaded.recipe.model_dump(mode="json")) as logs:
                    watch = Watch(run, stop_on)
                    run.trackers, run.readers = [*logs, watch.see], [watch.read]
                    result = _run(run, device)
            return run.finish(result.metrics, result.costs, predicted), result, run.path


def _run(run: Run, device: Any) -> Result:
    try:
        return importlib.import_module(f"rlhf.stages.{run.stage}").run_stage(run, device)
    except Exception as error:
        if shutil.disk_usage(run.path).free < FULL_DISK_BYTES:  # libraries report it in many ways
            raise RunError(f"{run.path}: the disk is full; make room and continue with --resume") from error
        if type(error).__name__ == "OutOfMemoryError":  # torch's, named without importing it
            raise RunError(
                f"{run.stage}: out of memory on the GPU; `rlhf plan --recipe {run.loaded.directory} --fastest`, with "
                "the same --set, looks for settings that fit, and nvidia-smi shows who else is on the card"
            ) from error
        raise
