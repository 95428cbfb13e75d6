"""`python -m studies.experiments NAME`: runs an experiment of `table.py` with the stages of `rlhf run`.

A stage that is finished below --runs is read and not run again, so that experiments share bases, and a stopped one goes
on.
"""

import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev

import click

from bench import options
from bench.paths import newest
from bench.reading import read
from rlhf.cli import guarded
from rlhf.cli.choice import Choice
from rlhf.cli.options import OneOf
from rlhf.files import write_json
from rlhf.stats import Estimate
from rlhf.terminal import say
from rlhf.terminal.screen import OUT
from studies import command
from studies.experiments.runs import run_seed
from studies.experiments.table import EXPERIMENTS
from studies.kinds import ExperimentRecord, ExperimentRun
from studies.paths import EXPERIMENTS as FOLDER

T95 = {3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of Student's t by the number of seeds


# -- the table ---------------------------------------------------------------------------------------------------------


def over_seeds(values: Sequence[float]) -> Estimate | None:
    """Return the mean over seeds with its 95 % interval by Student's t; None for fewer than three seeds."""
    if len(values) not in T95:
        return None
    middle, half = fmean(values), T95[len(values)] * stdev(values) / math.sqrt(len(values))
    return Estimate(middle, middle - half, middle + half)


def cell(values: Sequence[float | None], sign: str = "") -> str:
    """Return the mean with its interval, or of fewer than three seeds every value; a dash for one that has none."""
    known = [value for value in values if value is not None]
    estimate = over_seeds(known) if len(known) == len(values) else None
    if estimate is None:
        return ", ".join("–" if value is None else f"{value:{sign}.3g}" for value in values)
    return f"{estimate.value:{sign}.3g} ({estimate.low:{sign}.3g} to {estimate.high:{sign}.3g})"


def table(record: ExperimentRecord) -> str:
    """Return the table of a record as README.md shows it: a row for each arm, or of two arms one for each figure.

    The latter has the paired difference, second arm less first, too.
    """
    runs = record["runs"]
    titles = list(next(run["figures"] for seeds in runs.values() for run in seeds.values() if run["figures"]))
    columns = {
        arm: [[run["figures"].get(title) for run in seeds.values()] for title in titles] for arm, seeds in runs.items()
    }
    if len(columns) == 2:
        first, second = columns.values()
        lines = [["", *columns, "difference"]]
        lines += [
            [title, cell(a), cell(b), difference(a, b)] for title, a, b in zip(titles, first, second, strict=True)
        ]
    else:
        lines = [["arm", *titles], *([arm, *map(cell, of_arm)] for arm, of_arm in columns.items())]
    lines.insert(1, ["---", *["---:"] * (len(lines[0]) - 1)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def difference(first: Sequence[float | None], second: Sequence[float | None]) -> str:
    """Return the cell of the differences between two arms, seed by seed."""
    pairs = zip(first, second, strict=True)
    return cell([None if a is None or b is None else b - a for a, b in pairs], "+")


def newest_record(name: str) -> ExperimentRecord:
    """Return the newest record of an experiment."""
    return read(newest(FOLDER / "results", f"{name}_*.json"), ExperimentRecord)


# -- the command -------------------------------------------------------------------------------------------------------


@options.command()
@click.argument("name", type=OneOf(list(EXPERIMENTS)))
@click.option("--data", multiple=True, metavar="FILE", help="Rows in place of the recipe's. May be repeated.")
@click.option("--seed", "seeds", type=int, multiple=True, help="A seed; several times for several. [default: its own]")
@command.JOBS
@command.runs_in("runs/experiments")
@options.SAVE
def main(name: str, data: tuple[str, ...], seeds: tuple[int, ...], jobs: int, runs: Path, save: Path | None) -> None:
    """Run an experiment: arms that differ in one setting, on several seeds."""
    experiment = EXPERIMENTS[name]
    loaded = Choice(directory=experiment.recipe, data=data).load(quiet=True)
    chosen = [f"--data={Path(file).name}" for file in data] + [f"--seed={seed}" for seed in seeds]
    record: ExperimentRecord = {
        **command.provenance(loaded, "experiments", [name, *chosen], experiment.shared),
        "arms": {arm: setting.changes for arm, setting in experiment.arms.items()},
        "runs": {arm: {} for arm in experiment.arms},
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        numbers = sorted(seeds or experiment.seeds)
        waiting = {pool.submit(run_seed, name, seed, data, runs.resolve()): seed for seed in numbers}
        found: dict[int, Mapping[str, ExperimentRun]] = {}
        for done in as_completed(waiting):
            found[waiting[done]] = done.result()
            say(f"{name}: seed {waiting[done]} is finished")
    for seed in numbers:
        for arm, run in found[seed].items():
            record["runs"][arm][str(seed)] = run
    if save:
        write_json(save, record)
    OUT.print(table(record), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    guarded(main)
