"""Memory, or room for files, that runs out: how the many errors of it are recognised."""

import errno
import re
from collections.abc import Iterator

EXHAUSTED = 71  # exit code of a command whose memory ran out; sysexits has it for errors of the system
_OUT_OF_MEMORY = re.compile(
    r"(can't|cannot|failed to|unable to) (allocate|mmap)|not enough memory|out of memory|bad_alloc|ALLOC_FAILED"
    r"|can't start new thread",
    re.IGNORECASE,
)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# As safetensors, torch.save and SQLite say it. torch.save names neither the file nor the cause.
_CANNOT_GROW = re.compile(r"No space left|quota exceeded|File too large|unexpected pos \d+|disk is full", re.IGNORECASE)


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, means that memory ran out: Python's, torch's, the system's.

    Our own errors are explicit and may quote others.
    """
    return any(
        isinstance(each, MemoryError)
        or type(each).__name__ == "OutOfMemoryError"  # torch's, not imported here
        or (isinstance(each, OSError) and each.errno == errno.ENOMEM)
        or (isinstance(each, RuntimeError) and _OUT_OF_MEMORY.search(str(each)))
        for each in _with_causes(error)
    )


def out_of_room(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, means that a disk is full or that a file may not grow."""
    return any(
        each.errno in _NO_ROOM if isinstance(each, OSError) else bool(_CANNOT_GROW.search(str(each)))
        for each in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then those that led to it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__
