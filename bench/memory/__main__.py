"""`python -m bench.memory`: predicted peaks against those that are pinned, and against real tensors."""

import os
import sys
from pathlib import Path

import click

from bench import options, provenance
from bench.kinds import ComparedPhase, Device, MemoryRecord
from bench.memory import budgets, chart, sizes
from bench.paths import ROOT
from rlhf import recipe as recipes
from rlhf.cli import guarded
from rlhf.cli.options import HELP_SETTINGS, StrictCommand
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.plan import prediction_file as pins
from rlhf.plan.predict import PREDICTED_STAGES, Predictor, predicted_stages
from rlhf.process import cuda
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.terminal import counted
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb


@click.group(context_settings=HELP_SETTINGS)
def cli() -> None:
    """Compare predicted memory with pinned predictions, or with what real tensors take."""


@cli.command(cls=StrictCommand)
@click.option("--write", is_flag=True, help="Pin what is predicted now.")
@click.option("--recipe", "only", type=click.Path(path_type=Path), help="Only this recipe's folder.")
def pinned(write: bool, only: Path | None) -> None:
    """Compare what is predicted for every recipe with its predicted.json.

    Exit code 1 where a phase grew, needs more of the card, or computes, moves or launches another amount, a decoding
    step has more operations or one that a graph cannot hold, or an update has another number of operations in a layer.
    """
    failed, directories = False, [only.resolve()] if only else budgets.pinned_recipes(ROOT / "recipes")
    with Predictor() as predictor:
        for directory in directories:
            loaded = recipes.load(directory)
            peaks = pins.peaks(predictor, loaded)
            step, problems = pins.decoding_step(predictor, loaded)
            needed, work = pins.needs(predictor, loaded), pins.work(predictor, loaded)
            passes = predictor.update_passes(loaded)
            if write:
                pins.pin(directory, peaks, step, budgets.strategies(predictor, loaded), needed, work, passes)
            else:
                problems += budgets.changed_peaks(budgets.pinned(directory), peaks)
                problems += budgets.changed_needs(budgets.pinned_needs(directory), needed)
                pinned_work = budgets.pinned_work(directory)
                problems += budgets.changed_work(pinned_work, work)
                if not pinned_work:
                    click.echo(f"{os.path.relpath(directory, ROOT)}: its operations are not pinned yet", err=True)
                problems += budgets.more_operations(budgets.pinned_step(directory), step)
                problems += budgets.changed_passes(budgets.pinned_passes(directory), passes)
            for line in problems:
                failed = True
                print(f"{os.path.relpath(directory, ROOT)}: {line}")
    if not failed:
        count = len(list(directories))
        needs = f"need{'s' if count == 1 else ''} no more than what is pinned"
        print(f"{counted(count, 'recipe')} {'pinned' if write else needs}")
    sys.exit(failed)


@cli.command(cls=StrictCommand)
def tables() -> None:
    """Print the tables of docs/memory.md from what is pinned."""
    print(budgets.peaks_table(ROOT / "recipes"))
    print()
    print(budgets.strategies_table(ROOT / "recipes" / "h100-mistral-7b" / "v1"))


@cli.command("sizes", cls=StrictCommand)
def model_sizes() -> None:
    """Predict what each stage needs by model size; writes bench/memory/sizes.json and docs/images/memory.svg."""
    predicted = sizes.predict(ROOT / "recipes", lambda line: click.echo(line, err=True))
    chart.write(ROOT, predicted)
    print(sizes.table(predicted))


@cli.command(cls=StrictCommand)
@options.HW
@options.RECIPE
@options.stages(PREDICTED_STAGES, default="all of the recipe, on a card those that train there")
@options.SET
@click.option("--no-predict", is_flag=True, help="Compare with the recipe's predicted.json and predict nothing.")
@options.SAVE
def measure(
    hw: str,
    directory: Path | None,
    stages: tuple[StageName, ...],
    changes: tuple[str, ...],
    no_predict: bool,
    save: Path | None,
) -> None:
    """Run the stages for two steps with random weights and the longest rows, and compare each phase's peak.

    Predictions are made after everything is measured: they take minutes of a CPU, in which a GPU would wait. Exit code
    1 where a phase is only predicted or only measured.
    """
    loaded = options.load(hw, directory, changes, on_device=True)
    cuda.set_environment(loaded.recipe)
    with quiet_libraries():
        from bench.memory.measure import beside, pinned_peaks, unmatched
        from bench.memory.measure import measure as measure_stages
        from rlhf.process.torch_setup import device_of

    device = device_of(loaded.recipe)
    chosen = options.stages_of(loaded, stages, predicted_stages(loaded.recipe))
    if device.type != "cpu" and not stages:  # evaluate samples as PPO does; merge needs no GPU
        chosen = [stage for stage in chosen if stage in TRAINING_STAGES]
    if no_predict:
        if loaded.modified or not (loaded.directory / pins.PREDICTION_FILE).exists():
            raise UserError(f"--no-predict needs an unchanged recipe that has a {pins.PREDICTION_FILE}")
        predicted = {stage: pinned_peaks(loaded.directory, stage) for stage in chosen}
    with quiet_libraries():
        measured = measure_stages(loaded, chosen)
    if not no_predict:
        with Predictor() as predictor:
            predicted = {
                stage: {name: phase.peak_bytes for name, phase in predictor.predict(loaded, stage).phases.items()}
                for stage in chosen
            }
    rows = [row for stage in chosen for row in beside(stage, predicted[stage], measured[stage])]
    lacking = [line for stage in chosen for line in unmatched(stage, predicted[stage], measured[stage])]
    title, columns = f"{loaded.name} {loaded.version}", ("stage", "phase", "predicted, GB", "measured, GB", "error")
    rows_table(title, columns, map(cells, rows))
    if save:
        write_json(save, record_of(loaded, provenance.describe(device), rows, lacking))
    for line in lacking:
        print(line, file=sys.stderr)
    sys.exit(bool(lacking))


def record_of(loaded: PinnedRecipe, device: Device, rows: list[ComparedPhase], lacking: list[str]) -> MemoryRecord:
    """Return the record of a comparison; `lacking` has a line for each phase that only one side has."""
    return {
        "date": provenance.today(),
        "code": provenance.code(),
        "device": device,
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "overrides": loaded.overrides,
        "phases": rows,
        "unmatched": lacking,
    }


def cells(row: ComparedPhase) -> tuple[str, ...]:
    """Return the table row of a phase, in GB."""
    peaks = gb(row["predicted_bytes"], 3), gb(row["measured_bytes"], 3)
    return row["stage"], row["phase"], *peaks, f"{row['error']:+.1%}"


if __name__ == "__main__":
    guarded(cli)
