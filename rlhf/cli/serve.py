"""`rlhf serve`: print and start the server of another program for the merged model."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from rlhf.cli import container
from rlhf.cli.choice import Choice
from rlhf.cli.options import OneOf, StrictCommand, WholeNumber
from rlhf.cli.recipe_options import REUSE, RUN_HELP, chooses_recipe
from rlhf.cli.run_argument import RUN
from rlhf.recipe import Recipe
from rlhf.recipe.stages import EVALUATE, MERGE
from rlhf.run.directory import StageRun
from rlhf.run.layout import MODEL
from rlhf.run.packages import require_found
from rlhf.terminal import say

ENGINES = ("vllm", "transformers")


class Serve(StrictCommand):
    """The command whose words after `--` are options of the server: `engine_options`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        unread = super().parse_args(ctx, args[:end])
        ctx.params["engine_options"] = args[end + 1 :]
        return unread

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- SERVER_OPTION...]"]


@click.command(cls=Serve)
@RUN
@chooses_recipe(**RUN_HELP, out=True, on_device=True)
@REUSE
@click.option("--engine", type=OneOf(ENGINES), help="Server to start. [default: vllm if it is installed]")
@click.option(
    "--host",
    metavar="NAME",
    default=lambda: "0.0.0.0" if container.INSIDE in os.environ else "127.0.0.1",  # a container publishes it here alone
    show_default="127.0.0.1",
    help="Address to listen on; clients need no key.",
)
@click.option(
    "--port", default=8000, show_default=True, type=WholeNumber(1, 65535), metavar="N", help="Port to listen on."
)
def serve(
    choice: Choice,
    out: Path,
    reuse: Path | None,
    engine: str | None,
    host: str,
    port: int,
    engine_options: Sequence[str],
) -> None:
    """Serve the merged model to OpenAI's clients.

    The command is printed and takes the place of this one. The model's name is its path below the runs root. RUN is a
    run directory, <out>/<recipe>/<version>, or a stage's folder in it, and has all settings. Without it, name the
    recipe and its changes as for the run. Options after `--` are passed on to the server.
    """
    loaded = choice.load(merging=True)
    merged = StageRun(out, loaded, EVALUATE, reuse).parents.require(MERGE)
    root = merged.parents[2]
    model = str((merged / MODEL).relative_to(root))
    words = server_command(engine or ("vllm" if shutil.which("vllm") else "transformers"), model, loaded.recipe)
    words += ["--host", host, "--port", str(port), *engine_options]  # those given last win
    say(f"cd {shlex.quote(str(root))} && {shlex.join(words)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(root)
    try:
        os.execvp(words[0], words)
    except FileNotFoundError:
        raise click.UsageError(f"--engine {engine}: there is no command {words[0]} here; install it") from None


def server_command(engine: str, model: str, recipe: Recipe) -> list[str]:
    """Return the command line of a server for a model; its folder is the model's name.

    Raises UserError without the packages that transformers' server needs.
    """
    if engine == "vllm":  # of its own accord it computes a float32 model in 16 bits
        return ["vllm", "serve", model, "--served-model-name", model, "--dtype", recipe.model.dtype]
    require_found(("fastapi", "uvicorn", "openai"), "serve", "serve")
    from huggingface_hub.constants import HF_HUB_CACHE

    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # this server lists models from there and fails without it
    return [
        sys.executable,
        "-P",
        "-m",
        "transformers.cli.transformers",
        "serve",
        model,
        "--device",
        recipe.hardware.device,
    ]
