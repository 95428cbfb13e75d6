"""A vLLM server for tests, started by a command as a run prints it."""

import os
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers import VLLM

START = 900  # seconds that a server may take to answer: it imports torch in three processes


@contextmanager
def serving(command: str, port: int, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The server that a command starts; all of its processes end with it."""
    words = shlex.split(command)
    place = words.index("vllm")
    settings = dict(word.split("=", 1) for word in words[:place])
    environment = os.environ | settings | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    program = [os.environ[VLLM], *words[place + 1 :]]
    with log.open("wb") as output:
        process = subprocess.Popen(program, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START
        while answer(port, "/health") is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        yield process
    finally:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """End a server with all its processes, as a power cut would."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answer(port: int, path: str) -> str | None:
    """What a server answers to a path; None while nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return str(response.read().decode())
    except OSError:
        return None
