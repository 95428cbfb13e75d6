"""JSON files, JSONL files, hashes, and writes that a crash leaves either complete or undone."""

import hashlib
import json
import math
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.terminal import harmless, message_of

JsonValue = Mapping[str, "JsonValue"] | Sequence["JsonValue"] | str | float | bool | None  # what JSON can express
JsonObject = dict[str, JsonValue]  # to be written or printed; readers return Any, because a file may hold anything


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the object that a JSON file holds, or None if the file is absent, unreadable or holds no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path of a new file beside `file`, which replaces `file` at the end of the block.

    A reader sees either the old content or the new, with the old permissions. After an error `file` is as before, and
    the new file is deleted. Neither is flushed to disk.
    """
    temporary = file.with_name(f".{file.name[:40]}.{os.getpid()}.tmp")  # also of a long name
    try:
        with _named(file):
            yield temporary
        with suppress(FileNotFoundError):
            shutil.copymode(file, temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file in an error of writing to it, which the system raises without a name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(file)
        raise


def write_json(file: Path, content: object) -> None:
    """Replace a file by the JSON of `content`, as a whole and flushed to disk."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
    sync(file.parent)


def json_lines(rows: Iterable[Mapping[str, object]]) -> str:
    """Return one line of JSON for each row."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append(file: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append one line of JSON for each row."""
    with _named(file), open(file, "a", encoding="utf-8") as handle:
        handle.write(json_lines(rows))


def write_output(file: Path, text: str) -> None:
    """Write a file. An earlier output is replaced as a whole or not at all."""
    target = file.resolve()  # write to what a symbolic link points to, and keep the link
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, as 64 hexadecimal digits.

    That of a folder, which `save_to_disk` of datasets wrote, is of the names and the hashes of its Arrow files.
    """
    if file.is_dir():
        parts = sorted(part for part in file.rglob("*.arrow") if not part.name.startswith(("cache-", "tmp")))
        named = "".join(f"{part.relative_to(file)} {sha256(part)}\n" for part in parts)
        return hashlib.sha256(named.encode()).hexdigest()
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for path in (*folder.rglob("*"), folder):
        if path.exists():
            sync(path)


def remove(path: Path) -> None:
    """Delete a folder, a file or a symbolic link; what the link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cache_root() -> Path:
    """Return the folder in which this project keeps what it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf"


def free_name(path: Path) -> Path:
    """Return `path` with the first number appended that makes a name not yet in use."""
    number = 1
    while os.path.lexists(candidate := path.with_name(f"{path.name}-{number}")):
        number += 1
    return candidate


def finite(value: float) -> float | None:
    """Return the number, or None for NaN and infinity, which JSON cannot express."""
    return value if math.isfinite(value) else None


@contextmanager
def reading(file: Path | str) -> Iterator[None]:
    """Turn any error of a library that reads a file of another process into a UserError of one line.

    A library does not document what it raises for damaged content, so every exception counts; keep our own code outside
    of the block. Running out of memory is not the file's fault, so that error passes unchanged.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, named without importing it
            raise
        raise UserError(f"{file}: cannot be read ({why_unreadable(error)})") from error


def why_unreadable(error: BaseException) -> str:
    """Return in a few words why a library could not read a file."""
    if isinstance(error, pickle.UnpicklingError):
        return "it holds other objects than tensors and numbers, or is damaged"
    return harmless(message_of(error))
