"""`python -m bench.memory`: predicted peaks beside what real tensors take, or beside those that are pinned."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import click

from bench import options, records
from peakmem.events import WHOLE
from rlhf import recipe as recipes
from rlhf.cli import guarded
from rlhf.errors import UserError
from rlhf.plan import prediction_file
from rlhf.plan.predict import PREDICTED_STAGES, Predictor, predicted_stages
from rlhf.process import environment
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb

MORE, LESS = 0.03, 0.01  # shares by which bytes may exceed what is pinned, or fall below
COUNTED = 0.01  # the same for operations, bytes moved and launches, either way
Figures = Mapping[str, Any]  # numbers by name, nested


class ComparedPhase(TypedDict):
    """A phase with both peaks in bytes."""

    stage: StageName
    phase: str
    predicted_bytes: int
    measured_bytes: int
    error: float  # predicted / measured - 1


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Compare predicted memory with what real tensors take, or with pinned predictions."""


@cli.command()
@click.option("--write", is_flag=True, help="Pin what is predicted now.")
@click.option("--recipe", "only", type=click.Path(path_type=Path), help="Only this recipe's folder.")
def pinned(write: bool, only: Path | None) -> None:
    """Compare what is predicted for every recipe of a card with its predicted.json. Exit code 1 where it changed.

    More memory may not fit the card. Less is a gain or an error of the prediction, which would let a stage start that
    runs out of memory: who changes it says which, and pins it anew.
    """
    failed = False
    with Predictor() as predictor:
        for directory in [only.resolve()] if only else pinned_recipes():
            now = predict_all(predictor, recipes.load(directory))
            if write:
                pin(directory, now)
                continue
            before = prediction_file.read(directory)
            if before is None:
                raise UserError(f"{directory}: no {prediction_file.PREDICTION_FILE}: `bench.memory pinned --write`")
            for line in changed(before.plain(), now.plain()):
                failed = True
                print(f"{os.path.relpath(directory, records.ROOT)}: {line}")
    sys.exit(failed)


def predict_all(predictor: Predictor, loaded: PinnedRecipe) -> prediction_file.Pinned:
    """Return what is predicted for a recipe now.

    What a phase needs has gaps between blocks and paged states, and not the driver. What it does is of the last
    rehearsed step.
    """
    stages: prediction_file.Peaks = {}
    needed: prediction_file.Needs = {}
    work: prediction_file.Works = {}
    for stage in predicted_stages(loaded.recipe):
        phases = predictor.predict(loaded, stage).phases
        stages[stage] = {name: phase.components for name, phase in phases.items()}
        work[stage] = {name: asdict(phase.work) for name, phase in phases.items()}
        if needs := {n: p.needed_bytes + p.paged_bytes for n, p in phases.items() if p.needed_bytes is not None}:
            needed[stage] = needs
    return prediction_file.Pinned.model_validate(
        {"unit": "bytes, predicted", "stages": stages, "needed": needed, "work": work}
    )


def pin(directory: Path, pinned: prediction_file.Pinned) -> None:
    """Write predicted.json into a recipe's folder."""
    text = json.dumps(pinned.plain(), indent=1) + "\n"
    (directory / prediction_file.PREDICTION_FILE).write_text(text, encoding="utf-8")


def pinned_recipes() -> list[Path]:
    """Return the folders of the recipes that are made for a card."""
    folders = recipes.available(records.RECIPES)
    return [folder for folder in folders if recipes.load(folder).recipe.hardware.memory_gb is not None]


def changed(before: Figures, now: Figures) -> Iterator[str]:
    """Yield a line for each number that is new, gone, or beyond its tolerance, and for phases' sums of components."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    for name in {**old, **new}:
        if name not in old or name not in new:
            yield f"{name} is {'gone' if name in old else 'new'}"
            continue
        more, less = (COUNTED, COUNTED) if name.startswith("work/") else (MORE, LESS)
        if not old[name] * (1 - less) <= new[name] <= old[name] * (1 + more):
            change = f"{new[name] / old[name] - 1:+.1%}" if old[name] else "from 0"
            yield f"{name} changed by {change}, {old[name]:,} to {new[name]:,}"


def _leaves(figures: Figures, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number with its path. Components of a peak, below `stages/STAGE/PHASE`, count as their sum."""
    for key, value in figures.items():
        path = f"{name}/{key}" if name else key
        if isinstance(value, Mapping):
            if path.startswith("stages/") and path.count("/") == 2:
                yield path, sum(value.values())
            else:
                yield from _leaves(value, path)
        elif isinstance(value, int | float):
            yield path, value


@cli.command()
@options.recipe
@options.stages(PREDICTED_STAGES)
@click.option("--no-predict", is_flag=True, help="Compare with the recipe's predicted.json and predict nothing.")
@options.SAVE
def measure(
    hw: str,
    guide: bool,
    directory: Path | None,
    changes: tuple[str, ...],
    stages: tuple[StageName, ...],
    no_predict: bool,
    save: Path | None,
) -> None:
    """Run the stages for two steps with random weights and the longest rows, and compare each phase's peak.

    Predictions are made after everything is measured: they take minutes of a CPU, in which a GPU would wait. Exit code
    1 where a phase is only predicted or only measured.
    """
    loaded = options.load(hw, guide, directory, changes, on_device=True)
    if save:
        records.check_savable(file=save)
    environment.prepare(loaded.recipe)
    with quiet_libraries():
        from bench.peaks import measure as measure_stages
        from rlhf.process.torch_setup import device_of

    device = device_of(loaded.recipe)
    chosen = options.stages_of(loaded, stages, predicted_stages(loaded.recipe))
    if device.type != "cpu" and not stages:  # evaluate samples as PPO does; merge needs no GPU
        chosen = [stage for stage in chosen if stage in TRAINING_STAGES]
    predicted = {stage: pinned_peaks(loaded, stage) for stage in chosen} if no_predict else None
    with quiet_libraries():
        measured = measure_stages(loaded, chosen)
    if predicted is None:
        with Predictor() as predictor:
            predicted = {stage: _peaks(predictor, loaded, stage) for stage in chosen}
    rows = [row for stage in chosen for row in beside(stage, predicted[stage], measured[stage])]
    lacking = [line for stage in chosen for line in unmatched(stage, predicted[stage], measured[stage])]
    columns = ("stage", "phase", "predicted, GB", "measured, GB", "error")
    rows_table(f"{loaded.name} {loaded.version}", columns, map(_cells, rows))
    if save:
        records.save(records.new("memory", loaded, device) | {"phases": rows, "unmatched": lacking}, save)
    for line in lacking:
        print(line, file=sys.stderr)
    sys.exit(bool(lacking))


def _peaks(predictor: Predictor, loaded: PinnedRecipe, stage: StageName) -> dict[str, int]:
    return {name: phase.peak_bytes for name, phase in predictor.predict(loaded, stage).phases.items()}


def pinned_peaks(loaded: PinnedRecipe, stage: StageName) -> dict[str, int]:
    """Return the bytes at the peak of each phase of a stage, as the recipe's predicted.json has them."""
    pinned = None if loaded.modified else prediction_file.read(loaded.directory)
    if pinned is None:
        raise UserError(f"{loaded.directory}: nothing is pinned for it: leave out --no-predict, and --set")
    return {phase: sum(parts.values()) for phase, parts in pinned.stages[stage].items()}


def beside(stage: StageName, predicted: Mapping[str, int], measured: Mapping[str, int]) -> list[ComparedPhase]:
    """Return one row for each phase that has both peaks, in bytes. `unmatched` has what only one side has."""
    return [
        {
            "stage": stage,
            "phase": phase,
            "predicted_bytes": peak,
            "measured_bytes": measured[phase],
            "error": peak / measured[phase] - 1,
        }
        for phase, peak in predicted.items()
        if phase in measured
    ]


def unmatched(stage: StageName, predicted: Mapping[str, int], measured: Mapping[str, int]) -> list[str]:
    """Return one line for each phase that only one side has. The WHOLE stage is measured, and not among `predicted`."""
    return [
        f"{stage}/{phase}: {'predicted, not measured' if phase in predicted else 'measured, not predicted'}"
        for phase in {**predicted, **measured}
        if phase != WHOLE and (phase not in predicted or phase not in measured)
    ]


def _cells(row: ComparedPhase) -> tuple[str, ...]:
    peaks = gb(row["predicted_bytes"], 3), gb(row["measured_bytes"], 3)
    return row["stage"], row["phase"], *peaks, f"{row['error']:+.1%}"


if __name__ == "__main__":
    guarded(cli)
