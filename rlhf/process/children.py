"""Child processes: their environments, and the end of a child together with this process."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf.process import endings
from rlhf.process.environment import LAUNCHER

TO_GROUP = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # a terminal also sends them to child processes
_PART = "RLHF_PART_OF_COMMAND"  # environment variable of a child


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without a launcher's variables, for a child process that is not a rank."""
    return {name: value for name, value in environment.items() if not LAUNCHER.match(name)}


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child process that imports this checkout and every package this process can import.

    PYTHONPATH is extended and never replaced: without an installation it is the path to the packages. `changes` are set
    on top.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}


def ending_in_words(code: int) -> str:
    """Return how a process ended, as the verb of a sentence; `code` is as subprocess has it, a signal's is negative."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (the system does that when memory is short)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def part_of_command() -> bool:
    """Return whether another command of this project has started this one as a part of its work."""
    return _PART in os.environ


def run_child(command: Sequence[str]) -> int:
    """Run a part of this command in a process of its own and return its exit code. A signal ends both.

    `part_of_command` is true in the child, which then leaves it to this process to say what a signal left.
    """
    with subprocess.Popen(command, env=child_environment(**{_PART: "1"})) as child:
        try:
            return child.wait()
        except endings.Stopped as stop:
            if stop.number not in TO_GROUP:
                child.terminate()
            try:
                child.wait(2 * endings.PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
