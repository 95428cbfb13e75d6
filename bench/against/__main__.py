"""`python -m bench.against`: the working tree beside another commit, in time, operations and memory."""

import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from bench import baseline, options, provenance
from bench.against import checkout, judge, table
from bench.against.checkout import Checkout
from bench.against.compare import CARD_RECIPE, MICRO_SLOWER, Comparison, Say, small_functions
from bench.against.judge import Bounds, Change
from bench.against.sides import SideFailed
from bench.steps import MEASURED_STAGES, with_parents
from rlhf.cli import guarded
from rlhf.cli.options import OUTPUT, OneOf, WholeNumber
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.terminal import say

ROUNDS = 3  # pairs of timed runs of each stage, and more where one of them looks worse
SHORT = 1, 2  # steps and rounds of --short
SHORT_SECONDS = 120  # after which it times no further pair
GROSS = Bounds(slower=0.25, larger=0.25, gross=True)


@options.command()
@click.option("--rev", metavar="REV", help="Commit, branch or tag. [default: where the branch left main]")
@options.HW
@options.RECIPE
@options.stages(MEASURED_STAGES)
@options.SET
@click.option("--steps", "count", default=2, show_default=True, type=WholeNumber(min=1), help="Steps of a stage.")
@click.option("--rounds", default=ROUNDS, show_default=True, type=WholeNumber(min=2), help="Timed runs of each side.")
@click.option("--shape", default="hh", show_default=True, type=OneOf(["hh", "longest"]), help="Length of rows.")
@click.option(
    "--slower", default=5.0, show_default=True, type=click.FloatRange(min=0), help="Allowed per cent of time."
)
@click.option(
    "--larger", default=2.0, show_default=True, type=click.FloatRange(min=0), help="Allowed per cent of memory."
)
@click.option(
    "--card",
    "cards",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Recipe of a card whose predictions are compared; may be repeated. [default: recipes/4090-llama2-7b/v2]",
)
@click.option(
    "--records",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Run nothing: compare the records of a card below DIR, such as runs/gpu-hour/results, with those in results/.",
)
@click.option("--counts-only", is_flag=True, help="Time nothing: compare what is counted and predicted.")
@click.option(
    "--short",
    is_flag=True,
    help="Only losses of a quarter. Times no pair after two minutes, and skips a REV that fails.",
)
@click.option("--out", type=OUTPUT, metavar="FILE", help="Also write all figures there, as JSON.")
@click.option("--summary", type=OUTPUT, metavar="FILE", help="Also add the table to this file, as Markdown.")
def main(
    rev: str | None,
    hw: str,
    directory: Path | None,
    stages: tuple[StageName, ...],
    changes: tuple[str, ...],
    count: int,
    rounds: int,
    shape: LengthsShape,
    slower: float,
    larger: float,
    cards: tuple[Path, ...],
    records: Path | None,
    counts_only: bool,
    short: bool,
    out: Path | None,
    summary: Path | None,
) -> None:
    """Run a few steps of each stage with the code of REV and with this, in turn, and compare what they cost.

    Exit code 1: a figure is worse than is allowed, beyond its interval. What torch's operations compute, move, launch
    and hold is counted, which a busy machine does not change; CPU seconds are measured in pairs.
    """
    if records:
        worse, compared = baseline.show(sorted(records.rglob("*.json")))
        if not compared:
            raise UserError(f"{records}: no record of it has one of the same card and recipe in results/ before it")
        sys.exit(bool(worse))
    loaded = options.load(hw, directory, changes)
    chosen = options.stages_of(loaded, stages, TRAINING_STAGES if short else MEASURED_STAGES)
    began = time.monotonic()
    try:
        old, new = checkout.unpack(rev or base()), checkout.working_tree()
    except UserError as error:
        if not short:
            raise
        skip(error)
        return
    count, rounds = SHORT if short else (count, rounds)
    if counts_only:
        rounds = 0
    bounds = GROSS if short else Bounds(slower / 100, larger / 100)
    try:
        found = compare(
            old,
            new,
            loaded,
            chosen,
            steps=count,
            rounds=rounds,
            shape=shape,
            bounds=bounds,
            cards=cards or (() if short or stages else (CARD_RECIPE,)),
            say=say,
            most_seconds=SHORT_SECONDS if short else math.inf,
        )
    except SideFailed as error:
        if not short or error.checkout != old:
            raise
        skip(error)
        return
    if rounds and not (short or stages):
        micro_bounds = bounds._replace(slower=max(bounds.slower, MICRO_SLOWER))
        found += small_functions(old, new, rounds, micro_bounds, say)
    title = f"{loaded.name} {loaded.version}: {new.name} beside {old.name}, {time.monotonic() - began:.0f} s"
    lines = judge.verdicts(found)
    show(title, old, found, lines, summary)
    if out:
        write_json(out, record(old, loaded, found, lines))
    sys.exit(bool(lines))


def skip(why: UserError) -> None:
    """Say why --short, a check of every change on any checkout, has no other side."""
    say(f"bench-against: SKIPPED, nothing was compared: {why}")


def base() -> str:
    """Return the commit before the change. Raises UserError where there is no history."""
    revision = checkout.base_revision()
    if revision is None:
        raise UserError("there is no commit to compare with: give REV, or fetch the history (git fetch --unshallow)")
    return revision


def compare(
    old: Checkout,
    new: Checkout,
    loaded: PinnedRecipe,
    stages: list[StageName],
    *,
    steps: int,
    rounds: int,
    shape: LengthsShape,
    bounds: Bounds,
    cards: tuple[Path, ...],
    say: Say,
    most_seconds: float,
) -> list[Change]:
    """Return the changes of the stages, counted and then timed in `rounds` pairs, and of the cards' predictions."""
    with Comparison(
        old, new, loaded, steps=steps, shape=shape, bounds=bounds, say=say, most_seconds=most_seconds
    ) as comparison:
        found = [change for card in cards for change in comparison.predicted(card)]
        counted = comparison.counted(with_parents(loaded, stages))
        found += [change for change in counted if change.stage in stages]
        return found + (comparison.timed(stages, rounds) if rounds else [])


def show(title: str, old: Checkout, found: list[Change], lines: list[str], summary: Path | None) -> None:
    """Print the table and the verdicts, and add them to the summary."""
    table.show(title, found)
    if summary:
        with summary.open("a", encoding="utf-8") as file:
            file.write(table.markdown(title, found, lines))
    for line in lines:
        say(f"worse than {old.name}: {line}")
    if not lines:
        print(f"nothing is worse than {old.name}")


def record(old: Checkout, loaded: PinnedRecipe, found: list[Change], lines: list[str]) -> dict[str, object]:
    """Return what is kept of a comparison: what was compared, on which machine, every figure and the verdicts."""
    return {
        "date": provenance.now(),
        "code": provenance.code(),
        "against": old.name,
        "device": provenance.describe_for(loaded.recipe),
        "recipe": f"{loaded.name} {loaded.version}",
        "recipe_sha256": loaded.sha256,
        "overrides": loaded.overrides,
        "changes": [asdict(change) for change in found],
        "worse": lines,
    }


if __name__ == "__main__":
    guarded(main)
