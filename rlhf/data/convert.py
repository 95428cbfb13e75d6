"""Conversion of rows of any known kind to JSON lines of one plain form each; columns may be renamed on the way.

    documents          {"text"}
    examples           {"prompt": [messages], "completion": text, "answer"?: text}
    preference pairs   {"prompt": [messages], "chosen": text, "rejected": text, "margin"?: number}
    prompts            {"prompt": [messages], "answer"?: text}

A completion or an answer of a pair that begins like a transcript, or with a space, is a list of one message. One that
follows turns of the assistant is a list with these turns in front of it.

Answers that are labelled good or bad one by one (KTO: `prompt`, `completion`, `label`) become pairs: the first good and
the first bad answer to a prompt, then the second ones.

Rows of two responses with a verdict become pairs too, without the ties.
"""

import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rlhf.data import formats, raw
from rlhf.data.fields import FileFacts, has_value, survey
from rlhf.data.labels import label_of
from rlhf.data.normal import normal_prompt
from rlhf.data.parsing import kind_of, parse_row, row_object
from rlhf.data.prepare import Preparation, prepared
from rlhf.data.raw import Malformed
from rlhf.data.rows import Document, Example, LeftOut, Message, PreferencePair, Row
from rlhf.data.transcripts import begins_with_turn
from rlhf.data.unread import refuse_unread
from rlhf.data.verdicts import OtherNumbers, compared, preference
from rlhf.errors import OptionError, UserError
from rlhf.files import json_lines, replacing, sha256
from rlhf.recipe.choices import DataFormat, OnBadRow
from rlhf.terminal import counted

RawRow = tuple[str, object]  # source and row

OTHER_SUFFIXES = (".parquet", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst", ".zip")  # of files that are not JSON lines


class Pairing(NamedTuple):
    """The numbers of a file's labelled answers, of the pairs that were made of them, and of rows without an answer."""

    file: str
    answers: int
    pairs: int
    left_out: int  # their answer is empty, or the row says that it is not trained on
    unused: tuple[str, ...] = ()  # columns that are the same throughout the file

    def in_words(self) -> str:
        """Return one line: `kto.jsonl: 4 answers: 1 pair, 2 answers without a partner`."""
        alone = counted(self.answers - 2 * self.pairs, "answer")
        left_out = f", {self.left_out:,} empty or untrained left out" if self.left_out else ""
        left_out += f"; not used in training: {', '.join(self.unused)}" if self.unused else ""
        return (
            f"{self.file}: {counted(self.answers, 'answer')}: {counted(self.pairs, 'pair')}, "
            f"{alone} without a partner{left_out}"
        )


class Comparisons(NamedTuple):
    """The numbers of a file's rows of two responses with a verdict, and of the ties among them."""

    file: str
    compared: int
    ties: int

    def in_words(self) -> str:
        """Return one line: `arena.jsonl: 3 comparisons: 2 pairs, 1 tie left out`."""
        pairs, ties = counted(self.compared - self.ties, "pair"), counted(self.ties, "tie")
        return f"{self.file}: {counted(self.compared, 'comparison')}: {pairs}, {ties} left out"


class Converted(NamedTuple):
    """The rows of all files, and how pairs were made in each file of labelled answers or of comparisons."""

    rows: formats.ParsedRows
    pairings: list[Pairing | Comparisons]


def convert(
    files: Sequence[Path],
    preparation: Preparation = formats.AS_THEY_ARE,
    on_bad_row: OnBadRow = "stop",
    kind: DataFormat = "auto",
) -> Converted:
    """Read files of a kind as `preparation` says. Raises UserError as `formats.read` does."""
    raw_files = []
    pairings: list[Pairing | Comparisons] = []
    for file in files:
        rows = partial(_rows, file, preparation)
        if kind in ("auto", "preference"):
            if _holds_labelled(rows()):
                paired = [*_pair_labelled(str(file), rows(), pairings, kind, survey(rows()))]
                rows = partial(iter, paired)
            elif _holds_compared(rows()):
                paired = [*_pair_compared(str(file), rows(), pairings, preparation.rating)]
                rows = partial(iter, paired)
        raw_files.append((str(file), rows, partial(sha256, file)))
    used = any(isinstance(pairing, Comparisons) for pairing in pairings)
    pairs_only = Preparation(rated=preparation.rated, rating=preparation.rating, rating_used=used)
    advice = formats.CONVERT_ADVICE
    parsed = formats.parse(raw_files, on_bad_row=on_bad_row, kind=kind, advice=advice, preparation=pairs_only)
    kinds = {type(row): row.source for row in parsed.rows}
    if len(kinds) > 1:
        raise UserError(f"rows of different kinds: {', '.join(kinds.values())}; convert them into a file for each kind")
    return Converted(parsed, pairings)


def _rows(file: Path, preparation: Preparation) -> Iterator[RawRow]:
    return iter(prepared(raw.rows(file), preparation))


def write(rows: formats.ParsedRows, file: Path) -> int:
    """Write rows as JSON lines to a new file. Return their number.

    Raises UserError where there is a file already, for a name of another kind of file, and without rows.
    """
    converted = rows.rows
    if os.path.lexists(file):
        raise UserError(f"{file}: is there already and is not overwritten; choose another --to")
    if file.suffix.lower() in OTHER_SUFFIXES:
        raise UserError(f"{file}: JSON lines are written, and no {file.suffix[1:]}; give it a name that ends in .jsonl")
    if not converted:
        raise UserError(f"{file}: no row is left to write; `rlhf data check` says why")
    with replacing(file) as temporary:
        temporary.write_text(json_lines(map(_plain, converted)), encoding="utf-8")
    return len(converted)


def _plain(row: Row) -> dict[str, object]:
    """Return a row as the object to write."""
    if isinstance(row, Document):
        return {"text": row.text}
    if isinstance(row, PreferencePair):
        return _plain_pair(row.prompt, row.chosen, row.rejected) | (
            {} if row.margin is None else {"margin": row.margin}
        )
    prompt, before = _split(row.prompt)
    response: dict[str, object] = {"completion": _answer(before, row.response)} if isinstance(row, Example) else {}
    if isinstance(row, Example) and row.good is not None:
        response["label"] = row.good
    return {"prompt": prompt, **response, **({} if row.right_answer is None else {"answer": row.right_answer})}


def _plain_pair(messages: Sequence[Message], chosen: str, rejected: str) -> dict[str, object]:
    """Return a pair as the object to write, without its margin."""
    prompt, before = _split(messages)
    return {"prompt": prompt, "chosen": _answer(before, chosen), "rejected": _answer(before, rejected)}


def _split(messages: Sequence[Message]) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return a prompt up to its last user turn, and the assistant turns behind it.

    These are written in front of the answer: the reader refuses a prompt that ends with them.
    """
    objects = [_plain_message(message) for message in messages]
    end = len(objects)
    while end and objects[end - 1]["role"] == "assistant":
        end -= 1
    return objects[:end], objects[end:]


def _plain_message(message: Message) -> dict[str, object]:
    """Return a message as the object to write; an answer that is context alone keeps its weight of 0."""
    context = {"weight": 0} if message.role == "assistant" and not message.trained else {}
    return {"role": message.role, "content": message.content, **context}


def _answer(before: list[dict[str, object]], text: str) -> object:
    """Return an answer as text, or as messages where turns stand before it or the reader would change the text."""
    if before or text.startswith(" ") or begins_with_turn(text):
        return [*before, {"role": "assistant", "content": text}]
    return text


def _holds_labelled(rows: Iterable[RawRow]) -> bool:
    """Return whether answers are labelled one by one; some of them may lack their label."""
    for _, row in rows:
        if isinstance(row, dict) and (kind := kind_of(row)) is not None:
            if kind not in ("completion", "labelled"):
                return False
            if kind == "labelled":
                return True
    return False


def _holds_compared(rows: Iterable[RawRow]) -> bool:
    """Return whether the first row of a known form has two responses and a verdict."""
    for _, row in rows:
        if isinstance(row, dict):
            if compared(row):
                return True
            if kind_of(row) is not None:
                return False
    return False


def _pair_compared(
    name: str, rows: Iterable[RawRow], pairings: list[Pairing | Comparisons], rating: str | None
) -> Iterator[RawRow]:
    """Yield preference rows from rows of two responses with a verdict, without ties, and add their numbers.

    Raises UserError when all are ties, and for a verdict that counts the responses in another way: no row is used then.
    """
    pairs = ties = bad = 0
    for source, value in rows:
        try:
            row = row_object(value)
            columns = compared(row)
            if columns is None:
                raise Malformed("no two responses with a verdict, as other rows of the file have them")
            pair = preference(row, columns, rating)
        except OtherNumbers as problem:
            raise UserError(f"{source}: {problem}") from None
        except Malformed as problem:
            bad += 1
            yield source, problem
            continue
        if pair is None:
            ties += 1
        else:
            pairs += 1
            yield source, pair
    if ties and not pairs + bad:
        raise UserError(f"{name}: every row is a tie, so there is no pair to make")
    pairings.append(Comparisons(name, pairs + ties, ties))


def _pair_labelled(
    name: str, rows: Iterable[RawRow], pairings: list[Pairing | Comparisons], kind: DataFormat, facts: FileFacts
) -> Iterator[RawRow]:
    """Yield preference rows from labelled answers and add their numbers to `pairings`.

    Answers belong together whose prompts, the system message among them, are spellings of one text. Raises UserError
    when no prompt has both kinds of answers.
    """
    answers: dict[Hashable, tuple[list[Example], list[Example]]] = defaultdict(lambda: ([], []))
    left_out = bad_rows = 0
    unused: dict[str, None] = {}
    for source, value in rows:
        try:
            row = row_object(value)
            example = _labelled(row, source, kind, facts, unused)
        except Malformed as problem:
            bad_rows += 1
            yield source, problem
            continue
        if isinstance(example, Example):
            answers[normal_prompt(example.prompt)][not label_of(row)].append(example)
        else:
            left_out += 1
    pairs = 0
    for good, bad in answers.values():
        for number, (chosen, rejected) in enumerate(zip(good, bad, strict=False), 1):
            pairs += 1
            source = f"{name}: pair {number} of prompt {good[0].prompt[-1].content!r:.40}"
            yield source, _plain_pair(good[0].prompt, chosen.response, rejected.response)
    if not pairs + bad_rows:  # the reader names the bad rows
        raise UserError(f"{name}: no prompt has a good and a bad answer, so there is nothing to pair")
    count = sum(len(good) + len(bad) for good, bad in answers.values())
    pairings.append(Pairing(name, count, pairs, left_out, (*unused,)))


def _labelled(
    row: dict[str, object], source: str, kind: DataFormat, facts: FileFacts, unused: dict[str, None]
) -> Row | LeftOut:
    """Return the example of a labelled answer, or why it is left out. Raises Malformed, also where a column is lost."""
    if kind_of(row) != "labelled":
        raise Malformed("no 'prompt' with a 'label' of true or false, as other rows of the file have them")
    if has_value(row.get("completion")) and has_value(row.get("response")):
        raise Malformed("answers under 'completion' and 'response'; take one out")
    example = parse_row({**row, "label": None}, "completion", source, facts)
    others = {key: value for key, value in row.items() if key not in ("completion", "response", "label")}
    refuse_unread(others, "preference", replace(facts, sample=()), kind == "auto", unused)
    return example


def parse_names(pairs: Sequence[str]) -> dict[str, str]:
    """Parse column names of the command line, `question=prompt`, into {old: new}.

    Raises OptionError for anything else, for a column that is named twice, and for two of one new name.
    """
    names: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise OptionError(f"--rename {pair}: write OLD=NEW, for example question=prompt")
        if old in names:
            raise OptionError(f"--rename {pair}: {old} has the new name {names[old]} already; give each column one")
        if new in names.values():
            raise OptionError(f"--rename {pair}: gives two columns the same name; give each another name")
        names[old] = new
    return names
