"""`rlhf report`: one page about one or several runs."""

from collections.abc import Sequence
from pathlib import Path

import click

from rlhf import report as reporting
from rlhf.cli.choice import Choice, tell_if_edited
from rlhf.cli.options import OUTPUT, PRICE, StrictCommand, refuse_inputs, run_directories, typed_options
from rlhf.cli.recipe_options import chooses_recipe
from rlhf.errors import OptionError
from rlhf.run.packages import require_found
from rlhf.terminal import counted, say, screen


@click.command(cls=StrictCommand)
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), callback=run_directories)
@chooses_recipe(out=True, hw="Hardware; the run is that of its default recipe below --out.")
@PRICE
@click.option("--to", type=OUTPUT, metavar="FILE", help="HTML file to write. [default: report.html in the first run]")
def report(choice: Choice, runs: Sequence[Path], out: Path, to: Path | None, price: float | None) -> None:
    """Write an HTML page about one or several runs.

    RUNS are run directories, <out>/<recipe>/<version>. Without them --hw or --recipe names the run.
    """
    if runs and typed_options("hw", "directory", "guide", "out"):
        raise click.UsageError("run directories, or --hw, --recipe and --out name the runs: leave one of them out")
    if not runs and choice.hw is None and choice.directory is None:
        raise OptionError("name run directories, or a recipe: --hw NAME or --recipe DIR; `rlhf recipes` lists them")
    if not runs:
        loaded = choice.load()
        runs = [out / loaded.name / loaded.version]
    require_found(("plotly",), "a report", "report")
    tell_if_edited(runs)
    file = to or runs[0] / "report.html"
    refuse_inputs(file, reporting.data_files(runs))
    left_out = reporting.write(runs, file, price)
    screen.OUT.print(f"written to {file}")
    if left_out:
        say(f"{counted(len(left_out), 'part')} left out of the page, which names the reasons; the first: {left_out[0]}")
