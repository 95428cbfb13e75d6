"""stdout and stderr of a command that may outlive its terminal or whoever reads its output."""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LOST_TERMINAL = (errno.EIO, errno.ENXIO)  # what writing to a terminal that is gone gives
ESCAPES = "backslashreplace"
_goes_on = False


def outlast() -> None:
    """From now on this command goes on when the reader of its output has left, as it does without its terminal.

    A command whose output is all that it makes ends there (`rlhf plan | head`).
    """
    global _goes_on
    _goes_on = True


class _Outlasting(io.FileIO):
    """A stream to which writing goes on, into nothing, once nothing is behind it."""

    def __init__(self, descriptor: int, ends_with_reader: bool):
        super().__init__(descriptor, "w", closefd=False)
        self.ends_with_reader = ends_with_reader

    def write(self, content: "ReadableBuffer") -> int:
        """Write as a file does; content for a stream that is gone is dropped, and so is all after it."""
        try:
            return super().write(content) or 0
        except OSError as error:
            reader_gone = error.errno == errno.EPIPE and (_goes_on or not self.ends_with_reader)
            if not reader_gone and error.errno not in _LOST_TERMINAL:
                raise
        discard(self.fileno())
        return memoryview(content).nbytes


def discard(descriptor: int) -> None:
    """Let a descriptor write into nothing, for this process and its later children."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def guard_streams() -> None:
    """Make stdout and stderr outlast what is behind them. A character that they cannot encode becomes an escape."""
    sys.stdout = _guarded(sys.stdout, ends_with_reader=True)
    sys.stderr = _guarded(sys.stderr, ends_with_reader=False)


def _guarded(stream: TextIO, ends_with_reader: bool) -> TextIO:
    """Return a stream that goes on writing to the same descriptor; another one, as in a test, stays as it is."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.reconfigure(errors=ESCAPES)
    try:
        raw = _Outlasting(stream.fileno(), ends_with_reader)
        stream.flush()
    except (OSError, ValueError):  # it has no descriptor, or is gone already
        return stream
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, stream.encoding, ESCAPES, line_buffering=stream.line_buffering)
