"""`python -m studies.overoptimisation`: how proxy and truth part as a policy leaves SFT, on the toy world of cpu-tiny.

For each seed it trains reward models on three amounts of pairs and on noisy labels, and ensembles of three; draws
best-of-n from SFT's answers, and trains PPO without a KL penalty, against each of them.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click

from bench import options
from rlhf import recipe as recipes
from rlhf.cli import guarded
from rlhf.files import write_json
from rlhf.terminal.screen import OUT
from studies import command
from studies.kinds import OveroptimisationRecord
from studies.overoptimisation import page
from studies.overoptimisation.chains import CHANGES, RECIPE, TOY, Chains


@options.command()
@command.SEEDS
@command.SET
@command.JOBS
@command.runs_in("runs/overoptimisation")
@click.option("--page", "only_page", is_flag=True, help="Run nothing: write the page again from the newest record.")
@options.SAVE
def main(
    seeds: tuple[int, ...], more: tuple[str, ...], jobs: int, runs: Path, only_page: bool, save: Path | None
) -> None:
    """Measure over-optimisation of reward models whose truth is known. Takes about twenty minutes of CPU time."""
    if only_page:
        page.write(page.newest())
        return
    changes = recipes.parse_overrides(more)
    overrides = {**CHANGES, **{f"data.toy.{key}": size for key, size in TOY.items()}, **changes}
    origin = command.provenance(recipes.load(RECIPE), "overoptimisation", sys.argv[1:], overrides)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {seed: pool.submit(Chains(runs.resolve() / str(seed), seed, changes).run) for seed in seeds}
        measured = {str(seed): run.result() for seed, run in waiting.items()}
    record: OveroptimisationRecord = {**origin, "seeds": measured}
    for title, table in page.tables(record).items():
        OUT.print(f"{title}\n{table}\n", markup=False, highlight=False)
    if save:
        write_json(save, record)
        page.write(save)


if __name__ == "__main__":
    guarded(main)
