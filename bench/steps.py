"""Times of real steps on random weights. Each stage runs in a fresh process; its run directory has the figures.

Seconds are CPU seconds of the process on a CPU, and wall seconds on a GPU; each row names its clock.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.records import Spread, StageSteps, read
from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.plan.rehearsal.short_runs import few_steps
from rlhf.process.children import child_environment
from rlhf.process.exhaustion import EXHAUSTED
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.stages import EVALUATE, TRAINING_STAGES
from rlhf.run.layout import SUMMARY, TELEMETRY

MEASURED_STAGES: tuple[StageName, ...] = (*TRAINING_STAGES, EVALUATE)  # those that take steps
WARM_UP = 2  # steps that are not counted: they choose kernels, create optimizer states and capture graphs


def measure(
    loaded: PinnedRecipe,
    stages: Sequence[StageName],
    out: Path,
    *,
    steps: int,
    shape: LengthsShape,
    supervised_steps: int | None = None,
    measured: Sequence[StageName] | None = None,
    preflight: bool = True,
) -> dict[StageName, StageSteps]:
    """Run a few steps of the stages on random weights below `out`; return what `measure_short` does.

    `shape` chooses the lengths of rows (`data.lengths`). `steps` follow those of the warm-up; `supervised_steps` are
    those of stages that do not sample, if others. Parents take one step, but for those that are `measured` below `out`,
    now or in another call; without it these are `stages`.
    """
    supervised = WARM_UP + (steps if supervised_steps is None else supervised_steps)
    timed = stages if measured is None else measured
    adapters_alone = [stage for stage in with_parents(loaded, timed) if stage not in timed]
    once = few_steps(loaded.recipe, 1, shape)
    short = loaded.with_changes(
        few_steps(loaded.recipe, WARM_UP + steps, shape, supervised)
        | {key: value for key, value in once.items() if key.partition(".")[0] in adapters_alone}
    )
    return measure_short(short, stages, out, preflight=preflight)


def measure_short(
    short: PinnedRecipe, stages: Sequence[StageName], out: Path, *, preflight: bool = True, warm_up: int = WARM_UP
) -> dict[StageName, StageSteps]:
    """Run the stages of a recipe of few steps one after another below `out`. Those that are finished there are kept.

    Return `stage_steps` of each stage, or {"out_of_memory": True}. A stage whose parent did not fit is out of memory
    too. Parents that are not among `stages` are run for their adapters only.
    """
    by_stage: dict[StageName, StageSteps] = {}
    too_large: set[StageName] = set()
    for stage in with_parents(short, [stage for stage in stages if stage in TRAINING_STAGES]):
        parents = {*recipes.parents(short.recipe, stage)}
        if parents & too_large or _run(short, stage, out, preflight) == "out of memory":
            too_large.add(stage)
        if stage in stages:
            folder = out / short.name / short.version / stage
            by_stage[stage] = {"out_of_memory": True} if stage in too_large else stage_steps(folder, warm_up)
    return by_stage


def with_parents(loaded: PinnedRecipe, stages: Sequence[StageName]) -> list[StageName]:
    """Return the stages with those that they build on, in the order in which they can run."""
    needed = set(stages)
    for stage in stages:
        needed |= {*recipes.parents(loaded.recipe, stage)}
        if stage == EVALUATE:
            needed |= {*loaded.recipe.policies()}
    return [stage for stage in MEASURED_STAGES if stage in needed]


def stage_steps(folder: Path, warm_up: int = WARM_UP) -> StageSteps:
    """Return seconds of the steps after the warm-up by phase, tokens of a step and peaks, from a finished stage."""
    summary = read(folder / SUMMARY)
    lines = (folder / TELEMETRY).read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > warm_up]
    if not rows:
        raise UserError(f"{folder}: all of its steps are warm-up: it takes more than {warm_up}")
    cpu = summary["peak_vram_bytes"] is None
    names = ["train"] if "train" in rows[0] else ["rollout", "rollout/prefill", "rollout/decode", "score", "update"]
    prefix = "cpu/" if cpu and f"cpu/{names[0]}" in rows[0] else ""  # steadier than the wall on a shared machine
    phases = {name: [row[prefix + name] for row in rows] for name in names}
    tops = [name for name in names if "/" not in name]
    step = [sum(values) for values in zip(*(phases[name] for name in tops), strict=True)]
    return {
        "clock": "cpu" if prefix else "wall",
        "step_seconds": spread(step),
        "phase_seconds": {name: spread(values) for name, values in phases.items()},
        "tokens_per_step": statistics.mean(row["tokens"] for row in rows),
        "tokens_per_second": sum(row["tokens"] for row in rows) / sum(step),
        "peak_vram_bytes": summary["peak_vram_bytes"],
        "phase_peak_bytes": summary["phase_peak_bytes"],
        "reserved_vram_bytes": summary["reserved_vram_bytes"],
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "component_bytes": summary.get("component_bytes"),
        "adapter_bytes": sum(file.stat().st_size for file in folder.glob("adapter/*.safetensors")) or None,
    }


def spread(values: Sequence[float]) -> Spread:
    """Return the median, quartiles and number of repeated measurements."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": median, "low": low, "high": high, "n": len(values)}


def said_by(stage: StageName, out: Path) -> Path:
    """Return the file with what a stage that was run below `out` has said on stderr."""
    return out / f"{stage}.stderr"


def _run(loaded: PinnedRecipe, stage: StageName, out: Path, preflight: bool) -> str:
    """Run a stage. Return `done`, or `out of memory`. Raises UserError with the end of stderr for any other failure."""
    command = [sys.executable, "-m", "rlhf.cli", "run", stage, "--recipe", str(loaded.directory), "--out", str(out)]
    command += ["--if-needed", *([] if preflight else ["--no-preflight"])]
    command += [
        part for key, value in loaded.overrides.items() for part in ("--set", f"{key}={recipes.as_yaml(value)}")
    ]
    environment = child_environment(HF_HUB_OFFLINE="1")
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    said_by(stage, out).write_text(process.stderr, encoding="utf-8")
    if process.returncode == EXHAUSTED:
        return "out of memory"
    if process.returncode:
        raise UserError(f"{stage}: {process.stderr.strip()[-2000:]}")
    return "done"
