"""Reads the files of run directories, and checks each against its record when it is read.

A file in a run directory may be damaged, edited, or written by another version. `read` and `read_lines` check it, so
that the code behind them can rely on every key and type, and raise UserError with one line that names the file, the
line and the key.
"""

import json
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf.errors import UserError
from rlhf.run.records import Record

LONGEST = 160  # characters of an explanation that is passed on


def read(file: Path, kind: type[Record]) -> dict[str, Any] | None:
    """The file's object, None where there is no file. NaN and infinity are None.

    Raises UserError where it is not a valid `kind`.
    """
    if not file.is_file():
        return None
    with reading(file):
        content = _parse(file.read_bytes())
    return check(content, kind, str(file))


def read_lines(file: Path, kind: type[Record]) -> list[dict[str, Any]]:
    """The objects of a JSONL file, none where there is no file; a last line that a crash cut off is left out.

    Raises UserError for any other line that is not a valid `kind`.
    """
    if not file.is_file():
        return []
    *whole, cut = file.read_bytes().split(b"\n")  # text knows other ends of lines, which samples may hold
    rows = []
    for number, line in enumerate(whole, 1):
        with reading(f"{file}:{number}"):
            row = _parse(line)
        rows.append(check(row, kind, f"{file}:{number}"))
    with suppress(ValueError, RecursionError, UserError):
        rows.append(check(_parse(cut), kind, str(file)))
    return rows


def check(content: Any, kind: type[Record], where: str) -> dict[str, Any]:
    """Return `content` if it is a valid `kind`. Raises UserError that begins with `where`."""
    try:
        kind.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{where}: {_first_problem(error)}: damaged, or of another version") from None
    return content


@contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Around a library's reading of a file that another process wrote: whatever it raises becomes one line.

    What a library raises for damaged content is not documented and no finite list, so every exception counts; keep
    code of ours outside of the block. Memory that runs out is not the file's fault and is raised as it is.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, named without importing it
            raise
        raise UserError(f"{what}: cannot be read ({reason(error)})") from error


@contextmanager
def advising(way_out: str) -> Iterator[None]:
    """Add the way out to a UserError that is raised inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; {way_out}") from error


def reason(error: BaseException) -> str:
    """Why a library could not read a file, in a few words."""
    if isinstance(error, pickle.UnpicklingError):
        return "it holds other objects than tensors and numbers, or is damaged"
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c for c in text if c.isprintable())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _parse(text: bytes) -> Any:
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"key '{key}' is missing"
    said = str(problem["msg"]).removeprefix("Value error, ")
    said = " ".join(said.split())[:LONGEST]
    return f"{f'{key}: ' if key else ''}{said[:1].lower()}{said[1:]}"
