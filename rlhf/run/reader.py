"""Readers of the files in run directories.

A file may be damaged, edited, or written by another version. `read` and `read_lines` check it against its record, so
that the calling code can rely on every key and type. They raise UserError with one line that names the file, the line
and the key.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from rlhf.errors import UserError
from rlhf.files import JsonValue, reading
from rlhf.run.records import Record
from rlhf.terminal import excerpt

RecordT = TypeVar("RecordT", bound=Record)


def read(file: Path, kind: type[RecordT]) -> RecordT | None:
    """Return the file's record, or None if there is no file. NaN and infinity become None.

    Raises UserError if it is not a valid `kind`.
    """
    if not file.is_file():
        return None
    with reading(file):
        content = _parse(file.read_bytes())
    return check(content, kind, str(file))


def read_lines(file: Path, kind: type[RecordT]) -> list[RecordT]:
    """Return the records of a JSONL file; none if there is no file. A last line that a crash cut off is left out.

    Raises UserError for any other line that is not a valid `kind`.
    """
    if not file.is_file():
        return []
    with reading(file):
        content = file.read_bytes()
    *complete, last = content.split(b"\n")  # str.splitlines also splits at characters of samples
    rows = []
    for number, line in enumerate(complete, 1):
        with advising("delete this line, and what it says is lost"):
            with reading(f"{file}:{number}"):
                row = _parse(line)
            rows.append(check(row, kind, f"{file}:{number}"))
    with suppress(ValueError, RecursionError, UserError):
        rows.append(check(_parse(last), kind, str(file)))
    return rows


def check(content: object, kind: type[RecordT], source: str) -> RecordT:
    """Return `content` as a `kind`. Raises UserError that begins with `source` unless it is valid."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        words = f"{key and f'{key}: '}{excerpt(problem['msg'])}"
        raise UserError(f"{source}: {words}; damaged, or of another version") from None


@contextmanager
def advising(way_out: str) -> Iterator[None]:
    """Add the way out to a UserError that is raised inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error.lines[0]}; {way_out}", *error.lines[1:]) from error


def _parse(text: bytes) -> JsonValue:
    """Return the value of JSON text, with None for NaN and infinity."""
    value: JsonValue = json.loads(text, parse_constant=lambda _: None)
    return value
