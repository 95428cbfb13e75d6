"""What the studies that train chains share: options of their commands, and where a record is from."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from bench.provenance import code, today
from rlhf.cli.options import WholeNumber
from rlhf.observe.device import cpu_model
from rlhf.recipe import Changes, PinnedRecipe
from rlhf.run.packages import package_versions
from studies.kinds import ChainProvenance

SEEDS = click.option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    default=(0, 1, 2),
    show_default=True,
    help="A seed to run; several times for several.",
)
SET = click.option("--set", "more", multiple=True, metavar="KEY=VALUE", help="Change a key of all runs.")
JOBS = click.option(
    "--jobs",
    default=1,
    show_default=True,
    type=WholeNumber(min=1),
    help="Seeds to run side by side, each on one core.",
)


def runs_in(folder: str) -> Callable[[Any], Any]:
    """Return the option --runs with its default."""
    return click.option(
        "--runs",
        default=Path(folder),
        show_default=True,
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Folder of the runs, of which finished ones are read.",
    )


def provenance(loaded: PinnedRecipe, study: str, words: Sequence[str], overrides: Changes) -> ChainProvenance:
    """Return where a record is from. Call it before anything runs: the code is that which is imported now.

    words: the arguments of `python -m studies.<study>`.
    """
    return {
        "date": today(),
        "code": code(),
        "device": f"{cpu_model()}, 1 thread",
        "packages": package_versions(),
        "recipe": f"{loaded.name} {loaded.version}",
        "recipe_sha256": loaded.sha256,
        "overrides": overrides,
        "command": shlex.join(["python", "-m", f"studies.{study}", *words]),
    }
