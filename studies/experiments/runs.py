"""Trains the arms of an experiment on one seed, and reads their figures."""

from pathlib import Path
from statistics import fmean

from bench.steps import telemetry
from rlhf.cli.choice import Choice
from rlhf.errors import UserError
from rlhf.recipe import PinnedRecipe
from rlhf.run.layout import METRICS
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine
from rlhf.stages import runner
from studies.experiments.table import EXPERIMENTS, Arm, Experiment, Reading
from studies.kinds import ExperimentRun


def run_seed(name: str, seed: int, data: tuple[str, ...], root: Path) -> dict[str, ExperimentRun]:
    """Train what the arms share, then each arm. Return what is read of each arm.

    An arm that changes nothing is trained beside what is shared, where other experiments find it.
    """
    experiment = EXPERIMENTS[name]
    shared = Choice(directory=experiment.recipe, data=data, seed=seed).load(quiet=True).with_changes(experiment.shared)
    base = root / "base" / str(seed)
    for stage in experiment.base:
        runner.execute(stage, shared, base, resume=True)
    return {
        arm: run_arm(experiment, shared, setting, root / name / arm / str(seed) if setting.changed else base, base)
        for arm, setting in experiment.arms.items()
    }


def run_arm(experiment: Experiment, shared: PinnedRecipe, arm: Arm, out: Path, base: Path) -> ExperimentRun:
    """Train the stages of one arm on the base that all share; return its figures, or why a stage ended early."""
    loaded = shared.with_changes(arm.changes)
    try:
        with arm.in_code():
            done = [runner.execute(stage, loaded, out, resume=True, reuse_root=base) for stage in experiment.stages]
    except UserError as error:  # such as a loss that is not a number
        return {"figures": {}, "cpu_seconds": 0.0, "ended": error.lines[0]}
    metrics = {stage: run.summary.metrics for stage, run in zip(experiment.stages, done, strict=True) if run.summary}
    folders = {stage: run.path for stage, run in zip(experiment.stages, done, strict=True)}
    return {
        "figures": {
            reading.title: logged(folders[reading.stage], reading)
            if reading.steps
            else metrics[reading.stage][reading.key]
            for reading in experiment.readings
        },
        "cpu_seconds": round(sum(map(cpu_seconds, folders.values())), 1),
    }


def logged(folder: Path, reading: Reading) -> float | None:
    """Return the mean of a logged key over the steps of a reading; None where nothing was logged."""
    first, last = reading.steps or (0, 0)
    lines = [line.values for line in read_lines(folder / METRICS, MetricsLine) if first <= line.step <= last]
    values = [value for line in lines if (value := line.get(reading.key)) is not None]
    return fmean(values) if values else None


def cpu_seconds(folder: Path) -> float:
    """Return the CPU seconds of a stage's steps and evaluations."""
    phases = (
        seconds
        for row in telemetry(folder, ())
        for key, seconds in row.items()
        if key.startswith("cpu/") and key.count("/") == 1
    )
    return sum(phases)
