"""The lock of a stage's directory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf.errors import UserError


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the stage's directory `path` for one process at a time, by a file beside it with the process's number.

    If there is no such directory at the end, because the stage was refused, the lock is removed, and so are the folders
    that were made for it. Raises UserError if another process holds it, or if nothing can be written.
    """
    file = path.parent / f".{path.name}.lock"
    new_folders = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    lock = FileLock(file, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        file.write_text(str(os.getpid()))
    except Timeout:
        holder = "another process"
        with suppress(OSError):  # it has just ended
            holder = f"process {file.read_text()}"
        raise UserError(f"{path}: {holder} is running {path.name} there") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be locked ({error.strerror}); choose another --out") from None
    try:
        yield
    finally:
        if not os.path.lexists(path):
            file.unlink(missing_ok=True)
            with suppress(OSError):  # another stage has begun there
                for folder in new_folders:
                    folder.rmdir()
        lock.release()
