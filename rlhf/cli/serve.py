"""`rlhf serve`: offer the merged model to OpenAI's clients."""

from pathlib import Path

import click

from rlhf.cli.choice import Choice
from rlhf.cli.missing import naming_the_run
from rlhf.cli.options import OneOf, WholeNumber
from rlhf.cli.recipe_options import REUSE, RUN_HELP, chooses_recipe
from rlhf.cli.run_argument import RUN_AS_OPTIONS, CommandOnRun
from rlhf.commands import serve as serving


@click.command(cls=CommandOnRun)
@RUN_AS_OPTIONS
@chooses_recipe(**RUN_HELP, out=True)
@REUSE
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    type=OneOf(serving.ENGINES),
    help="Server to use; auto takes vLLM if it is installed.",
)
@click.option(
    "--host", metavar="NAME", default="127.0.0.1", show_default=True, help="Address to listen on; clients need no key."
)
@click.option(
    "--port", default=8000, show_default=True, type=WholeNumber(1, 65535), metavar="N", help="Port to listen on."
)
def serve(choice: Choice, out: Path, reuse: Path | None, engine: serving.Engine, host: str, port: int) -> None:
    """Serve the merged model to OpenAI's clients.

    RUN is a run directory, <out>/<recipe>/<version>, or a stage's folder in it, and has all settings. Without it, name
    the recipe and its changes as for the run.
    """
    with naming_the_run("serve", "merge"):
        serving.run(choice.load(), out, engine, host, port, reuse)
