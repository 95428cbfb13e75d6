"""`rlhf serve`: print and start the server of another program for the merged model."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import click

from rlhf.cli import container
from rlhf.cli.choice import RUN, Choice, chooses_recipe
from rlhf.packages import install_command, require
from rlhf.recipe.stages import EVALUATE, MERGE
from rlhf.run.directory import StageRun
from rlhf.run.layout import MODEL
from rlhf.terminal import say


@click.command()
@RUN
@chooses_recipe
@click.option("--port", default=8000, type=click.IntRange(1, 65535), help="Port to listen on.")
def serve(choice: Choice, port: int) -> None:
    """Serve the merged model to OpenAI's clients, by vLLM if it is installed, else by transformers.

    The server's command is printed and takes the place of this one: copy it to add options of the server. The model's
    name is its path below the runs root.
    """
    loaded = choice.load(MERGE, on_device=True)
    merged = StageRun(choice.root, loaded, EVALUATE).require(MERGE)
    root = merged.parents[2]
    model = str((merged / MODEL).relative_to(root))
    words = ["vllm", "serve", model, "--served-model-name", model, "--dtype", loaded.recipe.model.dtype]
    if not shutil.which("vllm"):
        require(["fastapi", "uvicorn", "openai"], "serve", install_command("serve"))
        from huggingface_hub.constants import HF_HUB_CACHE

        Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # the server lists models there and fails without it
        server = [sys.executable, "-P", "-m", "transformers.cli.transformers", "serve"]
        words = [*server, model, "--device", loaded.recipe.hardware.device]
    host = "0.0.0.0" if container.INSIDE in os.environ else "127.0.0.1"  # a container publishes it here alone
    words += ["--host", host, "--port", str(port)]
    say(f"cd {shlex.quote(str(root))} && {shlex.join(words)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(root)
    os.execvp(words[0], words)
