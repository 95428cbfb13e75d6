"""Readers of data files and hub sets: rows of TRL's types, of named sets, or of a user's function.

A bad row stops, or is skipped and listed. Rows with an empty answer, and pairs whose two sides answer different prompts
or give the same answer, occur in the best sets: they are left out and listed. Columns beside are named once.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlhf.data import adapters, hub, raw
from rlhf.data.parsing import COLUMNS, LABELS, READ, beside, parse_row
from rlhf.data.raw import Malformed
from rlhf.data.rows import KINDS, LEFT_OUT, LeftOut, Row
from rlhf.errors import UserError
from rlhf.files import JsonObject, sha256
from rlhf.recipe.choices import OnBadRow, RowType
from rlhf.recipe.schema_data import Data
from rlhf.recipe.strict import Changes, validate, with_overrides
from rlhf.run.records import DataFile
from rlhf.terminal import counted, excerpt

T = TypeVar("T")
TYPES = [*COLUMNS]
LISTED = "; ".join(f"{kind} ({', '.join(columns)})" for kind, columns in COLUMNS.items())
BY_COLUMNS: list[tuple[str, tuple[str, ...]]] = [  # in the order of `data.format: auto`
    *((kind, COLUMNS[kind]) for kind in ("preference", "unpaired_preference", "prompt_completion", "messages")),
    *adapters.COLUMNS.items(),
    *((kind, COLUMNS[kind]) for kind in ("text", "prompt_only")),
]
AS_THEY_ARE = Data(source="files", files=("-",), on_bad_row="stop", heldout_fraction=0.5)  # rows without any setting
KNOWN = {*READ, *(name for _, columns in BY_COLUMNS for name in columns), "input"}  # whatever their case in a file


def settings_of(files: Sequence[str | Path], changes: Changes, on_bad_row: OnBadRow = "stop") -> Data:
    """Return the section `data` that `--set data.…` gives for files, without a recipe. Raises UserError."""
    if other := next((key for key in changes if not key.startswith("data.")), None):
        raise UserError(f"--set {other}: without a recipe there are only the keys of data; name one with --recipe")
    own: JsonObject = {"files": [str(file) for file in files], "on_bad_row": on_bad_row}
    content = with_overrides({"data": AS_THEY_ARE.model_dump(mode="json") | own}, changes)["data"]
    keys = [key.removeprefix("data.") for key in changes]
    return validate(Data, content, Path("--set"), keys, "data.")


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """Rows, one kind after another and each kind in the order of the files, and what is to be said of reading them.

    `files` have the type or set of their rows. A file is also one split of a hub set, whose hash is of its rows as JSON
    lines, and a user's function, which has no rows. Each row that was left out has its reason, its source and what is
    wrong. `notes` say what the rows were taken for, and which columns no type reads.
    """

    rows: tuple[Row, ...]
    files: tuple[DataFile, ...] = ()
    left_out: tuple[tuple[LeftOut, str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def malformed(self) -> list[tuple[str, str]]:
        """Return the source of each malformed row, and what is wrong with it."""
        return [(source, problem) for reason, source, problem in self.left_out if reason == "malformed"]

    def counts(self) -> dict[str, int]:
        """Return how many rows were not kept, by reason."""
        found = Counter(reason for reason, _, _ in self.left_out)
        return {reason: found[reason] for reason in LEFT_OUT}

    def summary(self) -> str:
        """Return one line: how many rows were left out of which files, and for which reasons."""
        found = Counter(LEFT_OUT[reason] for reason, _, _ in self.left_out)
        reasons = ", ".join(f"{words} {count:,}" for words, count in found.items())
        files = ", ".join(file.name for file in self.files if file.rows)
        rows = sum(file.rows or 0 for file in self.files)
        left = f"{len(self.left_out):,} left out: {reasons}" if reasons else "none left out"
        return f"{counted(rows, 'row')} of {files}, {left}"


RawRows = Iterable[tuple[str, object]]  # source and row
RawFile = tuple[str, Callable[[], RawRows], Callable[[], str]]  # name, rows, and the hash after the last of them


def read(files: Sequence[str | Path], settings: Data = AS_THEY_ARE) -> ParsedRows:
    """Read JSON lines, JSON and tables (all also gzipped), Parquet, Arrow and folders of `save_to_disk`.

    Raises UserError for files and rows that cannot be used.
    """
    if isinstance(files, str) or not files:
        raise UserError(f"data files: {files!r} is not a list of at least one file; name the files in data.files")
    return parse(((str(path), partial(raw.rows, path), partial(sha256, path)) for path in map(Path, files)), settings)


def parse(files: Iterable[RawFile], settings: Data = AS_THEY_ARE) -> ParsedRows:
    """Parse raw rows; all rows of a file have one type, which its first row shows. Raises UserError as `read` does."""
    kept: list[Row] = []
    left_out: list[tuple[LeftOut, str, str]] = []
    found, notes = [], []
    own = adapters.own(settings.format) if ":" in settings.format else None
    for name, rows, hash_of_file in files:
        file, count, bad = _File(settings, own and own[0]), 0, list[tuple[LeftOut, str, str]]()
        for source, row in rows():
            count += 1
            try:
                for parsed in file.parsed(row, source):
                    if isinstance(parsed, str):
                        left_out.append((parsed, source, LEFT_OUT[parsed]))
                    else:
                        kept.append(parsed)
            except Malformed as problem:
                if settings.on_bad_row == "stop":
                    way_out = "repair it, or leave such rows out: --set data.on_bad_row=skip"
                    raise UserError(f"{source}: {problem} ({way_out})") from None
                bad.append(("malformed", source, str(problem)))
        if not count or 2 * len(bad) > count:
            first = "no rows"
            if bad:
                first = f"{counted(len(bad), 'malformed row')} of {count:,}, as {': '.join(bad[0][1:])}"
            raise UserError(f"{name}: {first}; name another file, or the rows' columns or set (docs/data.md)")
        left_out += bad
        found.append(DataFile(name=name, sha256=hash_of_file(), rows=count, kind=file.format))
        notes += [f"{name}: {note}" for note in file.notes()]
    if own is not None:
        found.append(DataFile(name=str(own[1]), sha256=sha256(own[1]), rows=0, kind=settings.format))
    kept.sort(key=lambda row: KINDS.index(type(row)))
    left_out.sort(key=lambda row: [*LEFT_OUT].index(row[0]))
    return ParsedRows(tuple(kept), tuple(found), tuple(left_out), tuple(notes))


class _File:
    """What the rows of a file are: their type, the adapter of their set, and the columns that nothing reads."""

    def __init__(self, settings: Data, own: adapters.Adapter | None):
        self.settings, self.format, self.adapter = settings, settings.format, own
        self.type: RowType | None = None
        self.labels = {**LABELS, **{word.strip().lower(): good for word, good in (settings.labels or {}).items()}}
        self.columns, self.ignored = settings.columns or {}, {*(settings.ignore or ())}
        self.unread: dict[str, None] = {}

    def parsed(self, value: object, source: str) -> Iterator[Row | LeftOut]:
        """Yield what a row says. Raises Malformed."""
        row = self._renamed(value)
        if self.format == "auto":
            self.format = told_by_columns(row)
        if self.adapter is None and self.format in adapters.ADAPTERS:
            self.adapter = adapters.ADAPTERS[self.format]
        made = [row] if self.adapter is None else adapters.adapted(self.adapter, row)
        if not made:
            yield "not_made"
        for typed in made:
            kind = self._type_of(typed)
            yield parse_row(typed, kind, source, self.labels, self.settings.turns)
            self.unread |= dict.fromkeys(beside(typed, kind))

    def _renamed(self, value: object) -> dict[str, Any]:
        """Return a row with the names that types and sets have, without what is ignored. Raises Malformed."""
        if isinstance(value, Malformed):
            raise value
        if not isinstance(value, dict):
            raise Malformed(f"a row is an object with named columns; this one is {type(value).__name__}")
        if (missing := next((old for old in self.columns.values() if old not in value), None)) is not None:
            raise Malformed(f"no column {missing!r} (data.columns); the row has {_listed(value)}")
        row = {name: value[old] for name, old in self.columns.items()}
        for name, content in value.items():
            lower = name.lower()
            known = lower if lower in KNOWN and lower not in value else name
            if name not in self.ignored and name not in self.columns.values() and known not in row:
                row[known] = self._without_ignored(content)
        return row

    def _without_ignored(self, content: object) -> object:
        """Return a list of messages without the fields that are ignored; anything else as it is."""
        if not self.ignored or not isinstance(content, list):
            return content
        return [
            {name: v for name, v in turn.items() if name not in self.ignored} if isinstance(turn, dict) else turn
            for turn in content
        ]

    def _type_of(self, row: Mapping[str, Any]) -> RowType:
        """Return the type of the file's rows. Raises Malformed for a row of another type."""
        found = _fitting(row, COLUMNS.items())
        if self.type is None:
            self.type = self.format if self.format in COLUMNS else found
        if self.type is None:
            raise Malformed(f"{_listed(row)} are the columns of no type: {LISTED}")
        if self.settings.format == "auto" and found and TYPES.index(found) < TYPES.index(self.type):
            raise Malformed(f"a row of type {found}, and the first one is of {self.type}; give each type its own file")
        return self.type

    def notes(self) -> Iterator[str]:
        """Yield lines on what the rows were taken for, and on the columns that no type reads."""
        if self.settings.format == "auto":
            yield f"rows of {self.format} ({', '.join(dict(BY_COLUMNS)[self.format])})"
        if self.unread:
            yield f"columns for reward functions alone: {', '.join(self.unread)}"


def told_by_columns(row: Mapping[str, Any]) -> str:
    """Return the type or the set whose columns a row has. Raises Malformed for other columns."""
    texts = isinstance(row.get("chosen"), str) and "prompt" not in row  # two transcripts, or nothing that we know
    found = _fitting(row, BY_COLUMNS[1:] if texts else BY_COLUMNS)
    if found is None:
        raise Malformed(
            f"{_listed(row)} are the columns of no type: {LISTED}. Name them, --set data.columns.prompt=NAME, or the "
            "set or a function of yours, --set data.format=NAME (docs/data.md)"
        )
    return found


def _fitting(row: Mapping[str, Any], by_columns: Iterable[tuple[T, tuple[str, ...]]]) -> T | None:
    return next((kind for kind, columns in by_columns if row.keys() >= {*columns}), None)


def _listed(row: Mapping[str, Any]) -> str:
    return excerpt(", ".join(map(repr, row))) or "no names"


def read_hub(settings: Data) -> ParsedRows:
    """Read the split of a data set at one commit of the hub that a recipe names. Its name may be a local folder too."""
    assert settings.name and settings.revision
    name, data_dir, split = settings.name, settings.data_dir, settings.split or "train"
    import datasets  # slow to import, and only needed here

    label = "/".join(part for part in (name, data_dir, split) if part)
    try:
        # Loads the pinned files: offline, `load_dataset` of a name takes the newest commit that it has ever seen.
        folder = name if Path(name).is_dir() else hub.snapshot(name, settings.revision, data_dir)
        table = datasets.load_dataset(folder, split=split, data_dir=data_dir)
    except Exception as error:  # the library raises a dozen unrelated types, some with the reason only in the cause
        way_out = "check data.name, data.data_dir, data.split and the network"
        reason = hub.reason(error, f"https://huggingface.co/datasets/{name}", way_out)
        raise UserError(f"{label}: not loaded: {reason}") from error
    digest = hashlib.sha256()

    def rows() -> Iterator[tuple[str, object]]:
        for number, row in enumerate(table, 1):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
            yield f"{label}:row {number}", row

    return parse([(label, rows, digest.hexdigest)], settings)
