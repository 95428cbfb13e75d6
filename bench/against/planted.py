"""`python -m bench.against.planted`: whether the comparison finds what was planted, and nothing in equal code."""

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import click

from bench import options, provenance
from bench.against import checkout, judge
from bench.against.checkout import Checkout
from bench.against.compare import CARD_RECIPE, MICRO_SLOWER, Comparison, small_functions
from bench.against.judge import Bounds, Change
from bench.against.plants import PLANTS, TIMED, plant
from bench.against.sides import Cost, Side
from bench.kinds import PlantedRecord, PlantRow, SameRecord, SameRow, Worse
from bench.paths import ROOT
from bench.steps import MEASURED_STAGES, with_parents
from rlhf import recipe as recipes
from rlhf.cli import guarded
from rlhf.cli.options import OneOf, WholeNumber
from rlhf.files import write_json
from rlhf.recipe import Changes, PinnedRecipe, StageName
from rlhf.run.packages import package_versions
from rlhf.terminal import say

CPU_RECIPE = ROOT / "recipes" / "cpu-tiny" / "v2"
STEPS = 2
MICRO = "micro/"  # before the name of a small function
LEAST_RUNS = 5  # comparisons of a commit with itself by the same two processes, whose start takes longer than a stage
SMALLER: Changes = {
    "ppo.batch_size": 16,
    "ppo.rollout_batch_size": 16,
    "ppo.per_device_train_batch_size": 8,
    "evaluate.batch_size": 16,
}


def small_recipe(vocabulary: int = 800) -> PinnedRecipe:
    """Return the recipe for a CPU with smaller batches, to save time, and with a vocabulary of so many tokens."""
    return recipes.load(CPU_RECIPE, SMALLER | {"tokenizer.vocab_size": vocabulary})


def counts(side: Checkout, loaded: PinnedRecipe, stage: StageName) -> dict[StageName, Cost]:
    """Return what a stage and those that it builds on count, in STEPS steps each."""
    with Side(side, loaded, STEPS, "hh") as process:
        process.wait_until_ready()
        costs = {}
        for name in with_parents(loaded, [stage]):
            process.ask_cost(name, count=True)
            costs[name] = process.cost()
        return costs


def all_counted(base: Checkout, names: Sequence[str], at_once: int) -> Iterator[tuple[str, list[Change]]]:
    """Yield each plant's name with what its stage counts. `at_once` processes run, which changes no count."""
    with ThreadPoolExecutor(at_once) as pool:
        bases: dict[tuple[StageName, int], Future[dict[StageName, Cost]]] = {}  # by stage and vocabulary
        plants = {}
        for name in names:
            stage, loaded = recipes.stage_name(PLANTS[name].where), small_recipe(PLANTS[name].vocabulary)
            key = stage, PLANTS[name].vocabulary
            if key not in bases:
                bases[key] = pool.submit(counts, base, loaded, stage)
            plants[name] = stage, bases[key], pool.submit(counts, plant(name, base), loaded, stage)
        for name, (stage, old, new) in plants.items():
            yield name, [*judge.counted(stage, old.result()[stage], new.result()[stage], Bounds())]


def otherwise(base: Checkout, name: str, rounds: int) -> list[Change]:
    """Return what the comparison measures of a plant that the counts on a CPU cannot see."""
    new, where, bounds = plant(name, base), PLANTS[name].where, Bounds()
    if where.startswith(MICRO):
        only = where.removeprefix(MICRO)
        return small_functions(base, new, rounds, bounds._replace(slower=MICRO_SLOWER), say, only)
    loaded = small_recipe(PLANTS[name].vocabulary)
    with Comparison(base, new, loaded, steps=STEPS, shape="hh", bounds=bounds, say=say) as comparison:
        if where == "card":
            return comparison.predicted(CARD_RECIPE)
        stage = recipes.stage_name(where)
        comparison.counted(with_parents(loaded, [stage]))
        return comparison.timed([stage], rounds)


def each_planted(base: Checkout, names: Sequence[str], rounds: int, at_once: int) -> Iterator[tuple[str, list[Change]]]:
    """Yield each plant's name with what the comparison measures of it; those that counts can see come first."""
    by_counts = [name for name in names if PLANTS[name].where in MEASURED_STAGES and name not in TIMED]
    yield from all_counted(base, by_counts, at_once)
    for name in names:
        if name not in by_counts:
            yield name, otherwise(base, name, rounds)


def with_itself(base: Checkout, stages: Sequence[StageName], rounds: int, number: int) -> Iterator[list[Change]]:
    """Yield the changes of a checkout beside itself, `number` times.

    Every FEW comparisons have new processes, whose first one counts too: the others would count the same.
    """
    loaded = small_recipe()
    same = base._replace(name="the same")
    for first in range(0, number, LEAST_RUNS):
        with Comparison(base, same, loaded, steps=STEPS, shape="hh", bounds=Bounds(), say=say) as comparison:
            counted = comparison.counted(with_parents(loaded, stages))
            for _ in range(first, min(first + LEAST_RUNS, number)):
                yield counted + comparison.timed(stages, rounds)
                counted = []


def worse(changes: Sequence[Change]) -> list[Worse]:
    """Return the changes that are worse than allowed, as a record has them, the largest first."""
    found = sorted((change for change in changes if change.worse), key=lambda change: -change.ratio)
    return [cast(Worse, {key: getattr(change, key) for key in Worse.__annotations__}) for change in found]


def origin(loaded: PinnedRecipe, rounds: int) -> dict[str, object]:
    """Return the keys that both records have."""
    return {
        "date": provenance.now(),
        "code": provenance.code(),
        "packages": package_versions(),
        "device": provenance.describe_for(loaded.recipe),
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "overrides": loaded.overrides,
        "steps": STEPS,
        "rounds": rounds,
    }


def load() -> float:
    """Return the machine's load average of the last five minutes: processes that run or wait for a processor."""
    return round(os.getloadavg()[1], 2)


@options.command()
@click.option("--only", "names", multiple=True, type=OneOf([*PLANTS]), help="Only this plant; may be repeated.")
@click.option("--same", default=0, type=WholeNumber(min=0), help="Instead, compare the code with itself so often.")
@click.option("--stage", "stages", multiple=True, type=OneOf(MEASURED_STAGES), help="With --same: only this stage.")
@click.option("--rounds", default=3, show_default=True, type=WholeNumber(min=2), help="Timed runs of each side.")
@click.option("--at-once", default=2, show_default=True, type=WholeNumber(min=1), help="Processes that count.")
@options.SAVE
def main(
    names: tuple[str, ...], same: int, stages: tuple[StageName, ...], rounds: int, at_once: int, save: Path | None
) -> None:
    """Compare the commit that stands here with copies that something was planted in, or with itself.

    The record has whatever was measured so far. Exit code 1: a plant was not found, or something was found in equal
    code.
    """
    base, loaded = checkout.unpack("HEAD"), small_recipe()
    failed = False

    def note(record: PlantedRecord | SameRecord, name: str, changes: Sequence[Change], good: bool) -> None:
        nonlocal failed
        failed |= not good
        lines = judge.verdicts(changes)
        print(f"{'good' if good else 'WRONG'}  {name}: {'; '.join(lines) or 'nothing is worse'}", flush=True)
        if save:
            write_json(save, record)

    if same:
        chosen = options.stages_of(loaded, stages, MEASURED_STAGES)
        same_record = cast(SameRecord, origin(loaded, rounds) | {"stages_compared": chosen, "same": []})
        for number, changes in enumerate(with_itself(base, chosen, rounds, same), 1):
            row: SameRow = {"worse": worse(changes), "load": load()}
            same_record["same"].append(row)
            note(same_record, f"the same, {number}", changes, not row["worse"])
        sys.exit(failed)
    planted_record = cast(PlantedRecord, origin(loaded, rounds) | {"planted": {}})
    for name, changes in each_planted(base, [name for name in PLANTS if name in (names or PLANTS)], rounds, at_once):
        found: PlantRow = {"does": PLANTS[name].does, "worse": worse(changes), "load": load()}
        planted_record["planted"][name] = found
        note(planted_record, name, changes, bool(found["worse"]))
    sys.exit(failed)


if __name__ == "__main__":
    guarded(main)
