"""Memory that runs out: how its many errors are recognised, and the limit that the system sets."""

import atexit
import errno
import re
import resource
import sys

EXHAUSTED = 71  # exit code of a command whose memory ran out; sysexits has it for errors of the system
_OUT_OF_MEMORY = re.compile(
    r"(can't|cannot|failed to|unable to) (allocate|mmap)|not enough memory|out of memory|bad_alloc|ALLOC_FAILED"
    r"|can't start new thread|Resource temporarily unavailable",
    re.IGNORECASE,
)
# Without a limit these have other causes; the last is oneDNN's.
_UNDER_A_LIMIT = re.compile(
    "failed to map segment|without exception set|could not (create|execute) a (primitive|memory object)"
)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, means that memory ran out.

    It recognises errors of Python, torch, CUDA and the operating system.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        torch_ran_out = type(cause).__name__ == "OutOfMemoryError"  # torch's class, without importing it
        if isinstance(cause, MemoryError) or torch_ran_out:
            return True
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return True
        is_own = type(cause).__module__.partition(".")[0] == "rlhf"  # our errors are explicit and may quote others
        if not is_own and not isinstance(cause, ValueError | OSError) and _OUT_OF_MEMORY.search(str(cause)):
            return True
        loader_or_library = isinstance(cause, ImportError | SystemError | RuntimeError)
        if memory_limit() and loader_or_library and _UNDER_A_LIMIT.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def exit_quietly() -> None:
    """Print no traceback of what fails while the process exits.

    Libraries clean up at exit. Where memory ran out, that may fail for the same reason, which is printed already.
    """
    atexit.register(setattr, sys, "unraisablehook", lambda _: None)  # registered last, it is called first


def memory_limit() -> int | None:
    """Return the bytes of address space that this process may have (`ulimit -v`); None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def limit_in_words() -> str:
    """Return the limit of memory in brackets; "" without a limit."""
    limit = memory_limit()
    return f" (this process may have {limit / 1e9:.1f} GB of addresses: ulimit -v)" if limit else ""
