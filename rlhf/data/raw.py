"""Raw rows of files: JSON lines, JSON arrays, Parquet and CSV. rlhf/data/formats.py interprets them.

The format is recognised by the file's content, not by its name. Whatever cannot be read is a `UserError` of one line.
Only ordinary files are read: a pipe or a device may never end. A line, a JSON array and the inflated size of a gzipped
file are limited, so that no file can fill the memory of the machine.

The readers of `datasets` are not used for files because they change what a row says: 5.2.0 reads 007 in a CSV file as
7.0, NA as nothing, and 2020-01-01 in JSON as a date. Their errors do not name the line either.
"""

import csv
import gzip
import itertools
import json
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf.data import columnar
from rlhf.errors import UserError, no_such

MAX_LINE = 2**26  # bytes of one line, and so of one row: 64 MiB
MAX_ARRAY = 2**31  # bytes of a file that is one JSON value, which is held in memory as a whole: 2 GiB
MAX_INFLATION = 250  # times the size of a gzipped file, beyond the first GiB; dialogues are packed to a third or less
FREE_INFLATION = 2**30
BEGINNING = 512  # bytes that tell formats apart: a tar archive's mark stands behind a name
OTHER_FORMATS = {  # what else data come in: place and bytes of its mark, and what to do
    "a zip archive, or a spreadsheet": (0, b"PK\x03\x04", "unpack it, or save the sheet as CSV"),
    "a zstd file": (0, b"\x28\xb5\x2f\xfd", "unpack it first"),
    "a bzip2 file": (0, b"BZh", "unpack it first"),
    "an xz file": (0, b"\xfd7zXZ", "unpack it first"),
    "a 7z archive": (0, b"7z\xbc\xaf\x27\x1c", "unpack it first"),
    "a rar archive": (0, b"Rar!", "unpack it first"),
    "an lz4 file": (0, b"\x04\x22\x4d\x18", "unpack it first"),
    "a tar archive": (257, b"ustar", "unpack it, and name the files in it"),
    "an SQLite database": (0, b"SQLite format 3", "write its rows as JSON lines"),
    "an HDF5 file": (0, b"\x89HDF", "write its rows as JSON lines"),
    "an Avro file": (0, b"Obj\x01", "write its rows as JSON lines"),
    "an ORC file": (0, b"ORC", "write its rows as JSON lines"),
    "an array of numpy": (0, b"\x93NUMPY", "write its rows as JSON lines"),
    "a pickle of Python, which may run code": (0, b"\x80", "write its rows as JSON lines"),
    "a PDF": (0, b"%PDF", "write its text as JSON lines"),
}
DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}  # of tables, by what is likeliest
CARRIAGE_RETURNS = "a carriage return inside of a line: end lines with a line feed (tr '\\r' '\\n')"


class Malformed(Exception):
    """Reason why a row cannot be used. The reader adds where the row stands and what to do about it."""


def rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (source, row) for each row. A line that is not JSON comes as a `Malformed` with the reason.

    A source is `file:line`, or `file:row N` where rows are not lines. Raises UserError when the file cannot be read.
    """
    if path.is_dir():
        return columnar.folder_rows(path)
    first_bytes = _beginning(path)
    if columnar.is_columnar(first_bytes):
        return columnar.columnar_rows(path, first_bytes)
    if path.suffix == ".parquet":
        raise UserError(f"{path}: not a Parquet file, or its beginning is damaged; download it again")
    lines = _text_lines(path, first_bytes)
    first = next((line for line in lines if line[1].strip()), None)
    if first is None:
        return iter(())
    if separator := re.fullmatch(r'(?i)"?sep= ?([,;\t|])"?', first[1].rstrip("\r\n")):  # which spreadsheets write
        return _table_rows(path, lines, separator[1])
    delimiter = _delimiter(path, first[1])
    if delimiter:
        return _table_rows(path, itertools.chain([first], lines), delimiter)
    later = (line for line in lines if line[1].strip())
    second = list(itertools.islice(later, 1))
    read = _document_rows if _is_one_document(path, first[1], is_only_line=not second) else _json_lines
    return read(path, itertools.chain([first], second, later))


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (source, line) for each line of a text that is not blank, stripped. Raises UserError as `rows` does."""
    for number, line in _text_lines(path, _beginning(path)):
        if line.strip():
            yield f"{path}:{number}", line.strip()


def _beginning(path: Path) -> bytes:
    """Return the first bytes of a file. Raises UserError for an empty one, and where they show a format of others."""
    first_bytes = _first_bytes(path)
    if not first_bytes:
        raise UserError(f"{path}: the file is empty; download or write it again")
    if first_bytes.startswith(b"version https://git-lfs"):
        raise UserError(f"{path}: a git-LFS pointer in place of the data; run 'git lfs pull' where it was cloned")
    _refuse_other_formats(path, first_bytes)
    return first_bytes


def _text_lines(path: Path, first_bytes: bytes) -> Iterator[tuple[int, str]]:
    """Return (number, text) of each line of a file that begins so, inflated where it is gzipped."""
    gzipped = first_bytes.startswith(b"\x1f\x8b")
    if gzipped:
        _refuse_other_formats(path, _inflated(path))
    return _decode_lines(path, _lines(path, gzipped))


def _first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file. Raises UserError where it is no ordinary file that can be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise UserError(f"{path}: a pipe or a device, which may never end; write the rows to a file first")
        with path.open("rb") as file:
            return file.read(BEGINNING)
    except FileNotFoundError:
        raise UserError(no_such("file", path, "check its path")) from None
    except IsADirectoryError:
        raise UserError(f"{path}: a directory; name the files in it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error}); check its name") from None


def _refuse_other_formats(path: Path, first_bytes: bytes) -> None:
    """Raise UserError for a file of another format, which its first bytes show."""
    for name, (place, mark, way_out) in OTHER_FORMATS.items():
        if first_bytes[place : place + len(mark)] == mark:
            raise UserError(f"{path}: {name}; {way_out}")


def _inflated(path: Path) -> bytes:
    """Return the first bytes of a gzipped file, inflated; "" where it is damaged, which its lines will show."""
    try:
        with gzip.open(path) as file:
            return file.read(BEGINNING)
    except (OSError, EOFError, zlib.error):
        return b""


def _lines(path: Path, gzipped: bool) -> Iterator[bytes]:
    """Yield the lines, inflated. Raises UserError where a line or the whole file becomes too large."""
    count = size = 0
    limit = FREE_INFLATION + MAX_INFLATION * path.stat().st_size
    try:
        with gzip.open(path) if gzipped else path.open("rb") as file:
            while line := file.readline(MAX_LINE + 1):
                size += len(line)
                if len(line) > MAX_LINE:
                    raise UserError(
                        f"{path}:{count + 1}: a line of more than {MAX_LINE >> 20} MiB; put each row on its own line"
                    )
                if gzipped and size > limit:
                    raise UserError(
                        f"{path}: unpacks to more than {MAX_INFLATION} times its size after {count:,} lines; no text "
                        "does, so unpack it by hand and look at it"
                    )
                yield line
                count += 1
    except EOFError:
        raise UserError(f"{path}: gzip stream ends early after {count:,} lines; download it again") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: gzip stream damaged after {count:,} lines ({error}); download it again") from None


def _decode_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line, without a byte order mark."""
    offset = 0
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: byte 0x{line[error.start]:02x} at offset {offset + error.start} is not UTF-8; "
                "convert the file to UTF-8"
            ) from None
        offset += len(line)
        if number == 1:
            text = text.removeprefix("\ufeff")
            if "\0" in text:
                raise UserError(f"{path}: zero bytes in its first line: UTF-16, or no text; convert the file to UTF-8")
        yield number, text


def _json_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, object]]:
    """Yield (source, row) for each line that is not blank."""
    for number, line in lines:
        if line.strip() == "{":
            raise UserError(f"{path}:{number}: an object over several lines; write one object on each line")
        try:
            yield f"{path}:{number}", _parse_json(line.strip())
        except _RepeatedKey as error:
            yield f"{path}:{number}", Malformed(str(error))
        except (ValueError, RecursionError) as error:
            reason = _reason(error)
            if "\r" in line.strip():
                raise UserError(f"{path}:{number}: {CARRIAGE_RETURNS}") from None
            if not line.endswith("\n"):
                raise UserError(
                    f"{path}:{number}: invalid JSON ({reason}) in a last line without a line end: the file looks cut "
                    "off; download or write it again"
                ) from None
            yield f"{path}:{number}", Malformed(f"invalid JSON ({reason})")


class _RepeatedKey(ValueError):
    """Raised for an object that gives a key twice; a JSON parser would silently take the last value."""


def _parse_json(text: str) -> object:
    """Return the parsed JSON value. Raises ValueError, RecursionError or _RepeatedKey."""
    return json.loads(text, object_pairs_hook=_object)


def _reason(error: Exception) -> str:
    """Return why a text is not JSON, with the column where the parser names one."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "lists or objects nested too deeply"
    return f"a whole number of more than {sys.get_int_max_str_digits():,} digits"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the pairs of a JSON object as a dictionary. Raises _RepeatedKey."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _RepeatedKey(f"the key {repeated[:40]!r} is given twice; leave one out")
    return content


def _is_one_document(path: Path, first_line: str, is_only_line: bool) -> bool:
    """Return whether all lines together are one JSON value: an array, an object that goes on, or something unfinished.

    The first line decides. A whole object in it is a row if more lines follow, even if it has a list `data`.
    """
    if first_line.lstrip().startswith("["):
        return True
    try:
        value = json.loads(first_line)
    except (ValueError, RecursionError):
        return ".jsonl" not in path.suffixes
    return is_only_line and isinstance(value, dict) and isinstance(value.get("data"), list)


def _document_rows(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, object]]:
    """Yield the rows of an array or of {"data": [...]}, or another value as the only row.

    The file is held in memory as a whole.
    """
    numbers, texts, size = [], [], 0
    for number, text in lines:
        numbers.append(number)
        texts.append(text)
        size += len(text.encode())
        if size > MAX_ARRAY:
            raise UserError(f"{path}: a JSON array of more than {MAX_ARRAY >> 30} GiB; write one object on each line")
    try:
        content = _parse_json("".join(texts))
    except _RepeatedKey as error:
        raise UserError(f"{path}{_place_of_repeated_key(''.join(texts))}: {error}") from None
    except json.JSONDecodeError as error:
        number = numbers[min(error.lineno, len(numbers)) - 1]
        if error.pos == 0:
            raise UserError(
                f"{path}:{number}: not JSON; data files are JSON lines, JSON, Parquet, CSV or TSV (docs/data.md)"
            ) from None
        if error.msg == "Extra data":
            raise UserError(
                f"{path}:{number}: a second JSON value; write one object on each line, or one array"
            ) from None
        raise UserError(
            f"{path}:{number}: invalid JSON ({_reason(error)}): repair it there; if it ends early, download it again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: invalid JSON ({_reason(error)}); write it again") from None
    values = content.get("data") if isinstance(content, dict) else content
    for number, row in enumerate(values if isinstance(values, list) else [content], 1):
        yield f"{path}:row {number}", row


def _place_of_repeated_key(text: str) -> str:
    """Return `:row N` for the row that has a key twice; nothing for such a key outside of the rows.

    They are looked at where the text begins with them, as an array or as {"data": [...]}.
    """
    beginning = re.match(r'\s*(?:\{\s*"data"\s*:\s*)?\[', text)
    if beginning is None:
        return ""
    decoder, gap = json.JSONDecoder(object_pairs_hook=_object), re.compile(r"[\s,]*")
    place = beginning.end()
    for number in itertools.count(1):
        row = gap.match(text, place)
        assert row is not None  # it matches an empty gap too
        try:
            _, place = decoder.raw_decode(text, row.end())
        except _RepeatedKey:
            return f":row {number}"
        except (ValueError, RecursionError):
            break
    return ""


def _delimiter(path: Path, first_line: str) -> str | None:
    """Return the delimiter of a table's cells, judged by the file's name or its first line; None if it is not a table.

    A header is a line of at least two names, as `prompt,chosen,rejected` or `prompt;answer` is.
    """
    for delimiter in DELIMITERS:
        cells = first_line.strip().split(delimiter)
        if len(cells) > 1 and all(re.fullmatch(r'"?[A-Za-z_][\w .-]*"?', cell) for cell in cells):
            return delimiter
    named = next((delimiter for suffix, delimiter in ((".csv", ","), (".tsv", "\t")) if suffix in path.suffixes), None)
    return None if first_line.lstrip().startswith(("{", "[")) else named


def _table_rows(path: Path, lines: Iterable[tuple[int, str]], delimiter: str) -> Iterator[tuple[str, object]]:
    """Yield the rows of a table whose first line names the columns."""
    started = 0

    def texts() -> Iterator[str]:
        nonlocal started
        for number, text in lines:
            started = started or number
            yield text

    csv.field_size_limit(MAX_LINE)
    table = csv.reader(texts(), delimiter=delimiter, strict=True)
    try:
        names = next(table)
        if len(names) == 1 and re.search("[,;|\t]", names[0]):
            column = f"{path}:{started}: one column, {names[0][:40]!r}"
            raise UserError(f"{column}: columns must be separated by commas (.csv) or tabs (.tsv)")
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise UserError(f"{path}:{started}: the column {repeated[:40]!r} is named twice; rename one of them")
        started = 0
        for cells in table:
            source, started = f"{path}:{started}", 0
            if not cells:
                continue
            if len(cells) != len(names):
                yield source, Malformed(f"{len(cells)} cells in a table of {len(names)} columns")
            else:
                yield source, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        if "new-line character" in str(error):
            raise UserError(f"{path}:{started}: {CARRIAGE_RETURNS}") from None
        raise UserError(
            f"{path}:{started}: not a table of values between {DELIMITERS[delimiter]} ({error}); write it again"
        ) from None
