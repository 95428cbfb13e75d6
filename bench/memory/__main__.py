"""`python -m bench.memory`: predicted peaks against those that are pinned, and against real tensors."""

import sys
from pathlib import Path

import click

from bench.memory import budgets
from rlhf import console, cuda, recipe
from rlhf.cli import guarded
from rlhf.memory.predict import STAGES, Predictor
from rlhf.run import code_version, write_json

ROOT = Path(__file__).parents[2]


@click.group()
def cli() -> None:
    """Predicted memory against what is pinned, and against what real tensors take."""


@cli.command()
@click.option("--write", is_flag=True, help="Pin what is predicted now.")
def pinned(write: bool) -> None:
    """Compare every recipe's predicted peaks with those in its predicted.json. Exit code 1 where a phase grew."""
    found = False
    with Predictor() as predict:
        for directory in budgets.pinned_recipes(ROOT / "recipes"):
            loaded = recipe.load(directory)
            peaks = budgets.predict(predict, loaded)
            if write:
                budgets.pin(directory, peaks, budgets.strategies(predict, loaded))
                continue
            for line in budgets.growth(budgets.pinned(directory), peaks):
                found = True
                print(f"{directory.relative_to(ROOT)}: {line}")
    sys.exit(found)


@cli.command()
def tables() -> None:
    """Print the tables of docs/memory.md from what is pinned."""
    print(budgets.peaks_table(ROOT / "recipes"))
    print()
    print(budgets.strategies_table(ROOT / "recipes" / "h100-mistral-7b" / "v1"))


@cli.command()
@click.option("--hw", metavar="NAME", default="cpu", show_default=True, help="Hardware: its default recipe.")
@click.option("--recipe", "directory", type=click.Path(path_type=Path), help="A recipe's folder, instead.")
@click.option("--stage", "stages", multiple=True, type=click.Choice(STAGES), help="Only these; default: all.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key.")
@click.option("--save", type=click.Path(path_type=Path), help="Also write the comparison there, as JSON.")
def measure(
    hw: str, directory: Path | None, stages: tuple[str, ...], changes: tuple[str, ...], save: Path | None
) -> None:
    """Run the stages for two steps with random weights and the longest rows, and compare each phase's peak."""
    loaded = recipe.load(directory or recipe.resolve(hw, ROOT / "recipes"), recipe.parse_overrides(changes))
    cuda.set_environment(loaded.recipe)
    with console.quiet_libraries():
        from bench.memory.measure import measure as measure_stages
        from rlhf.models.loading import device_of
        from rlhf.telemetry import device_facts

    device = device_of(loaded.recipe)
    chosen = list(stages or STAGES)
    with Predictor() as predict:
        predicted = {stage: predict(loaded, stage) for stage in chosen}
    with console.quiet_libraries():
        measured = measure_stages(loaded, chosen)
    rows, table = [], []
    for stage in chosen:
        for phase, peak in predicted[stage].items():
            if not phase or phase not in measured[stage]:
                continue
            real = measured[stage][phase]
            row = {"stage": stage, "phase": phase, "predicted_bytes": peak.peak_bytes, "measured_bytes": real}
            rows.append(row | {"error": peak.peak_bytes / real - 1})
            error = f"{peak.peak_bytes / real - 1:+.1%}"
            table.append((stage, phase, f"{peak.peak_bytes / 1e9:.3f}", f"{real / 1e9:.3f}", error))
    columns = ("stage", "phase", "predicted, GB", "measured, GB", "")
    console.rows_table(f"{loaded.name} {loaded.version}", columns, table)
    if save:
        facts = {"code": code_version(), "device": device_facts(device), "recipe": loaded.name}
        facts |= {"version": loaded.version, "recipe_sha256": loaded.sha256, "overrides": loaded.overrides}
        write_json(save, {**facts, "phases": rows})


if __name__ == "__main__":
    guarded(cli)
