"""What ends a command from outside: a signal, or memory that runs out.

A first signal raises `Stopped` in the main thread, so that files are closed and one line says what is kept. A second
one ends the process at once, and what it started with it. So does the first after `PATIENCE` seconds in which the main
thread did not come back to Python: a collective operation whose other ranks are gone never does; and `GOODBYE` seconds
after `Stopped` was raised, if something has swallowed it. Nothing is lost in any way, since whatever a stage writes is
complete or absent.
"""

import errno
import os
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf.terminal import say

# What a terminal, `kill`, docker, Slurm (also its --signal=USR1) and a closing terminal send.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
TO_GROUP = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # a terminal sends them to child processes, too
PATIENCE = 5.0  # seconds; `docker stop` kills after 10
GOODBYE = 30.0  # seconds from `Stopped` to the end: an exception that is raised in a destructor is lost
LONGEST_COMMAND = 500  # characters of a command that is printed again

_OUT_OF_MEMORY = re.compile(
    r"(can't|cannot|failed to|unable to) (allocate|mmap)|not enough memory|out of memory|bad_alloc|ALLOC_FAILED"
    r"|can't start new thread|Resource temporarily unavailable",
    re.IGNORECASE,
)

_UNDER_A_LIMIT = re.compile("failed to map segment|without exception set")  # has other causes where there is none


class Stopped(BaseException):
    """A signal asked this process to end; `kept` says what is left of its work and how to go on.

    Not a KeyboardInterrupt: click answers one with a line of its own.
    """

    def __init__(self, number: int, kept: str = ""):
        super().__init__(signal.Signals(number).name)
        self.number, self.kept = number, kept

    def __str__(self) -> str:
        by = "" if self.number == signal.SIGINT else f" by {signal.Signals(self.number).name}"
        return f"stopped{by}" + (f"; {self.kept}" if self.kept else "")


class _Listener:
    """The state of `listening`: at most one at a time, in the main thread."""

    def __init__(self, tell: Callable[[str], None]):
        self.tell = tell
        self.kept: Callable[[], str] = str
        self.raised = False  # whether the main thread has seen a signal
        self.watched = True  # whether another thread ends the process at the second one
        self.installed: dict[int, Any] = {}  # by signal: the handler that was there before

    def handle(self, number: int, _: FrameType | None) -> None:
        if self.raised:
            if not self.watched:
                self.end(number)
            return
        self.raised = True
        raise Stopped(number, self.kept())

    def end(self, number: int) -> None:
        """End the process, from any thread, and all that it started."""
        self.tell(str(Stopped(number, self.kept())))
        for process in _descendants(os.getpid()):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        os._exit(128 + number)

    def watch(self, pipe: int) -> None:
        """Read the numbers of signals as they arrive, until the pipe is closed."""
        first = None
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while True:
            waiting = first is not None and signal.getsignal(first) == self.handle
            raised = self.raised
            if not poll.poll((GOODBYE if raised else PATIENCE) * 1000 if waiting else None):
                if first is not None and raised == self.raised:
                    self.end(first)
                continue
            numbers = os.read(pipe, 64)
            if not numbers:
                os.close(pipe)
                return
            for number in (n for n in numbers if n in self.installed):
                if first is not None:
                    self.end(number)
                first = number


def _descendants(process: int) -> list[int]:
    """The ids of the processes that a process started, and that these started, as Linux lists them."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it may be gone by now
            parents[int(file.parent.name)] = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
    found = [process]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


_listener: _Listener | None = None


@contextmanager
def listening(tell: Callable[[str], None] = say) -> Iterator[None]:
    """End the block by `Stopped` when a signal arrives. Signals that are ignored (nohup) or handled stay so.

    `tell` gets the last line where the process ends without it.
    """
    global _listener
    if _listener is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _Listener(tell)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    number: int
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            listener.installed[number] = signal.signal(number, listener.handle)
    _listener = listener
    try:
        try:
            threading.Thread(target=listener.watch, args=(reader,), daemon=True).start()
        except RuntimeError:  # no memory for a thread: signals are still handled, one by one
            os.close(reader)
            listener.watched = False
        yield
    finally:
        _listener = None
        signal.set_wakeup_fd(before)
        for number, handler in listener.installed.items():
            if signal.getsignal(number) == listener.handle:
                signal.signal(number, handler)
        os.close(writer)


def _forked() -> None:
    """A forked worker answers signals as any program does; its parent must not hear of them."""
    global _listener
    if _listener is not None:
        signal.set_wakeup_fd(-1)
        for number in _listener.installed:
            signal.signal(number, signal.SIG_DFL)
        _listener = None


os.register_at_fork(after_in_child=_forked)


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """While the block runs, `kept()` says what a signal leaves."""
    listener = _listener
    if listener is None:
        yield
        return
    before, listener.kept = listener.kept, kept
    try:
        yield
    finally:
        listener.kept = before


def stopped(number: int) -> Stopped:
    """What to raise for a signal that a library has caught."""
    return Stopped(number, _listener.kept() if _listener else "")


def resume_command() -> str:
    """The command line that was given, with --resume."""
    words = shlex.join(["rlhf", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
    if sys.argv[1:2] != ["run"] or len(words) > LONGEST_COMMAND:
        return "the same command with --resume"
    return f"`{words}`"


def run_child(command: Sequence[str]) -> int:
    """Run a command and return its exit code. A signal ends it, too, and it has time to say what it keeps."""
    with subprocess.Popen(command) as child:
        try:
            return child.wait()
        except Stopped as stop:
            if stop.number not in TO_GROUP:
                child.terminate()
            try:
                child.wait(2 * PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
            raise


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that led to it, means that memory ran out: Python's, torch's, CUDA's or the system's."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if (
            isinstance(found, MemoryError) or type(found).__name__ == "OutOfMemoryError"
        ):  # torch's, without importing it
            return True
        if isinstance(found, OSError) and found.errno == errno.ENOMEM:
            return True
        ours = type(found).__module__.partition(".")[0] == "rlhf"  # says what it means, and may quote others
        if not ours and not isinstance(found, ValueError | OSError) and _OUT_OF_MEMORY.search(str(found)):
            return True
        if memory_limit() and isinstance(found, ImportError | SystemError) and _UNDER_A_LIMIT.search(str(found)):
            return True
        found = found.__cause__ or found.__context__
    return False


def memory_limit() -> int | None:
    """Bytes of address space that this process may have (`ulimit -v`), None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def limit_in_words() -> str:
    """The limit in brackets, or nothing."""
    limit = memory_limit()
    return f" (this process may have {limit / 1e9:.1f} GB of addresses: ulimit -v)" if limit else ""
