"""The host's side of a guest: its start, questions to it, and its end."""

import atexit
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rlhf.errors import UserError
from rlhf.process import children
from rlhf.process.guest.beside import VARIABLE
from rlhf.terminal import excerpt

GRACE = 1.0  # seconds in which a guest ends, or gives up a request
POLL = 0.5  # seconds between two looks whether a guest is alive
PLACE = 150  # characters of the place where the user's code failed


class GuestError(Exception):
    """The guest's code raised an error, of a class named `kind`; or its process ended.

    `said` has class, message and, if the user's code raised it, file, line and code, in one line.
    """

    def __init__(self, kind: str, message: str, trace: str = "", place: str | None = None):
        super().__init__(f"{kind}: {message}\n{trace}".rstrip())
        self.said = excerpt(f"{kind}: {message}") + (f" in {excerpt(place, PLACE)}" if place else "")


class OutOfTime(Exception):
    """A request took longer than it may."""


class Guest:
    """A process that imports modules and calls their functions when it is asked to. It starts with the first request.

    With `folder` it finds the user's own modules there (rlhf/process/guest/beside.py). It leads a session, so that a
    terminal's signals do not reach it, and it ends with all its children.
    """

    def __init__(self, folder: str | None = None):
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._number = 0
        self._kept: list[tuple[str, dict[str, object]]] = []  # requests that each new process gets first
        self._first = 0  # the number of the last of them, until its reply is here

    def keep(self, function: Callable[..., object], /, **arguments: object) -> None:
        """Let the guest call a function as soon as it can, and again in a process that takes its place.

        Only the next request waits for the result, before its time begins. An error is not seen.
        """
        request = _path(function), arguments
        if request in self._kept:
            return
        self._kept.append(request)
        if self._process is not None:
            self._first = self._send(*request)

    def ask(self, function: Callable[..., object], timeout: float | None = None, /, **arguments: object) -> Any:
        """Return what a function of this project returns there. Arguments and result are what JSON has.

        Raises UserError and GuestError, as the function does; GuestError also where the process ends, and OutOfTime
        after `timeout` seconds. Then the guest's code gets a KeyboardInterrupt; where that does not end it, its process
        is killed, and the next request starts a new one. Its start, and what `keep` asked for, are not in that time.
        """
        if self._process is None:
            self._start()
        if self._first:
            self._reply(self._first, None)
            self._first = 0
        number = self._send(_path(function), arguments)
        reply = self._reply(number, timeout)
        if reply is None:
            self._interrupt(number)
            raise OutOfTime
        if "error" not in reply:
            return reply["result"]
        if reply["advice"] is not None:
            raise UserError(*reply["advice"])
        raise GuestError(reply["error"], reply["message"], reply["traceback"], reply["place"])

    def end(self, patience: float = GRACE) -> None:
        """End the process, after `patience` seconds by a signal, and its children."""
        process, self._process = self._process, None
        if process is None:
            return
        _running.discard(self)
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        # Text hashes alike in each process: what a function takes from a set, it takes in the same order again.
        environment = children.alone(children.child_environment(PYTHONHASHSEED="0"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlhf.process.guest.serve", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment if self.folder is None else environment | {VARIABLE: self.folder},
            start_new_session=True,
        )
        theirs.close()
        _running.add(self)
        self._first = 0
        for function, arguments in self._kept:
            self._first = self._send(function, arguments)

    def _send(self, function: str, arguments: dict[str, object]) -> int:
        """Send a request. Return its number."""
        self._number += 1
        request = {"number": self._number, "function": function, "arguments": arguments}
        with suppress(OSError):  # it has ended, which `_reply` says
            self._connection.send_bytes(json.dumps(request).encode())
        return self._number

    def _reply(self, number: int, timeout: float | None) -> Any:
        """Return the reply to a request; None where it does not come in time. Raises GuestError for a broken one."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        assert self._process is not None
        try:
            while (left := end - time.monotonic()) > 0:
                if self._connection.poll(min(left, POLL)):
                    reply = json.loads(self._connection.recv_bytes())
                    if reply["number"] == number:  # others are to requests that were given up, or kept
                        return reply
                elif self._process.poll() is not None and not self._connection.poll():
                    raise EOFError  # a child of its own may still hold the connection
        except (OSError, EOFError, ValueError, LookupError, TypeError):
            raise self._broken() from None
        return None

    def _interrupt(self, number: int) -> None:
        """End a request that took too long, or else the process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        try:
            if self._reply(number, GRACE) is None:
                self.end(0)
        except GuestError:  # it has ended by itself
            pass

    def _broken(self) -> "GuestError":
        """End a process that has ended, or that answers no more. Return the error that says so."""
        assert self._process is not None
        process = self._process
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        code = process.poll()
        self.end(0)
        how = "closed its connection" if code is None else children.ending_in_words(code)
        return GuestError("EndOfProcess", f"its process {how}")


def _path(function: Callable[..., object]) -> str:
    """Return how the guest finds a function of this project."""
    return f"{function.__module__}:{function.__qualname__}"


_guests: dict[str | None, Guest] = {}
_running: set[Guest] = set()
_owner = os.getpid()


def guest_of(folder: str | None) -> Guest:
    """Return the guest of a folder of the user's, or of this project's own functions (None)."""
    return _guests.setdefault(folder, Guest(folder))


@contextmanager
def ended_afterwards() -> Iterator[None]:
    """End all guests at the end of the block."""
    try:
        yield
    finally:
        end_all()


@atexit.register
def end_all() -> None:
    """End all guests of this process."""
    _guests.clear()
    for guest in [*_running] if os.getpid() == _owner else ():  # a forked child has none of its own
        guest.end()
