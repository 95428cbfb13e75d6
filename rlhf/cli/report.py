"""`rlhf report`: one page about a run."""

from pathlib import Path

import click

from rlhf.cli.choice import PRICE, RUN, Choice, chooses_recipe
from rlhf.errors import UserError
from rlhf.report import page
from rlhf.terminal import say, screen


@click.command()
@RUN
@chooses_recipe
@PRICE
def report(choice: Choice, price: float | None) -> None:
    """Write report.html into a run directory: what the run learned, samples, curves, memory and time.

    `rlhf compare` shows the differences of several.
    """
    _write(choice.run_directory(), price)


def after_run(run: Path) -> None:
    """Write the page of a run whose stage has just finished; what prevents it is said, and fails no stage."""
    try:
        _write(run, None)
    except (UserError, OSError) as error:
        say(f"no report: {error}")


def _write(run: Path, price: float | None) -> None:
    """Write the page of a run directory, and say where it is and what it leaves out."""
    for problem in page.write(run, run / page.REPORT, price):
        say(f"left out of the report: {problem}")
    screen.OUT.print(f"report: {run / page.REPORT}", soft_wrap=True)
