"""`python -m bench`: time and memory of each stage of a recipe, compared with published figures and earlier records."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from typing_extensions import TypedDict

from bench import baseline, compare, costs, options, provenance, steps, targets
from bench.clocks import clock_of
from bench.derived import derived_figures
from bench.kinds import StageSteps, StepsRecord
from bench.paths import RESULTS
from bench.reading import read
from rlhf.cli import guarded
from rlhf.cli.options import OUTPUT, PRICE, OneOf, WholeNumber
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.plan import side_by_side
from rlhf.plan.phases import Predict, PredictedStage, PredictionError
from rlhf.plan.predict import Predictor
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.terminal import screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb


@options.command()
@options.HW
@options.RECIPE
@options.stages(TRAINING_STAGES)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key; such a record is not saved.")
@click.option("--steps", "count", default=8, show_default=True, type=WholeNumber(min=2), help="Steps after warm-up.")
@click.option("--shape", default="hh", show_default=True, type=OneOf(["hh", "longest"]), help="Length of rows.")
@click.option("--out", type=OUTPUT, metavar="FILE", help="Also write the record there, as JSON.")
@click.option(
    "--save", is_flag=True, help="Put the record into results/; needs committed code and an unchanged recipe."
)
@PRICE
def main(
    hw: str,
    directory: Path | None,
    stages: tuple[StageName, ...],
    changes: tuple[str, ...],
    count: int,
    shape: LengthsShape,
    out: Path | None,
    save: bool,
    price: float | None,
) -> None:
    """Take a few real steps of each stage on random weights and compare what they cost with what is published.

    Exit code 1: a cost is worse than every figure that is published for it, or has grown since an earlier record.
    """
    loaded = options.load(hw, directory, changes, on_device=True)
    if save and loaded.modified:
        raise UserError("--save: only an unchanged recipe makes a record: leave out --set or --save")
    if save:
        provenance.require_committed_code()
    record = measure(loaded, options.stages_of(loaded, stages, TRAINING_STAGES), count, shape)
    if out:  # before the record is compared, which may fail
        write_json(out, record)
    problems = show(loaded, record, price)
    earlier = comparable(loaded, record)
    problems += compare.losses_since(earlier, record)
    if others := [other for other in baseline.before(record, RESULTS) if other not in earlier]:
        title = "records of another machine or setting, with which nothing is compared"
        rows_table(title, ("date", "machine", "threads", "stage: tokens/s"), map(beside_row, others))
    if not earlier and not loaded.modified:
        print(
            f"no record in {folder_of(record)} can be compared with this one of {compare.machine(record)}: nothing was "
            "compared with an earlier benchmark; --save stores this one",
            file=sys.stderr,
        )
    if save:
        file = new_file(record)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, record)
        screen.OUT.print(f"written to {file}", style="dim")
    for line in problems:
        print(line, file=sys.stderr)
    sys.exit(bool(problems))


def show(loaded: PinnedRecipe, record: StepsRecord, price: float | None) -> list[str]:
    """Print the tables of a record. Return the stages that did not fit and the costs that are worse than published."""
    stages = record["stages"]
    title = f"{loaded.name} {loaded.version} on {provenance.device_name(record['device'])}"
    rows_table(title, stage_columns(stages), stage_rows(stages))
    compared = costs.comparisons(loaded, stages, price)
    if compared:
        title = "published figures; hours and cost are projected"
        rows_table(title, ("stage", "figure", "published", "here", "verdict"), costs.figure_rows(compared))
    here = {} if loaded.modified else side_by_side.of_record(record, "this run")
    side_by_side.show(side_by_side.lines(loaded.directory.parents[1], RESULTS, loaded.name, here))
    if target_rows := targets.rows(loaded.name, stages):
        rows_table("targets, reached at a ratio of 1", ("", "target", "measured", "ratio"), target_rows)
    screen.OUT.print(NOTE, style="dim")
    return [*out_of_memory(stages), *costs.worse(compared)]


NOTE = (
    "step: median after the warm-up. CPU s: of all threads of the process. tokens: real ones. MFU: operations of the "
    "longest rows, without those that checkpointing repeats, over the rate of a measured product (HFU, in the record: "
    "with them); MBU: what decoding moves over a measured copy's (both with --shape longest). hours: the mean "
    "step times the recipe's steps, projected (with --shape hh)."
)


class _Manifest(TypedDict):
    """The keys of a run's manifest.json that a record repeats."""

    packages: dict[str, str]
    python: str


def measure(loaded: PinnedRecipe, stages: Sequence[StageName], count: int, shape: LengthsShape) -> StepsRecord:
    """Run a benchmark. Return its record: provenance, limits of the device, time and memory of each stage."""
    with quiet_libraries():
        import torch

        from bench.ceilings import ceilings
        from rlhf.process.torch_setup import device_of

    device = device_of(loaded.recipe)
    if loaded.recipe.hardware.threads:
        torch.set_num_threads(loaded.recipe.hardware.threads)
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder:
        with working("measuring what the device can do"):
            best = ceilings(device, getattr(torch, loaded.recipe.model.dtype))
        with working(f"taking {steps.WARM_UP + count} steps of {', '.join(stages)}"):
            measured = steps.measure(loaded, stages, Path(folder), steps=count, shape=shape)
        manifest = read(next(Path(folder).glob("*/*/*/manifest.json")), _Manifest)
    record: StepsRecord = {
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "modified": loaded.modified,
        "overrides": loaded.overrides,
        "date": provenance.today(),
        "shape": shape,
        "steps": count,
        "code": provenance.code(),
        "packages": manifest["packages"],
        "python": manifest["python"],
        "device": provenance.describe(device),
        "ceilings": best,
        "stages": measured,
    }
    with Predictor() as predictor:
        for stage, row in measured.items():
            row |= derived_figures(loaded, stage, row, predicted_or_none(predictor.predict, loaded, stage), best, shape)
    return record


def predicted_or_none(predict: Predict, loaded: PinnedRecipe, stage: StageName) -> PredictedStage | None:
    """Return the prediction of a stage. If there is none, say why and return None: what was measured is kept."""
    try:
        return predict(loaded, stage)
    except PredictionError as error:
        print(f"{error}; going on without", file=sys.stderr)
        return None


def stage_columns(stages: Mapping[StageName, StageSteps]) -> tuple[str, ...]:
    """Return the headings of `stage_rows`; they name the clock of the seconds."""
    clock = clock_of(stages.values())
    return ("stage", f"step, {clock} s", f"tokens/{clock} s", "MFU", "MBU", "peak, GB", "predicted", f"{clock} hours")


def stage_rows(stages: Mapping[StageName, StageSteps]) -> list[tuple[str, ...]]:
    """Return a table row for each stage."""
    rows = []
    for stage, row in stages.items():
        peak = row["predicted_peak_bytes"]
        predicted = gb(peak or 0)
        if row.get("out_of_memory"):
            rows.append((stage, *["-"] * 4, "OUT OF MEMORY", predicted, "-"))
            continue
        vram, time = row["peak_vram_bytes"], row["step_seconds"]
        rows.append(
            (
                stage,
                f"{time['median']:.3g} [{time['low']:.3g}, {time['high']:.3g}]",
                f"{row['tokens_per_second']:,.0f}",
                share(row["mfu"]),
                share(row["mbu"]),
                gb(vram) if vram else f"{gb(row['peak_rss_bytes'])} (process)",
                predicted,
                f"{row['hours']:.2f}" if row["hours"] is not None else "-",
            )
        )
    return rows


def out_of_memory(stages: Mapping[StageName, StageSteps]) -> list[str]:
    """Return a line for each stage that did not fit."""
    return [f"{stage}: out of memory" for stage, row in stages.items() if row.get("out_of_memory")]


def share(value: float | None) -> str:
    """Return a share of 1 as a percentage, "-" where it is unknown."""
    return "-" if value is None else f"{value:.0%}"


def folder_of(record: StepsRecord) -> Path:
    """Return the folder of the records of the same recipe and device."""
    return Path(RESULTS, record["recipe"], record.get("version", ""), baseline.device_folder(record), "bench")


def new_file(record: StepsRecord) -> Path:
    """Return a new file for a record."""
    commit = (record["code"]["commit"] or "")[:8]
    return folder_of(record) / f"{provenance.in_file_name(provenance.now())}_{commit}_{record['shape']}.json"


def comparable(loaded: PinnedRecipe, record: StepsRecord) -> list[StepsRecord]:
    """Return the stored records with which a new one can be compared, the newest first; none for a changed recipe."""
    if loaded.modified:
        return []
    return [earlier for earlier in baseline.before(record, RESULTS) if compare.difference(earlier, record) is None]


def beside_row(record: StepsRecord) -> tuple[str, ...]:
    """Return the table row of a record that is only shown."""
    speeds = (
        f"{stage} {row['tokens_per_second']:,.0f}"
        for stage, row in record["stages"].items()
        if "tokens_per_second" in row
    )
    return record["date"], compare.machine(record), str(compare.threads(record) or "-"), ", ".join(speeds)


if __name__ == "__main__":
    guarded(main)
