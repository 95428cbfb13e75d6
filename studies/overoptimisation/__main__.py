"""`python -m studies.overoptimisation`: how proxy and truth part as a policy leaves SFT, on the toy world of cpu-tiny.

For each seed it trains reward models on three amounts of pairs and on noisy labels, and ensembles of three; draws
best-of-n from SFT's answers, and trains PPO without a KL penalty, against each of them.
"""

import multiprocessing
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click

from bench import options
from bench.provenance import code, today
from rlhf import recipe as recipes
from rlhf.cli import guarded
from rlhf.cli.options import WholeNumber
from rlhf.files import write_json
from rlhf.observe.device import cpu_model
from rlhf.run.packages import package_versions
from rlhf.terminal.screen import OUT
from studies.kinds import OveroptimisationRecord
from studies.overoptimisation import page
from studies.overoptimisation.chains import CHANGES, RECIPE, TOY, Chains


@options.command()
@click.option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    default=(0, 1, 2),
    show_default=True,
    help="A seed to run; several times for several.",
)
@click.option("--set", "more", multiple=True, metavar="KEY=VALUE", help="Change a key of all runs.")
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    type=WholeNumber(min=1),
    help="Seeds to run side by side, each on one core.",
)
@click.option(
    "--runs",
    default=Path("runs/overoptimisation"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of the runs, of which finished ones are read.",
)
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
    begun, ran = today(), code()  # of the files that are imported now
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {seed: pool.submit(Chains(runs.resolve() / str(seed), seed, changes).run) for seed in seeds}
        measured = {str(seed): run.result() for seed, run in waiting.items()}
    record: OveroptimisationRecord = {
        "date": begun,
        "code": ran,
        "device": f"{cpu_model()}, 1 thread",
        "packages": package_versions(),
        "recipe": f"{RECIPE.parent.name} {RECIPE.name}",
        "recipe_sha256": recipes.load(RECIPE).sha256,
        "overrides": {**CHANGES, **{f"data.toy.{key}": size for key, size in TOY.items()}, **changes},
        "command": shlex.join(["python", "-m", "studies.overoptimisation", *sys.argv[1:]]),
        "seeds": measured,
    }
    for title, table in page.tables(record).items():
        OUT.print(f"{title}\n{table}\n", markup=False, highlight=False)
    if save:
        write_json(save, record)
        page.write(save)


if __name__ == "__main__":
    guarded(main)
