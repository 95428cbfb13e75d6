"""Memory, or room for files, that runs out: how the many errors of it are recognised."""

import errno
import re
from typing import Literal

EXHAUSTED = 71  # exit code of a command whose memory ran out; sysexits has it for errors of the system
_OUT_OF_MEMORY = re.compile(
    r"(can't|cannot|failed to|unable to) (allocate|mmap)|not enough memory|out of memory|bad_alloc|ALLOC_FAILED"
    r"|can't start new thread",
    re.IGNORECASE,
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# As safetensors, torch.save and SQLite say it. torch.save names neither the file nor the cause.
_CANNOT_GROW = re.compile(r"No space left|quota exceeded|File too large|unexpected pos \d+|disk is full", re.IGNORECASE)


def ran_out(error: BaseException | None) -> Literal["memory", "room"] | None:
    """Return what ran out by an error, or by one that led to it: memory, or room for files on a disk; None for neither.

    Our own errors are explicit and may quote others.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or number == errno.ENOMEM:
            return "memory"  # Python's, torch's, which is not imported here, or the system's
        if number in _NO_ROOM or (number is None and _CANNOT_GROW.search(str(error))):
            return "room"
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return "memory"
        error = error.__cause__ or error.__context__
    return None
