"""`python -m bench.ablation`: effect of each way to save memory on real steps of SFT, alone and together."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from bench import options, provenance, steps
from bench.kinds import AblationRecord, StageSteps
from bench.rounds import in_order
from rlhf.cli import guarded
from rlhf.cli.options import WholeNumber
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.plan import published_figures
from rlhf.plan.predict import Predictor
from rlhf.plan.strategies import StrategyCost, costs_alone, one_by_one
from rlhf.recipe import PinnedRecipe, TrainingName
from rlhf.run.packages import package_versions
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import GB, gb

STAGE: TrainingName = "sft"
# The strategy "flash_attention" is torch's own kernel; the flash-attn package stands beside it in a row of its own.
PACKAGE = "flash_attn package"


def _odd(context: click.Context, parameter: click.Parameter, rounds: int) -> int:
    """Return an odd number of rounds. Raises a usage error for an even one, of which no round is the median."""
    if rounds % 2 == 0:
        raise click.BadParameter(f"{rounds} is even: of an odd number of rounds one is the median")
    return rounds


@options.command()
@options.HW
@options.RECIPE
@options.SET
@options.STEPS
@click.option(
    "--rounds", default=3, show_default=True, type=WholeNumber(min=1), callback=_odd, help="Times to measure each; odd."
)
@options.SAVE
def main(hw: str, directory: Path | None, changes: tuple[str, ...], count: int, rounds: int, save: Path | None) -> None:
    """Measure the effect of each strategy on memory and time, in turn. Running out of memory is a result.

    Predictions are made after everything is measured and saved: they take minutes of a CPU, in which a GPU would wait,
    and one that fails costs no measurement.
    """
    loaded = options.load(hw, directory, changes, on_device=True)
    variants = one_by_one(loaded, STAGE)
    if loaded.recipe.hardware.device == "cuda":
        variants[PACKAGE] = variants["none"].with_changes({"model.attention": "flash_attention_2"})
    runs: dict[str, list[StageSteps]] = {name: [] for name in variants}
    for number in range(rounds):  # in turn, so that a drift of the clocks falls on all of them
        for name, variant in in_order(variants.items(), number):
            if not runs[name] or "step_seconds" in runs[name][-1]:
                runs[name].append(_measure(name, variant, count))
    measured = {name: middle(rows) for name, rows in runs.items()}
    if save:
        write_json(save, record_of(loaded, count, rounds, measured))
    with Predictor() as predictor:
        predicted = costs_alone(predictor.predict, loaded, STAGE)
    rows = [_row(name, row, measured["none"], predicted, loaded) for name, row in measured.items()]
    columns = ("strategy, alone", "peak, GB", "memory", "time", "predicted, GB", "published")
    rows_table(f"{loaded.name} {loaded.version}: {STAGE} on the longest rows", columns, rows)


def record_of(loaded: PinnedRecipe, count: int, rounds: int, measured: dict[str, StageSteps]) -> AblationRecord:
    """Return the record of an ablation."""
    return {
        "date": provenance.today(),
        "code": provenance.code(),
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "overrides": loaded.overrides,
        "device": provenance.describe_for(loaded.recipe),
        "packages": package_versions(),
        "stage": STAGE,
        "steps": count,
        "rounds": rounds,
        "strategies": measured,
    }


def _measure(name: str, variant: PinnedRecipe, count: int) -> StageSteps:
    """Return the row of one run of a strategy. Raises UserError where it fails, but for the optional package."""
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder, working(name):
        try:
            return steps.measure(variant, (STAGE,), Path(folder), steps=count, shape="longest", preflight=False)[STAGE]
        except UserError as error:
            if name != PACKAGE:
                raise
            return {"cannot_run": str(error).splitlines()[-1]}


def middle(rows: Sequence[StageSteps]) -> StageSteps:
    """Return the row with the median time, and the times of all rounds; a row without time if there is one."""
    untimed = next((row for row in rows if "step_seconds" not in row), None)
    if untimed is not None:
        return untimed
    ordered = sorted(rows, key=lambda row: row["step_seconds"]["median"])
    return ordered[len(rows) // 2] | {"round_seconds": [row["step_seconds"]["median"] for row in rows]}


def _row(
    name: str, row: StageSteps, none: StageSteps, predicted: Mapping[str, StrategyCost], loaded: PinnedRecipe
) -> tuple[str, ...]:
    expected = gb(predicted[name].peak_bytes) if name in predicted else ""
    if "cannot_run" in row:
        return (name, "-", "cannot run", "-", expected, row["cannot_run"])
    if row.get("out_of_memory"):
        return (name, "-", "out of memory", "-", expected, "; ".join(published_figures.of_strategy(loaded, name)))
    peak = row["peak_vram_bytes"] or row["peak_rss_bytes"]
    peak_text = gb(peak) + ("" if row["peak_vram_bytes"] else " (process)")
    if name == "none" or none.get("out_of_memory"):
        return (name, peak_text, "", "", expected, "; ".join(published_figures.of_strategy(loaded, name)))
    changed = effect(row, none)
    factors = [a / b for a, b in zip(row["round_seconds"], none["round_seconds"], strict=True)]
    time = f"x {changed['time_factor']:.2f} ({min(factors):.2f} to {max(factors):.2f})"
    memory = f"{changed['memory_percent']:+.0f}%"
    return (name, peak_text, memory, time, expected, "; ".join(published_figures.of_strategy(loaded, name, changed)))


def effect(row: StageSteps, none: StageSteps) -> dict[str, float]:
    """Return what a strategy changed: memory in GB and percent, time in percent and as a factor.

    Without a GPU the memory is that of the process.
    """
    before, after = (row["peak_vram_bytes"] or row["peak_rss_bytes"] for row in (none, row))
    factor = row["step_seconds"]["median"] / none["step_seconds"]["median"]
    memory = {"memory_gb": (after - before) / GB, "memory_percent": 100 * (after / before - 1)}
    return memory | {"time_factor": factor, "time_percent": 100 * (factor - 1)}


if __name__ == "__main__":
    guarded(main)
