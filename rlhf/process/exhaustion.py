"""Memory that runs out: how its many errors are recognised."""

import errno
import re

EXHAUSTED = 71  # exit code of a command whose memory ran out; sysexits has it for errors of the system
_OUT_OF_MEMORY = re.compile(
    r"(can't|cannot|failed to|unable to) (allocate|mmap)|not enough memory|out of memory|bad_alloc|ALLOC_FAILED"
    r"|can't start new thread",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, means that memory ran out: Python's, torch's, the system's.

    Our own errors are explicit and may quote others.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, not imported here
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
