"""Rows of files as they stand: JSON lines and tables by the standard library, all else by `datasets`.

`datasets` reads no text here: version 5.2 makes 7.0 of 007 in a table, nothing of NA and a date of 2020-01-01, and its
errors name no line.
"""

import csv
import gzip
import itertools
import json
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from rlhf.errors import UserError, no_such
from rlhf.terminal import message_of

DELIMITERS = ",;\t"
LONGEST_CELL = 2**27  # characters


class Malformed(Exception):
    """Reason why a row cannot be used. The reader adds where the row stands and what to do about it."""


def rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (source, row) for each row of a file; a row that cannot be read comes as a `Malformed`.

    A source is `file:line`, or `file:row N` where rows are not lines. Raises UserError for a file that cannot be read.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    if path.is_dir() or kind in (".parquet", ".arrow"):
        return _of_datasets(path, kind)
    return _table(path) if kind in (".csv", ".tsv") else _json(path)


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (source, line) for each line of a text, gzipped or not, that is not blank. Raises UserError."""
    with _opened(path) as file:
        for number, line in enumerate(_read(path, file), 1):
            if line.strip():
                yield f"{path}:{number}", line.strip()


def _opened(path: Path) -> TextIOWrapper:
    try:
        raw = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115 - the caller closes it
    except FileNotFoundError:
        raise UserError(no_such("file", path, "check its path")) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({message_of(error)}); check its path and rights") from None
    return TextIOWrapper(raw, encoding="utf-8-sig", newline="")


def _read(path: Path, file: TextIOWrapper) -> Iterator[str]:
    """Yield the lines of an open text. Raises UserError where they end too early or are not UTF-8."""
    try:
        yield from file
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not UTF-8, or a damaged .gz ({message_of(error)}); save it anew") from None


def _json(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the rows of JSON lines, or of one list of objects."""
    found = lines(path)
    first = next(found, None)
    if first is None:
        return
    if not first[1].startswith("["):
        yield from ((source, _value(line)) for source, line in itertools.chain([first], found))
        return
    values = _value("\n".join([first[1], *(line for _, line in found)]))
    if not isinstance(values, list):
        raise UserError(f"{path}: {values}; write a list of objects, or one object on each line")
    yield from ((f"{path}:row {number}", row) for number, row in enumerate(values, 1))


def _value(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        return Malformed(f"not JSON ({message_of(error)}); a table is called .csv or .tsv")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object. Raises ValueError for one with a key twice: json would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _table(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the rows of a table between commas, semicolons or tabs. All cells are text."""
    csv.field_size_limit(LONGEST_CELL)
    with _opened(path) as file:
        text = _read(path, file)
        header = next(text, "")
        delimiter = max(DELIMITERS, key=header.count)
        table = csv.reader(itertools.chain([header], text), delimiter=delimiter, strict=True)
        try:
            names = next(table, [])
            if len({*names}) < len(names):
                raise UserError(f"{path}:1: two columns of one name in {header.strip()[:60]!r}; rename one of them")
            start = table.line_num + 1
            for cells in table:
                source, start = f"{path}:{start}", table.line_num + 1
                if cells and len(cells) != len(names):
                    yield source, Malformed(f"{len(cells)} cells in a table of {len(names)} columns")
                elif cells:
                    yield source, dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise UserError(f"{path}:{table.line_num}: not a table of cells ({error}); write it again") from None


def _of_datasets(path: Path, kind: str) -> Iterator[tuple[str, object]]:
    """Yield the rows of a Parquet or Arrow file, or of a folder that `save_to_disk` wrote."""
    import datasets  # slow to import, and only needed here

    try:
        if path.is_dir():
            table = datasets.load_from_disk(str(path))
        else:
            table = datasets.load_dataset(kind[1:], data_files=str(path), split="train")
        if isinstance(table, datasets.DatasetDict):
            raise UserError(f"{path}: a set of several splits: name the folder of one, {path}/{next(iter(table))}")
        yield from ((f"{path}:row {number}", row) for number, row in enumerate(table, 1))
    except UserError:
        raise
    except Exception as error:  # the library raises many unrelated types
        raise UserError(f"{path}: cannot be read ({message_of(error.__cause__ or error)}); write it again") from None
