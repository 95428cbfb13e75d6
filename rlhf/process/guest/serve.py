"""The guest's side: `python -P -m rlhf.process.guest.serve FD` answers the requests that arrive at a socket.

It imports little, because every run that has reward functions starts it.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from types import FrameType

from rlhf.errors import UserError
from rlhf.process.guest import beside

DEATH_SIGNAL = 1  # Linux's PR_SET_PDEATHSIG


class _Interrupts:
    """SIGINT ends the request that is being answered, and nothing else."""

    answering = False

    def handle(self, _: int, __: FrameType | None) -> None:
        if self.answering:
            self.answering = False
            raise KeyboardInterrupt


def serve(connection: Connection) -> None:
    """Answer requests until the host closes the connection."""
    own, interrupts = os.getpid(), _Interrupts()
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):  # the latter if the host left without its last reply
            return
        signal.signal(signal.SIGINT, interrupts.handle)  # the code may have set its own
        reply = json.dumps({"number": request["number"], **_answer(request, interrupts)})
        if os.getpid() != own:  # a child that the code forked, which must not answer too
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # the code may have closed it
                stream.flush()
        try:
            connection.send_bytes(reply.encode())
        except (BrokenPipeError, ConnectionResetError):
            return


def _answer(request: dict[str, object], interrupts: _Interrupts) -> dict[str, object]:
    """Return what the function returns that the request names, or the error that it raises, whatever that is."""
    module, _, name = str(request["function"]).partition(":")
    try:
        interrupts.answering = True
        result = getattr(importlib.import_module(module), name)(**request["arguments"])  # type: ignore[arg-type]
        interrupts.answering = False
        return {"result": result}
    except BaseException as error:  # also of sys.exit, and of an interrupt
        interrupts.answering = False
        return {
            "error": type(error).__name__,
            "message": beside.as_written(_text(error)),
            "place": beside.place_of(error),
            "advice": [*error.lines] if isinstance(error, UserError) else None,
            "traceback": beside.as_written(traceback.format_exc()),
        }


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be read)"


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)  # also where the host is killed
    serve(Connection(int(sys.argv[1])))
