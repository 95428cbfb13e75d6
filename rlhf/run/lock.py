"""The lock of a stage's directory, and a lock that is waited for."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.errors import UserError

ATTEMPTS = 100  # to open a lock that other processes remove meanwhile


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the stage's directory `path` for one process at a time.

    If there is no such directory at the end, because the stage was refused, the lock is removed, and so are the folders
    that were made for it. Raises UserError if another process holds it, or if nothing can be written.
    """
    lock = path.parent / f".{path.name}.lock"
    number, new_folders = _take(lock, path)
    try:
        yield
    finally:
        if not os.path.lexists(path):
            _remove(lock, new_folders)
        os.close(number)


@contextmanager
def waited_for(lock: Path) -> Iterator[None]:
    """Hold the file `lock`, and wait before that while another process holds it."""
    with lock.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make_run_directory(run_directory: Path) -> None:
    """Make the folder of a run's stages. Raises UserError if nothing can be written there."""
    try:
        _make(run_directory)
    except OSError as error:
        raise _unwritable(run_directory, error) from None


def _remove(lock: Path, new_folders: list[Path]) -> None:
    """Remove the lock and the folders that were made for it."""
    lock.unlink(missing_ok=True)
    with suppress(OSError):  # another stage has begun there
        for folder in new_folders:
            folder.rmdir()


def _make(path: Path) -> list[Path]:
    """Make a folder with its parents. Return those that are new, the innermost first."""
    new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return new_folders


def _take(lock: Path, path: Path) -> tuple[int, list[Path]]:
    """Return the file descriptor of the lock, which is now held, and the folders that were made for it."""
    new_folders: list[Path] = []
    problem = OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    for _ in range(ATTEMPTS):
        try:
            new_folders = _make(lock.parent) or new_folders
            number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except (FileNotFoundError, FileExistsError) as error:
            # Perhaps another process has removed a folder meanwhile. `mkdir` then says that it exists, if it was there
            # for the system's call and gone when Python looked whether it is a folder.
            problem = error
            continue
        except IsADirectoryError:
            raise UserError(f"{lock}: a folder in place of the lock; remove it") from None
        except OSError as error:
            raise _unwritable(lock.parent, error) from None
        try:
            _hold(number, lock, path)
        except UserError:
            os.close(number)
            raise
        except OSError as error:  # some network file systems cannot lock files
            os.close(number)
            if not os.path.lexists(path):
                _remove(lock, new_folders)
            raise _unusable(lock.parent, "files cannot be locked there", error) from None
        if _has_name(number, lock):
            return number, new_folders
        os.close(number)
    raise _unwritable(lock.parent, problem)


def _hold(number: int, lock: Path, path: Path) -> None:
    """Lock the open file. Raises UserError if another process holds it, or if it is no file."""
    if not stat.S_ISREG(os.fstat(number).st_mode):
        raise UserError(f"{lock}: a pipe or a device in place of the lock; remove it")
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: another process is running {path.name} there") from None


def _has_name(number: int, lock: Path) -> bool:
    """Return whether the open file is still the one with the lock's name.

    A process removes the lock of a refused stage while it holds it. Another one may have opened that file before, and
    holds it afterwards. It keeps nobody out, because the next process makes a new file.
    """
    try:
        return os.path.samestat(os.fstat(number), lock.stat())
    except FileNotFoundError:
        return False


def _unwritable(path: Path, error: OSError) -> UserError:
    return _unusable(path, "cannot write there", error)


def _unusable(path: Path, problem: str, error: OSError) -> UserError:
    """Return the error for a folder in which no stage can run."""
    return UserError(f"{path}: {problem} ({error.strerror}); choose another --out")
