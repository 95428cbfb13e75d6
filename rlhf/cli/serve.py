"""`rlhf serve`: offer the merged model to OpenAI's clients."""

from collections.abc import Sequence
from pathlib import Path

import click

from rlhf.cli.choice import Choice
from rlhf.cli.missing import naming_the_run
from rlhf.cli.options import OneOf, WholeNumber
from rlhf.cli.recipe_options import REUSE, RUN_HELP, chooses_recipe
from rlhf.cli.run_argument import RUN_AS_OPTIONS, CommandOnRun
from rlhf.commands import serve as serving
from rlhf.recipe import MERGE


class Serve(CommandOnRun):
    """The command whose words after `--` are options of vLLM: `engine_options`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        unread = super().parse_args(ctx, args[:end])
        ctx.params["engine_options"] = args[end + 1 :]
        return unread

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- VLLM_OPTION...]"]


@click.command(cls=Serve)
@RUN_AS_OPTIONS
@chooses_recipe(**RUN_HELP, out=True)
@REUSE
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    type=OneOf(serving.ENGINES),
    help="Server to use; auto takes vLLM if it is installed and starts.",
)
@click.option(
    "--host", metavar="NAME", default="127.0.0.1", show_default=True, help="Address to listen on; clients need no key."
)
@click.option(
    "--port", default=8000, show_default=True, type=WholeNumber(1, 65535), metavar="N", help="Port to listen on."
)
def serve(
    choice: Choice,
    out: Path,
    reuse: Path | None,
    engine: serving.Engine,
    host: str,
    port: int,
    engine_options: Sequence[str],
) -> None:
    """Serve the merged model to OpenAI's clients.

    RUN is a run directory, <out>/<recipe>/<version>, or a stage's folder in it, and has all settings. Without it, name
    the recipe and its changes as for the run. Options after `--` are passed on to vLLM.
    """
    with naming_the_run("serve", MERGE):
        serving.run(choice.load(), out, engine, host, port, reuse, engine_options)
