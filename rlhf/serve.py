"""The merged model behind an OpenAI-compatible address, by vLLM or by transformers' own server."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from rlhf.chat import finished
from rlhf.console import install_command
from rlhf.recipe import Loaded
from rlhf.run import Run, RunError

ENGINES = ("auto", "transformers", "vllm")


def command(model: str, engine: str, device: str, host: str, port: int) -> list[str]:
    """The command line of a server; `auto`: vLLM where it is installed. Raises RunError where the engine is missing."""
    vllm = shutil.which("vllm")
    if engine == "vllm" or (engine == "auto" and vllm):
        if vllm is None:
            raise RunError(
                "serve: vllm is not installed here; install it in an environment of its own, or leave it out"
            )
        return [vllm, "serve", model, "--served-model-name", model, "--host", host, "--port", str(port)]
    missing = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
    if missing:
        raise RunError(f"serve needs {' and '.join(missing)}: {install_command('serve')}")
    server = [sys.executable, "-m", "transformers.cli.transformers", "serve", model]
    return [*server, "--device", device, "--host", host, "--port", str(port)]


def become(loaded: Loaded, out: Path, engine: str, host: str, port: int) -> None:
    """Turn this process into the server of a run's merged model, whose name is its path below `out`.

    Raises RunError when the model has not been merged, or was merged with other settings.
    """
    run = Run(out, loaded, "evaluate")
    model = (finished(run, "merge", "serve") / "model").relative_to(out)
    words = command(str(model), engine, loaded.recipe.hardware.device, host, port)
    from huggingface_hub.constants import HF_HUB_CACHE

    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # transformers' list of models looks there and needs it
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/v1"
    print(f"serving {model} at {address}; Ctrl-C ends it", file=sys.stderr, flush=True)
    os.chdir(out)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.execv(words[0], words)
