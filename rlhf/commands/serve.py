"""A server that offers the merged model to OpenAI's clients, by vLLM or by transformers' own server."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from rlhf.errors import OptionError, UserError
from rlhf.process.endings import Stopped
from rlhf.recipe import EVALUATE, MERGE, PinnedRecipe
from rlhf.run.directory import StageRun
from rlhf.run.layout import MODEL
from rlhf.run.packages import require_found
from rlhf.terminal import say

Engine = Literal["auto", "transformers", "vllm"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
SECONDS_TO_STOP = 15  # until a server that does not end is killed
LIMITS = (
    "transformers' own server answers one request at a time. It ignores n, logprobs and response_format, leaves stop "
    "strings in the text, and does not refuse prompts beyond the context (docs/deploy.md)"
)


class NotStarted(UserError):
    """A server ended before it listened."""


def vllm_program(engine: Engine, options: Sequence[str]) -> str | None:
    """Return the path of the command vllm, or None where transformers' server is to serve.

    `auto` takes vLLM if it is installed; `options`, which only vLLM has, require it. Raises UserError without vLLM, and
    OptionError for options of another engine.
    """
    if engine == "transformers":
        if options:
            raise OptionError(f"{shlex.join(options)}: only vLLM takes options after --; leave out --engine or them")
        return None
    program = shutil.which("vllm")
    asked = [*(["--engine vllm"] if engine == "vllm" else []), *(["the options after --"] if options else [])]
    if program is None and asked:
        way_out = f"install it in a separate environment, or leave out {' and '.join(asked)}"
        raise UserError(f"serve: vllm is not installed here; {way_out}")
    return program


def vllm_command(program: str, model: str, dtype: str, host: str, port: int, options: Sequence[str] = ()) -> list[str]:
    """Return the command line of vLLM's server; `options` come last, so that they win."""
    words = [program, "serve", model, "--served-model-name", model, "--host", host, "--port", str(port)]
    # Of its own accord vLLM computes a float32 model in 16 bits.
    return [*words, "--dtype", dtype, *options]


def transformers_command(model: str, device: str, host: str, port: int) -> list[str]:
    """Return the command line of transformers' server. Raises UserError without the packages that it needs."""
    require_found(("fastapi", "uvicorn", "openai"), "serve", "serve")
    server = [sys.executable, "-m", "transformers.cli.transformers", "serve", model]
    return [*server, "--device", device, "--host", host, "--port", str(port)]


def run(
    loaded: PinnedRecipe,
    out: Path,
    engine: Engine,
    host: str,
    port: int,
    reuse: Path | None = None,
    options: Sequence[str] = (),
) -> None:
    """Serve a run's merged model until Ctrl-C. Its name is its path below the runs root: `out`, or else `reuse`.

    `options` are passed on to vLLM. `auto` without them falls back to transformers' server where vLLM does not start.
    Raises ParentMissing if the model has not been merged, and UserError if it was merged with other settings, if the
    port is taken, or if the server ends by itself.
    """
    program = vllm_program(engine, options)
    merged = StageRun(out, loaded, EVALUATE, reuse).parents.require(MERGE)
    root = merged.parents[2]
    model = str((merged / MODEL).relative_to(root))
    address = "127.0.0.1" if host == "0.0.0.0" else host
    if _listens(address, port):
        raise UserError(f"port {port} of {address} is in use: choose another --port")
    if program is not None:
        command_line = vllm_command(program, model, loaded.recipe.model.dtype, host, port, options)
        try:
            return serve(command_line, root, model, address, port)
        except NotStarted as error:
            if engine == "vllm" or options:
                raise
            say(f"{error}. Going on with transformers' server; `rlhf serve … -- OPTION…` passes options on to vLLM")
    command_line = transformers_command(model, loaded.recipe.hardware.device, host, port)
    from huggingface_hub.constants import HF_HUB_CACHE

    # transformers lists models from this folder and fails without it.
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    say(LIMITS)
    serve(command_line, root, model, address, port)


def serve(command_line: list[str], folder: Path, model: str, host: str, port: int) -> None:
    """Run the server `command_line` in `folder`; print its start and stop. Raises UserError if it ends.

    It is NotStarted if the server has not listened yet.
    """
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    say(f"loading {model}; it will answer at {address}")
    # In a separate session the server does not receive Ctrl-C; this process does, and then ends the server.
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(command_line, cwd=folder, env=environment, start_new_session=True)
    try:
        while server.poll() is None and not _listens(host, port):
            time.sleep(0.2)
        if server.poll() is not None:
            code = server.returncode
            raise NotStarted(f"serve: the server ended with exit code {code} before it served; its message is above")
        say(f'serving as model "{model}" at {address}; Ctrl-C ends it')
        say(f"try it: {request(model, address)}")
        server.wait()
        raise UserError(f"serve: the server ended with exit code {server.returncode}; its own message is above")
    except Stopped:
        say("stopping the server")
    finally:
        _end(server)
    say(f"stopped serving {model}")


def request(model: str, address: str) -> str:
    """Return a command that asks a server's model for an answer; `address` ends in /v1."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    words = ["curl", f"{address}/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return shlex.join(words)


def _end(server: "subprocess.Popen[bytes]") -> None:
    """End a server and its children, by force after SECONDS_TO_STOP. A second signal ends all at once."""
    try:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _listens(host: str, port: int) -> bool:
    """Return whether something accepts connections at a port."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False
