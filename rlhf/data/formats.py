"""Readers of data files and hub sets, which return documents, examples, preference pairs and bare prompts.

`rlhf/data/parsing.py` lists the known kinds of rows. The first row of a file decides its kind, unless the
caller names one.

Whatever cannot be used is a `UserError` of one line. A bad row may be skipped instead, and is then listed in the
report; damage to the file itself (cut off, not UTF-8, not Parquet) always stops. Rows with an empty answer, and pairs
whose two sides answer different prompts or give the same answer, occur in the best sets and are never an error: they
are left out and listed.

TRL and `datasets` know most of these kinds too. They do not keep the source of a row, which every message, listed flaw
and leaked row here names, and they do not read transcripts as turns.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn, get_args

from rlhf.data import hub, raw, suggest
from rlhf.data.columns import KIND_KEYS
from rlhf.data.fields import NO_FACTS, FileFacts, survey
from rlhf.data.labels import unclear_label
from rlhf.data.margins import SIDES, UnclearRating, ask_for_sign, number_pairs, pair_ratings
from rlhf.data.messages import quoted_keys
from rlhf.data.normal import repeats_prompt
from rlhf.data.parsing import (
    LabelledAnswer,
    OtherKind,
    WrongColumns,
    kind_of,
    parse_row,
    row_object,
)
from rlhf.data.prepare import Preparation, RawRows, prepared, with_pairs
from rlhf.data.rated import Count
from rlhf.data.raw import Malformed
from rlhf.data.rows import KINDS, LEFT_OUT, Document, Example, LeftOut, PreferencePair, PromptOnly, Row, of_kind
from rlhf.data.unread import UnknownColumn, ignoring, refuse_unread
from rlhf.data.verdicts import Columns, compared, preference
from rlhf.errors import UserError
from rlhf.files import sha256
from rlhf.recipe.choices import DataFormat, OnBadRow, RowKind
from rlhf.recipe.names import is_commit
from rlhf.terminal import counted

PEEKED = 1000  # rows behind a bad one that are looked at for the advice


@dataclass(frozen=True, slots=True)
class FileReport:
    """A file, or one split of a hub set; `sha256` is of the file's bytes, of a hub set's rows as JSON lines."""

    name: str
    sha256: str
    kind: RowKind
    rows: int


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Files that were read, and the rows that were not kept.

    `malformed` pairs a source with what is wrong; `left_out` has the sources of the other rows by reason. `notes` say
    which columns were not used, and which pairs were made of rated answers.
    """

    files: tuple[FileReport, ...]
    malformed: tuple[tuple[str, str], ...]
    left_out: Mapping[LeftOut, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Return the number of rows read, those left out included."""
        return sum(file.rows for file in self.files)

    def counts(self) -> dict[str, int]:
        """Return how many rows were not kept, by reason."""
        return {"malformed": len(self.malformed), **{name: len(sources) for name, sources in self.left_out.items()}}

    def summary(self) -> str:
        """Return one line: how many rows were kept of which files, and how many were left out for which reason."""
        kept, rows = self.rows - sum(self.counts().values()), counted(self.rows, "row")
        reasons = (f"{LEFT_OUT[reason]} {len(sources):,}" for reason, sources in self.left_out.items())
        return (
            f"{kept:,} of {rows} kept from {', '.join(file.name for file in self.files)}; "
            f"left out: {', '.join((f'malformed {len(self.malformed):,}', *reasons))}"
        )


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """Rows, one kind after another and each kind in the order of the files, with the report of reading them."""

    rows: tuple[Row, ...]
    report: ReadReport

    @property
    def documents(self) -> tuple[Document, ...]:
        return tuple(of_kind(self.rows, Document))

    @property
    def examples(self) -> tuple[Example, ...]:
        return tuple(of_kind(self.rows, Example))

    @property
    def pairs(self) -> tuple[PreferencePair, ...]:
        return tuple(of_kind(self.rows, PreferencePair))

    @property
    def bare_prompts(self) -> tuple[PromptOnly, ...]:
        """Return the prompts without a response."""
        return tuple(of_kind(self.rows, PromptOnly))

    def without(self, rows: Iterable[Row]) -> "ParsedRows":
        """Return all but these very rows, whatever they equal, with the same report."""
        left_out = {id(row) for row in rows}
        return replace(self, rows=tuple(row for row in self.rows if id(row) not in left_out))


class Advice(NamedTuple):
    """Ways out that an error about malformed rows names; they depend on who reads the rows.

    `rename` and `kind` are those for rows of another kind.
    """

    skip: str
    rename: str
    kind: str


RENAME = "rename its columns (`rlhf data convert FILE --rename OLD=NEW --to new.jsonl`)"
RECIPE_ADVICE = Advice(
    "Repair it, or leave such rows out: --set data.on_bad_row=skip; `rlhf data check FILE` lists all",
    f"{RENAME[:-1]}; of a set of the hub: --set data.rename.OLD=NEW)",
    "name its kind of rows: --set data.format=KIND (docs/data.md)",
)
FORMAT = "name its kind of rows with --format KIND"
CONVERT_ADVICE = Advice("Leave such rows out with --skip-bad-rows", "rename its columns with --rename OLD=NEW", FORMAT)
CHECK_ADVICE = Advice("Repair the row", RENAME, FORMAT)
AS_THEY_ARE = Preparation()


def read(
    files: Sequence[str | Path],
    *,
    on_bad_row: OnBadRow = "stop",
    kind: DataFormat = "auto",
    advice: Advice = RECIPE_ADVICE,
    preparation: Preparation = AS_THEY_ARE,
) -> ParsedRows:
    """Read JSON lines, JSON arrays (both also gzipped), CSV, TSV and Parquet.

    The content decides the format, not the name. Raises UserError for files and rows that cannot be used.
    """
    if isinstance(files, str) or not files:
        raise UserError(f"data files: {files!r} is not a list of at least one file; name the files in data.files")
    raw_files = ((str(path), partial(raw.rows, path), partial(sha256, path)) for path in map(Path, files))
    return parse(raw_files, on_bad_row=on_bad_row, kind=kind, advice=advice, preparation=preparation)


# Name, what yields (source, row) of each row from the first on, and hash. Rows are read twice: first for what holds for
# the file.
RawFile = tuple[str, Callable[[], RawRows], Callable[[], str]]


def parse(
    files: Iterable[RawFile],
    *,
    on_bad_row: OnBadRow = "stop",
    kind: DataFormat = "auto",
    advice: Advice = RECIPE_ADVICE,
    preparation: Preparation = AS_THEY_ARE,
) -> ParsedRows:
    """Parse raw rows; all rows of a file have one kind. Raises UserError as `read` does."""
    reader = _Reader(on_bad_row, kind, advice, preparation)
    for name, rows, hash_of_file in files:
        reader.take(name, rows, hash_of_file)
    return reader.rows()


def read_hub(
    name: str,
    revision: str,
    *,
    split: str | None = None,
    data_dir: str | None = None,
    on_bad_row: OnBadRow = "stop",
    kind: DataFormat = "auto",
    preparation: Preparation = AS_THEY_ARE,
) -> ParsedRows:
    """Read one split of a data set on the hub at one commit; `name` may also be a local folder that holds a set.

    `split` None reads `train`.
    """
    if not is_commit(revision):
        raise UserError(
            f"{name}: revision {revision!r} is not a commit of 40 hex digits; branches and tags can move, and the run "
            "could not be repeated. Copy the commit from the set's history on the hub into data.revision"
        )
    import datasets  # slow to import, and only needed here

    split = split or "train"
    label = "/".join(part for part in (name, data_dir, split) if part)
    try:
        # Loads the pinned files: offline, `load_dataset` of a name takes the newest commit that it has ever seen.
        folder = name if Path(name).is_dir() else hub.snapshot(name, revision, data_dir)
        table = datasets.load_dataset(folder, split=split, data_dir=data_dir)
    except Exception as error:  # the library raises a dozen unrelated types, some with the reason only in the cause
        way_out = "check data.name, data.data_dir, data.split and the network; `rlhf fetch` keeps all for later"
        reason = hub.reason(error, f"https://huggingface.co/datasets/{name}", revision, way_out)
        raise UserError(f"{label}: not loaded: {reason}") from error
    digest = hashlib.sha256()

    def rows() -> Iterator[tuple[str, object]]:
        nonlocal digest
        digest = hashlib.sha256()
        for number, row in enumerate(table, 1):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
            yield f"{label}:row {number}", row

    reader = _Reader(on_bad_row, kind, RECIPE_ADVICE, preparation)
    reader.take(label, rows, lambda: digest.hexdigest())
    return reader.rows()


class _Reader:
    """Reader of one file after another, which keeps account of the rows left out."""

    def __init__(self, on_bad_row: OnBadRow, kind: DataFormat, advice: Advice, preparation: Preparation):
        for name, value, choices in (("on_bad_row", on_bad_row, OnBadRow), ("kind", kind, DataFormat)):
            if value not in get_args(choices):
                raise ValueError(f"{name} is one of {', '.join(get_args(choices))}, not {value!r}")
        self.on_bad_row = on_bad_row
        self.advice = advice
        self.kind = kind
        self.preparation = preparation
        self.rating_used = preparation.rating_used or preparation.rating is None
        self.notes: list[str] = []
        self.kept: list[Row] = []
        self.left_out: dict[LeftOut, list[str]] = {reason: [] for reason in LEFT_OUT}
        self.malformed: list[tuple[str, str]] = []
        self.files: list[FileReport] = []

    def take(self, name: str, rows: Callable[[], RawRows], sha256: Callable[[], str]) -> None:
        """Parse the (source, row) of one file; `sha256` is called after the last row."""
        kind: RowKind | None = None if self.kind == "auto" else self.kind
        self.name = name
        count, first = 0, len(self.kept)
        bad: dict[int, tuple[str, Malformed]] = {}  # by the row's number
        facts = replace(survey(self._prepared(rows(), Count())), rating=self.preparation.rating)
        rated, unused = Count(), dict[str, None]()
        remaining = iter(self._prepared(rows(), rated))
        for source, value in remaining:
            count += 1
            try:
                row = row_object(value)
                kind = self._checked_kind(row, kind)
                outcome = self._parsed(row, kind, source, facts, unused)
            except LabelledAnswer as problem:  # no row is used: an answer without a label may be a bad one too
                raise UserError(f"{source}: {problem}") from None
            except Malformed as problem:
                if self.on_bad_row == "stop":
                    way_out = self._way_out(problem, remaining, facts) if count == 1 else [self.advice.skip]
                    raise UserError(_with_advice(source, problem, way_out)) from None
                bad[count] = source, problem
            else:
                if isinstance(outcome, str):
                    self.left_out[outcome].append(source)
                else:
                    self.kept.append(outcome)
                self.rating_used = self.rating_used or bool(pair_ratings(row, facts.rating))
        self.rating_used |= bool(rated.prompts)
        self._note(name, rated, [*unused, *rated.unused], self.kept[first:], facts)
        if not count:
            why = f"{rated.in_words(self.preparation.rated)}: no pair to train on" if rated.prompts else "no rows in it"
            raise UserError(f"{name}: {why}; add some (docs/data.md), or name another file")
        if kind is None or 2 * len(bad) > count:
            self._refuse(name, [bad[number] for number in sorted(bad)], count)
        self.malformed += [(source, str(problem)) for _, (source, problem) in sorted(bad.items())]
        assert kind is not None
        self.files.append(FileReport(name, sha256(), kind, count))

    def _note(self, name: str, rated: Count, unused: Sequence[str], rows: Sequence[Row], facts: FileFacts) -> None:
        """Add what is worth a line about a file: pairs of rated answers, columns without use, answers with prompts."""
        if rated.prompts:
            self.notes.append(f"{name}: {rated.in_words(self.preparation.rated)}")
        if unused:
            them = "it" if len(unused) == 1 else "them"
            says = f"{ignoring(unused)} says that no answer needs {them}"
            numbers = (pair for row in facts.sample for pair in number_pairs(row, *SIDES))
            unclear = next((number for number, _ in numbers if {number, number.partition(".")[0]} & {*unused}), None)
            if unclear and not any(isinstance(row, PreferencePair) and row.margin is not None for row in rows):
                why = f"no pair has {facts.rating} (data.rating)" if facts.rating else ask_for_sign(unclear)
                says += f". No rating is compared with the labels (inverted, tied): {why}"
            self.notes.append(f"{name}: not used in training: {', '.join(unused)}; {says}")
        if 2 * (repeated := sum(map(repeats_prompt, rows))) > len(rows):
            self.notes.append(
                f"{name}: {repeated:,} of {len(rows):,} answers begin with their prompt, and a model will learn to "
                "repeat it: write the answers alone, or leave such rows out: data.drop=[repeats_prompt]"
            )

    def _refuse(self, name: str, bad: Sequence[tuple[str, Malformed]], count: int) -> NoReturn:
        """Raise UserError for a file of which most rows are bad."""
        source, first = bad[0]
        if count == 1:
            raise UserError(_with_advice(source, first, self._repair(first)))
        likely = ": likely the wrong format" if isinstance(first, WrongColumns | OtherKind) else ""
        advice = "".join(f"{way_out}; the" for way_out in self._repair(first)) or "The"
        raise UserError(
            f"{name}: {len(bad):,} of {count:,} rows are malformed, more than half{likely}. {advice} first is "
            f"{source}: {first}"
        )

    def _prepared(self, rows: RawRows, count: Count) -> RawRows:
        """Return rows as the preparation says; rated answers become pairs unless another kind is named."""
        rows = prepared(rows, self.preparation)
        return with_pairs(rows, self.preparation, count) if self.kind in ("auto", "preference") else rows

    def _way_out(self, problem: Malformed, later: Iterator[tuple[str, object]], facts: FileFacts) -> list[str]:
        """Return advice on a bad first row. It may be left out only if one of the rows behind it can be used."""
        peeked = list(itertools.islice(later, PEEKED))
        if any(self._usable(value, facts) for _, value in peeked):
            return [self.advice.skip]
        same = [f"The next {len(peeked):,} rows are malformed too"] if len(peeked) > 1 else []
        return [*same, *self._repair(problem)]

    def _repair(self, problem: Malformed) -> list[str]:
        """Return advice on a file whose rows have this problem; none where the problem says what to do."""
        if isinstance(problem, WrongColumns | UnknownColumn | UnclearRating):
            return []
        if not isinstance(problem, OtherKind):
            return ["Repair the file"]
        if self.kind != "auto":  # the kind is named
            return [f"Repair the file, or {self.advice.rename}"]
        return [f"Repair the file, {self.advice.rename}, or {self.advice.kind}"]

    def _usable(self, value: object, facts: FileFacts) -> bool:
        """Return whether a row can be read."""
        try:
            row = row_object(value)
            self._parsed(row, self._checked_kind(row, None if self.kind == "auto" else self.kind), "", facts, {})
        except Malformed:
            return False
        return True

    def _parsed(
        self, row: dict[str, object], kind: RowKind, source: str, facts: FileFacts, unused: dict[str, None]
    ) -> Row | LeftOut:
        """Return a row of the kind, or why it is left out. Raises Malformed, also for a column that nothing reads.

        Columns that are named and no more are added to `unused`.
        """
        outcome = parse_row(row, kind, source, facts)
        refuse_unread(row, kind, facts, self.kind == "auto", unused)
        return outcome

    def _checked_kind(self, row: dict[str, object], kind: RowKind | None) -> RowKind:
        """Return the file's kind, which its first row of any known kind decides. Raises Malformed for other rows."""
        if self.kind in ("auto", "preference") and (columns := compared(row)):
            raise _comparison(row, columns, self.preparation.rating)
        if self.kind != "auto":
            return self.kind
        row_kind = kind_of(row)
        kind = kind or row_kind
        if kind is None:
            is_file = Path(self.name).is_file()  # and no set of the hub
            raise _unknown_columns(row, suggest.command(self.name, row, self._suits) if is_file else None)
        if row_kind == "completion" and (label := unclear_label(row)):
            raise _unclear(label)
        if kind == "completion" and row_kind == "labelled":
            return kind  # whose parser refuses it
        if row_kind not in (None, kind):
            raise OtherKind(
                f"one {row_kind} row among {kind} rows, which have {', '.join(KIND_KEYS[kind])}; "
                f"this one has {quoted_keys(row)}. Keep one kind in a file, or name it in data.format (--format)"
            )
        return kind

    @staticmethod
    def _suits(row: dict[str, object], kind: RowKind, named: bool) -> None:
        """Raise Malformed for a row that is none of a kind; a kind that is `named` needs no other columns."""
        if not named and kind_of(row) != kind:
            raise OtherKind("its columns show another kind")
        parse_row(row, kind, "", NO_FACTS)
        refuse_unread(row, kind, NO_FACTS, not named, {})

    def rows(self) -> ParsedRows:
        """Return what was read so far. Raises UserError for a rating that no row has."""
        if not self.rating_used:
            raise UserError(
                f"{', '.join(file.name for file in self.files)}: no row has the number {self.preparation.rating} "
                "(data.rating, --rating) for each of its answers; take it out, or correct its name"
            )
        left_out = {reason: tuple(sources) for reason, sources in self.left_out.items()}
        report = ReadReport(tuple(self.files), tuple(self.malformed), left_out, tuple(self.notes))
        return ParsedRows(tuple(sorted(self.kept, key=lambda row: KINDS.index(type(row)))), report)


def _with_advice(source: str, problem: Malformed, advice: Sequence[str]) -> str:
    """Return one line: where a row stands, what is wrong with it, and what to do."""
    return ". ".join((f"{source}: {str(problem).removesuffix('.')}", *advice))


def _unknown_columns(row: dict[str, object], command: str | None) -> WrongColumns:
    """Return the error for the first row of a file if its columns show no kind; `command` may rewrite the file."""
    kinds = "; ".join(f"{name} ({', '.join(keys)})" for name, keys in KIND_KEYS.items())
    prompts = " Prompts without answers: data.format: prompt (--format prompt) ignores other columns"
    rename = "`rlhf data convert FILE --rename problem=prompt --to new.jsonl` does that, and so does --set "
    rename += "data.rename.problem=prompt."
    way_out = f"{command}. Otherwise rename them" if command else "Rename them"
    return WrongColumns(
        f"unknown columns: {quoted_keys(row)}. {way_out} to those of a known kind: {kinds}."
        + ("" if command else f" {rename}")
        + (prompts if "prompt" in row else "")
    )


def _comparison(row: dict[str, object], columns: Columns, rating: str | None) -> WrongColumns:
    """Return the error for two responses, whose better one a verdict or their ratings say, or nothing does yet."""
    verdict = "" if columns.verdict is None else f" and a verdict ({columns.verdict})"
    found = f"two responses ({columns.first}, {columns.second}){verdict}"
    command = "`rlhf data convert FILE --to pairs.jsonl`"
    try:
        preference(row, columns, rating)
    except Malformed as problem:
        return WrongColumns(f"{found}, of which {command} makes no pair yet: {problem}")
    return WrongColumns(f"{found}: {command} makes pairs of the better and the worse one")


def _unclear(label: str) -> WrongColumns:
    """Return the error for an answer whose label may mean good or bad and says neither."""
    return WrongColumns(
        f"the label {label[:40]!r} is neither true nor false: write one of them if it judges the answer (KTO), or "
        "rename the column, or name the kind in data.format (--format)"
    )
