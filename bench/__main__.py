"""`python -m bench`: a few real steps of each stage, beside what is published, predicted and was measured before."""

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench import options, records, steps
from bench.records import StageSteps
from rlhf.cli import guarded
from rlhf.plan import projection
from rlhf.plan.phases import PredictedStage, PredictionError
from rlhf.plan.predict import Predictor
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.published import TIMES, verdict_of
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.terminal import screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import GB, gb

MORE_MEMORY, MORE_TIME = 0.03, 0.10  # shares above the record before; a time also beyond both records' quartiles
NOTE = (
    "step: median after the warm-up. CPU s: of all threads of the process. tokens: real ones. HFU, MBU: shares of a "
    "measured product's and a measured copy's rate (--shape longest). hours: projected from the mean step (--shape hh)."
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options.recipe
@options.stages(TRAINING_STAGES)
@click.option("--steps", "count", default=8, show_default=True, type=click.IntRange(min=2), help="After the warm-up.")
@click.option("--shape", default="hh", show_default=True, type=click.Choice(["hh", "longest"]), help="Length of rows.")
@options.OUT
@click.option("--save", is_flag=True, help="Put the record into results/; needs committed code.")
def main(
    hw: str,
    guide: bool,
    directory: Path | None,
    changes: tuple[str, ...],
    stages: tuple[StageName, ...],
    count: int,
    shape: LengthsShape,
    out: Path | None,
    save: bool,
) -> None:
    """Take a few real steps of each stage on random weights, and say what they cost.

    Exit code 1: a stage does not fit, or costs more than in the newest record of the same recipe on this machine.
    """
    loaded = options.load(hw, guide, directory, changes, on_device=True)
    if save:
        records.check_savable(loaded)
    record = measure(loaded, options.stages_of(loaded, stages, TRAINING_STAGES), count, shape)
    if out:  # before it is compared, which may fail
        records.save(record, out)
    show(loaded, record)
    earlier = records.newest_before(record)
    problems = [f"{stage}: out of memory" for stage, row in record["stages"].items() if row.get("out_of_memory")]
    problems += [*losses(earlier["stages"], record["stages"], earlier["date"])] if earlier else []
    if save:
        screen.OUT.print(f"written to {records.save(record, records.RESULTS / records.place(record))}", style="dim")
    for line in problems:
        print(line, file=sys.stderr)
    sys.exit(bool(problems))


def measure(loaded: PinnedRecipe, stages: Sequence[StageName], count: int, shape: LengthsShape) -> dict[str, Any]:
    """Run a benchmark. Return its record: the device's rates, and time and memory of each stage."""
    with quiet_libraries():
        import torch

        from bench.ceilings import ceilings
        from rlhf.process.torch_setup import device_of

    device = device_of(loaded.recipe)
    if loaded.recipe.hardware.threads:
        torch.set_num_threads(loaded.recipe.hardware.threads)
    with working("measuring what the device can do"):
        best = ceilings(device, getattr(torch, loaded.recipe.model.dtype))
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder, working(f"taking steps of {', '.join(stages)}"):
        measured = steps.measure(loaded, stages, Path(folder), steps=count, shape=shape)
        manifest = records.read(next(Path(folder).glob("*/*/*/manifest.json")))
    record = records.new("steps", loaded, device) | {
        "shape": shape,
        "steps": count,
        "packages": manifest["packages"],
        "python": manifest["python"],
        "ceilings": best,
        "stages": measured,
    }
    with Predictor() as predictor:
        for stage, row in measured.items():
            add_derived(loaded, stage, row, predicted_or_none(predictor, loaded, stage), best, shape)
    return record


def predicted_or_none(predictor: Predictor, loaded: PinnedRecipe, stage: StageName) -> PredictedStage | None:
    """Return the prediction of a stage. If there is none, say why and return None: what was measured is kept."""
    try:
        return predictor.predict(loaded, stage)
    except PredictionError as error:
        print(f"{error}; going on without", file=sys.stderr)
        return None


def add_derived(
    loaded: PinnedRecipe,
    stage: StageName,
    row: StageSteps,
    predicted: PredictedStage | None,
    best: records.Ceilings,
    shape: str,
) -> None:
    """Add the predicted peak, HFU and MBU (of the longest rows) and projected hours (of usual ones) to a row."""
    row["predicted_peak_bytes"] = predicted.whole.peak_bytes if predicted else None
    if row.get("out_of_memory"):
        return
    assert stage in TRAINING_STAGES  # as every stage with measured steps
    if shape == "longest" and predicted:  # operations are counted on the longest rows
        recipe, found = loaded.recipe, predicted.phases
        times = {phase: n for phase, n in projection.times_a_step(recipe, stage).items() if phase in found}
        flops = sum(found[phase].work.flops * n for phase, n in times.items())
        row["hfu"] = flops / sum(row["phase_seconds"][phase]["median"] for phase in times) / best["flops"]
        if options := recipe.online().get(stage):
            steps = (options.response_length - 1) * math.ceil(options.batch_size / options.rollout_batch_size)
            moved = steps * projection.decoding_step_bytes(recipe, stage, predicted, longest=True)
            row["mbu"] = moved / row["phase_seconds"]["rollout/decode"]["median"] / best["bandwidth"]
    elif shape == "hh" and (total := projection.optimizer_steps(loaded.recipe, stage)) is not None:
        row["hours"] = total * row["tokens_per_step"] / row["tokens_per_second"] / 3600


def show(loaded: PinnedRecipe, record: Mapping[str, Any]) -> None:
    """Print what the stages cost, and published figures for the same settings beside it."""
    stages: Mapping[StageName, StageSteps] = record["stages"]
    clock = "CPU s" if all(row.get("clock", "cpu") == "cpu" for row in stages.values()) else "s"
    columns = ("stage", f"step, {clock}", f"tokens/{clock[-1]}", "HFU", "MBU", "peak, GB", "predicted, GB", "hours")
    title = f"{loaded.name} {loaded.version} on {records.device_text(record['device'])}"
    rows_table(title, columns, [_cells(stage, row) for stage, row in stages.items()])
    if published := [*published_rows(loaded, stages)]:
        rows_table("published for these settings", ("stage", "figure", "published", "measured", "verdict"), published)
    screen.OUT.print(NOTE, style="dim")


def _cells(stage: str, row: StageSteps) -> tuple[str, ...]:
    predicted = gb(row.get("predicted_peak_bytes") or 0)
    if row.get("out_of_memory"):
        return (stage, *["-"] * 4, "OUT OF MEMORY", predicted, "-")
    vram, time = row["peak_vram_bytes"], row["step_seconds"]
    shares = ["-" if (share := row.get(key)) is None else f"{share:.0%}" for key in ("hfu", "mbu")]
    return (
        stage,
        f"{time['median']:.3g} [{time['low']:.3g}, {time['high']:.3g}]",
        f"{row['tokens_per_second']:,.0f}",
        *shares,
        gb(vram) if vram else f"{gb(row['peak_rss_bytes'])} (process)",
        predicted,
        f"{hours:.2f}" if (hours := row.get("hours")) is not None else "-",
    )


def published_rows(loaded: PinnedRecipe, stages: Mapping[StageName, StageSteps]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each published cost of the measured stages; hours are projected here, and not judged."""
    for figure in loaded.figures:
        row = None if figure.stage == "all" else stages.get(figure.stage)
        if row is None or row.get("out_of_memory") or figure.metric is None:
            continue
        if (value := costs(row).get(figure.metric)) is not None:
            others = [f for f in loaded.figures if (f.stage, f.metric) == (figure.stage, figure.metric)]
            verdict = "" if figure.metric in TIMES else str(verdict_of(figure, value, others))
            yield figure.stage, figure.title, figure.text(), f"{value:.3g}", verdict


def costs(row: StageSteps) -> dict[str, float]:
    """Return what a stage's steps cost, in GB and hours, by the metric of a published figure."""
    found = {f"component_gb.{name}": size / GB for name, size in (row.get("component_bytes") or {}).items()}
    for metric, size in (("peak_vram_gb", row["peak_vram_bytes"]), ("adapter_gb", row.get("adapter_bytes"))):
        if size:
            found[metric] = size / GB
    hours = row.get("hours")
    return found if hours is None else found | {"hours": hours}


def losses(before: Mapping[StageName, StageSteps], after: Mapping[StageName, StageSteps], date: str) -> Iterator[str]:
    """Yield a line for each stage that no longer fits, or whose peak or step is larger than before.

    A step is slower when its median is more than MORE_TIME above the old one and the two ranges from quartile to
    quartile do not overlap. What a process holds on a CPU differs by a tenth between runs of one code, and is not
    compared; `bench.against` counts what tensors hold there.
    """
    for stage, new in after.items():
        old = before.get(stage)
        if old is None or old.get("out_of_memory"):
            continue
        if new.get("out_of_memory"):
            yield f"{stage}: no longer fits (it did on {date})"
            continue
        a, b = old["peak_vram_bytes"], new["peak_vram_bytes"]
        if a and b and b / a - 1 > MORE_MEMORY:
            yield f"{stage}: peak {b / a - 1:+.1%} since {date}, {gb(a)} to {gb(b)} GB"
        x, y = old["step_seconds"], new["step_seconds"]
        if y["median"] / x["median"] - 1 > MORE_TIME and y["low"] > x["high"]:
            yield f"{stage}: step {y['median'] / x['median'] - 1:+.0%} since {date}, to {y['median']:.3g} s"


if __name__ == "__main__":
    guarded(main)
