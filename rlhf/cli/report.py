"""`rlhf report`: one page about a run."""

from collections.abc import Sequence
from pathlib import Path

import click

from rlhf.cli.choice import Choice
from rlhf.cli.options import OUTPUT, PRICE, run_directories, typed_options
from rlhf.cli.recipe_options import chooses_recipe
from rlhf.errors import OptionError, UserError
from rlhf.report import page
from rlhf.terminal import say, screen


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), callback=run_directories)
@chooses_recipe(out=True, hw="Hardware; the run is that of its default recipe below --out.")
@PRICE
@click.option("--to", type=OUTPUT, metavar="FILE", help="HTML file to write. [default: report.html in the run]")
def report(choice: Choice, runs: Sequence[Path], out: Path, to: Path | None, price: float | None) -> None:
    """Write an HTML page about a run: what it learned, samples, curves, memory and time.

    RUNS are run directories, <out>/<recipe>/<version>; each has a page of its own, and `rlhf compare` shows their
    differences. Without RUNS --hw or --recipe names the run.
    """
    if runs and typed_options("hw", "directory", "guide", "out"):
        raise click.UsageError("run directories, or --hw, --recipe and --out name the runs: leave one of them out")
    if not runs and choice.hw is None and choice.directory is None:
        raise OptionError("name run directories, or a recipe: --hw NAME or --recipe DIR; `rlhf recipes` lists them")
    if to and len(runs) > 1:
        raise OptionError("--to: each run has a page of its own; `rlhf compare A B --to FILE` writes one about both")
    if not runs:
        loaded = choice.load()
        runs = [out / loaded.name / loaded.version]
    for run in runs:
        write(run, to or run / page.REPORT, price)


def after_run(run: Path, price: float | None) -> None:
    """Write the page of a run whose stage has just finished; what prevents it is said, and fails no stage."""
    try:
        write(run, run / page.REPORT, price)
    except (UserError, OSError) as error:
        say(f"no report: {error}")


def write(run: Path, file: Path, price: float | None = None) -> None:
    """Write the page of a run directory, and say where it is and what it leaves out."""
    for problem in page.write(run, file, price):
        say(f"left out of the report: {problem}")
    screen.OUT.print(f"report: {file}", soft_wrap=True)
