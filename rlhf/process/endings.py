"""The end of a command by a signal.

The first signal raises `Stopped` in the main thread: files are closed, and one line says what is kept. The second one
is the system's: it ends the process at once, as it would any program. Nothing is lost then either, because whatever a
stage writes is complete or absent.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Signals that a terminal, its closing, `kill`, docker and Slurm (also with --signal=USR1) send. Ctrl-\ is not among
# them: it ends at once what does not come back to Python.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PATIENCE = 5.0  # seconds in which a process says what it keeps; `docker stop` kills after 10
_progress: Callable[[], str] = str
_handled: list[int] = []  # signals that `listening` handles now


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


def _handle(number: int, _: FrameType | None) -> None:
    """Leave later signals to the system and raise `Stopped`."""
    _forget()
    raise stop_for(number)


def _forget() -> None:
    """Leave all signals to the system; forked workers do so too."""
    while _handled:
        signal.signal(_handled.pop(), signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)


@contextmanager
def listening() -> Iterator[None]:
    """End the block with `Stopped` when a signal arrives. One that is ignored (nohup) or handled already stays so."""
    if _handled or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [n for n in SIGNALS if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
    before = [signal.signal(number, _handle) for number in ours]
    _handled.extend(ours)
    try:
        yield
    finally:
        _handled.clear()
        for number, handler in zip(ours, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def reporting_progress(progress: Callable[[], str]) -> Iterator[None]:
    """Make `progress()` the message about what a signal leaves, while the block runs."""
    global _progress
    previous, _progress = _progress, progress
    try:
        yield
    finally:
        _progress = previous


def stop_for(number: int) -> Stopped:
    """Return the exception to raise for a signal, also one that a library or a child has caught."""
    return Stopped(number, _progress())
