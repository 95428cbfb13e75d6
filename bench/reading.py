"""Readers of the JSON that the benchmarks write: each content is checked against its type once, where it is read.

The types are TypedDicts (`bench.kinds` and the programs' own), so that what is read is what was written: no key is
added, dropped or converted. Unknown keys are kept, because a newer version may add some.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from rlhf.errors import UserError
from rlhf.run.reader import first_problem
from rlhf.run.reader import reading as reading_file

T = TypeVar("T")


def read(file: Path, kind: type[T]) -> T:
    """Return the content of a JSON file. Raises UserError, which names file and key, unless it is a `kind`."""
    with reading_file(file):
        content: object = json.loads(file.read_text(encoding="utf-8"))
    return check(content, kind, str(file))


def last_line(printed: str, kind: type[T], source: str) -> T:
    """Return the JSON of the last line that a process printed. Raises UserError unless it is a `kind`."""
    lines = printed.splitlines()
    if not lines:
        raise UserError(f"{source}: printed nothing; its last line should be JSON")
    with reading_file(source):
        content: object = json.loads(lines[-1])
    return check(content, kind, source)


def check(content: object, kind: type[T], source: str) -> T:
    """Return `content` unchanged as a `kind`. Raises UserError with `source` and the first wrong key unless it is one.

    Types are strict: no number is read from a string.
    """
    try:
        _adapter(cast(Any, kind)).validate_python(content, strict=True)
    except ValidationError as error:
        raise UserError(f"{source}: {first_problem(error)}: damaged, or of another version") from None
    return cast(T, content)


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    return adapter
