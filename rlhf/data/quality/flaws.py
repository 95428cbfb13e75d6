"""Rows that look flawed: what `rlhf data check` counts and lists, and what `data.drop` leaves out."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from rapidfuzz.distance import Indel

from rlhf.data.formats import Rows
from rlhf.data.quality.oddities import ODDITIES, script, unfinished
from rlhf.data.rows import Document, Example, Message, PreferencePair, Row

NEAR_IDENTICAL = 0.95  # least share of words, in order, that two answers have in common

Finder = Callable[[Sequence[Row]], list[Row]]


def prompt(row: Row) -> tuple[Message, ...]:
    return () if isinstance(row, Document) else row.prompt


def answers(row: Row) -> tuple[str, ...]:
    if isinstance(row, PreferencePair):
        return row.chosen, row.rejected
    return (row.response,) if isinstance(row, Example) else ()


def texts(row: Row) -> tuple[str, ...]:
    """Every text of a row, message by message."""
    own = (row.text,) if isinstance(row, Document) else answers(row)
    return *(message.content for message in prompt(row)), *own


def near_identical(rows: Sequence[Row]) -> list[Row]:
    """Pairs whose answers share NEAR_IDENTICAL of their words in order."""
    return [row for row in _pairs(rows) if nearly_identical(row.chosen.split(), row.rejected.split())]


def contradictory(rows: Sequence[Row]) -> list[Row]:
    """Pairs whose prompt and answers appear with the opposite label too, all copies of both."""
    pairs = _pairs(rows)
    labelled = {(pair.prompt, pair.chosen, pair.rejected) for pair in pairs}
    return [pair for pair in pairs if (pair.prompt, pair.rejected, pair.chosen) in labelled]


def duplicates(rows: Sequence[Row]) -> list[Row]:
    """Rows that repeat an earlier one, the first of each not among them."""
    seen: set[Hashable] = set()
    found = []
    for row in rows:
        content = row.text if isinstance(row, Document) else (row.prompt, answers(row))
        if content in seen:
            found.append(row)
        seen.add(content)
    return found


def one_word(rows: Sequence[Row]) -> list[Row]:
    """Rows with a response of at most one word."""
    return [row for row in rows if any(len(answer.split()) <= 1 for answer in answers(row))]


def cut_off(rows: Sequence[Row]) -> list[Row]:
    """Rows with a response that stops in the middle."""
    return [row for row in rows if any(map(unfinished, answers(row)))]


def other_script(rows: Sequence[Row]) -> list[Row]:
    """Rows with a response in another script than the message it answers: a translation, or a slip of language."""
    found = []
    for row in rows:
        asked = script(row.prompt[-1].content) if not isinstance(row, Document) else None
        if asked and any(script(answer) not in (asked, None) for answer in answers(row)):
            found.append(row)
    return found


def odd(sign: Callable[[str], bool], rows: Sequence[Row]) -> list[Row]:
    """Rows with any text that shows the sign."""
    return [row for row in rows if any(map(sign, texts(row)))]


FLAWS: dict[str, Finder] = {
    "near_identical": near_identical,
    "contradictory": contradictory,
    "duplicates": duplicates,
    "one_word": one_word,
    "unfinished": cut_off,
    "other_script": other_script,
    **{name: partial(odd, sign) for name, sign in ODDITIES.items()},
}


def drop(rows: Rows, reasons: Iterable[str]) -> tuple[Rows, dict[str, int]]:
    """The rows without those that have one of the flaws, and how many each reason took; the first one counts.

    Each reason looks at what the ones before it left: after `contradictory` no pair is a duplicate of what is gone.
    """
    counts = {}
    for reason in reasons:
        gone = {id(row) for row in FLAWS[reason]([*rows.documents, *rows.examples, *rows.pairs, *rows.prompts])}
        counts[reason] = len(gone)
        rows = replace(
            rows,
            documents=tuple(row for row in rows.documents if id(row) not in gone),
            examples=tuple(row for row in rows.examples if id(row) not in gone),
            pairs=tuple(row for row in rows.pairs if id(row) not in gone),
            prompts=tuple(row for row in rows.prompts if id(row) not in gone),
        )
    return rows, counts


def nearly_identical(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether 2·M / (|a| + |b|) is at least NEAR_IDENTICAL, M the length of the longest common subsequence of words.

    Two answers without words are identical.
    """
    return Indel.normalized_similarity(a, b, score_cutoff=NEAR_IDENTICAL) >= NEAR_IDENTICAL


def _pairs(rows: Iterable[Row]) -> list[PreferencePair]:
    return [row for row in rows if isinstance(row, PreferencePair)]
