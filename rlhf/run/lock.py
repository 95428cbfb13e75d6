"""The lock of a stage's directory."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.errors import UserError


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the stage's directory `path` for one process at a time.

    Raises UserError if another process holds it, or if nothing can be written.
    """
    lock = path.parent / f".{path.name}.lock"
    make_root(path.parent)
    try:
        number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    with open(number, "w") as handle:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise UserError(f"{lock}: a pipe or a device in place of the lock; remove it")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path}: another process is running {path.name} there") from None
        yield


def make_root(root: Path) -> None:
    """Make the folder of a run's stages. Raises UserError if nothing can be written there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(root, error) from None


def _unwritable(root: Path, error: OSError) -> UserError:
    return UserError(f"{root}: cannot write there ({error.strerror}); choose another --out (make: OUT=…)")
