"""The end of a command by a signal.

A first signal raises `Stopped` in the main thread, so that files are closed and one line says what is kept. In three
cases the process and its children end at once: at a second signal; if the main thread does not return to Python within
`PATIENCE` seconds, as in a collective operation whose other ranks are gone; and `GOODBYE` seconds after `Stopped` was
raised, in case something swallowed it. Nothing is lost in any of them, because whatever a stage writes is complete or
absent.
"""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rlhf.terminal import say

# Signals that a terminal, its closing, `kill`, docker and Slurm (also with --signal=USR1) send.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
PATIENCE = 5.0  # seconds; `docker stop` kills after 10
GOODBYE = 30.0  # seconds from `Stopped` to the end; an exception raised in a destructor is lost
Handler = Callable[[int, FrameType | None], object] | int | None  # of a signal, as `signal.signal` returns it


class Stopped(BaseException):
    """A signal asked this process to end. `progress` says what remains of its work and how to continue.

    It is not a KeyboardInterrupt, because click answers one with a line of its own.
    """

    def __init__(self, number: int, progress: str = ""):
        super().__init__(signal.Signals(number).name)
        self.number, self.progress = number, progress

    def __str__(self) -> str:
        sender = "" if self.number == signal.SIGINT else f" by {signal.Signals(self.number).name}"
        return f"stopped{sender}" + (f"; {self.progress}" if self.progress else "")


class _Listener:
    """The state of `listening`. At most one exists at a time, in the main thread."""

    def __init__(self, print_line: Callable[[str], None]):
        self.print_line = print_line
        self.progress: Callable[[], str] = str
        self.raised = False  # whether the main thread has received a signal
        self.watched = True  # whether another thread ends the process at a second signal
        self.installed: dict[int, Handler] = {}  # by signal: the handler that was there before

    def handle(self, number: int, _: FrameType | None) -> None:
        """Raise `Stopped` at the first signal. End the process at a later one if no thread watches for it."""
        if self.raised:
            if not self.watched:
                self.end(number)
            return
        self.raised = True
        raise Stopped(number, self.progress())

    def end(self, number: int) -> None:
        """End the process and all its descendants, from any thread."""
        self.print_line(str(Stopped(number, self.progress())))
        for process in _descendants(os.getpid()):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        os._exit(128 + number)

    def watch(self, pipe: int) -> None:
        """Read the numbers of signals as they arrive, until the pipe is closed, and end the process when it is time."""
        first = None
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while True:
            waiting = first is not None and signal.getsignal(first) == self.handle  # otherwise another one handles it
            raised = self.raised
            if not poll.poll((GOODBYE if raised else PATIENCE) * 1000 if waiting else None):
                if first is not None and raised == self.raised:  # otherwise the longer wait begins now
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
    """Return the ids of a process's children and of their descendants, from Linux's /proc."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # the process may be gone by now
            parents[int(file.parent.name)] = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
    family = [process]
    for parent in family:  # the list grows meanwhile: each child is asked for its own children in turn
        family += [child for child, parent_of_child in parents.items() if parent_of_child == parent]
    return family[1:]


_listener: _Listener | None = None


@contextmanager
def listening(print_line: Callable[[str], None] = say) -> Iterator[None]:
    """End the block with `Stopped` when a signal arrives. Signals that are ignored (nohup) or handled already stay so.

    `print_line` receives the last line of a process that is ended at once.
    """
    global _listener
    if _listener is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _Listener(print_line)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    number: int
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            listener.installed[number] = signal.signal(number, listener.handle)
    _listener = listener
    try:
        try:
            threading.Thread(target=listener.watch, args=(reader,), daemon=True).start()
        except RuntimeError:  # no memory for a thread: `handle` alone answers signals
            os.close(reader)
            listener.watched = False
        yield
    finally:
        _listener = None
        signal.set_wakeup_fd(previous)
        for number, handler in listener.installed.items():
            if signal.getsignal(number) == listener.handle:
                signal.signal(number, handler)
        os.close(writer)


def _forked() -> None:
    """Restore the default signals in a forked worker, and keep its signals from waking the parent."""
    global _listener
    if _listener is not None:
        signal.set_wakeup_fd(-1)
        for number in _listener.installed:
            signal.signal(number, signal.SIG_DFL)
        _listener = None


os.register_at_fork(after_in_child=_forked)


@contextmanager
def reporting_progress(progress: Callable[[], str]) -> Iterator[None]:
    """Make `progress()` the message about what a signal leaves, while the block runs."""
    listener = _listener
    if listener is None:
        yield
        return
    previous, listener.progress = listener.progress, progress
    try:
        yield
    finally:
        listener.progress = previous


def stop_for(number: int) -> Stopped:
    """Return the exception to raise for a signal that a library has caught."""
    return Stopped(number, _listener.progress() if _listener else "")
