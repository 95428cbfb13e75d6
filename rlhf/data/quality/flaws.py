"""Flaws of rows, which `rlhf data check` counts and lists and which `data.drop` leaves out."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

from rapidfuzz.distance import Indel

from rlhf.data.formats import ParsedRows
from rlhf.data.normal import normal_answer, normal_prompt, normalise, repeats_prompt
from rlhf.data.quality.oddities import ODDITIES, unfinished
from rlhf.data.quality.template_marks import templated
from rlhf.data.rows import Document, Example, Message, PreferencePair, PromptOnly, Row
from rlhf.data.scripts import script, words

NEAR_IDENTICAL = 0.95  # least share of words, in order, that two answers have in common

Finder = Callable[[Sequence[Row]], list[Row]]


def prompt(row: Row) -> tuple[Message, ...]:
    """Return the messages of a row's prompt; () for a document."""
    return () if isinstance(row, Document) else row.prompt


def responses(row: Row) -> tuple[str, ...]:
    """Return the responses of a row: both of a pair, the response of an example, () for other rows."""
    if isinstance(row, PreferencePair):
        return row.chosen, row.rejected
    return (row.response,) if isinstance(row, Example) else ()


def texts(row: Row) -> tuple[str, ...]:
    """Return every text of a row, message by message."""
    answer_texts = (row.text,) if isinstance(row, Document) else responses(row)
    return *(message.content for message in prompt(row)), *answer_texts


def near_identical(rows: Sequence[Row]) -> list[Row]:
    """Return the pairs whose answers share NEAR_IDENTICAL of their words in order."""
    return [row for row in _pairs(rows) if nearly_identical(words(row.chosen), words(row.rejected))]


def contradictory(rows: Sequence[Row]) -> list[Row]:
    """Return the pairs whose prompt and answers appear with the opposite label too, all copies of both."""
    pairs = _pairs(rows)
    keys = [(normal_prompt(pair.prompt), normalise(pair.chosen), normalise(pair.rejected)) for pair in pairs]
    labelled = set(keys)
    return [
        pair
        for pair, (asked, chosen, rejected) in zip(pairs, keys, strict=True)
        if (asked, rejected, chosen) in labelled
    ]


def tied(rows: Sequence[Row]) -> list[Row]:
    """Return the pairs whose answers were scored alike."""
    return [pair for pair in _pairs(rows) if pair.margin == 0]


def inverted(rows: Sequence[Row]) -> list[Row]:
    """Return the pairs whose rejected answer was scored above the chosen one."""
    return [pair for pair in _pairs(rows) if pair.margin is not None and pair.margin < 0]


def duplicates(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that repeat an earlier row; the first of each is not among them."""
    seen: set[Hashable] = set()
    repeated = []
    for row in rows:
        answer = row.right_answer if isinstance(row, Example | PromptOnly) else None
        content: Hashable = (
            type(row),
            normal_prompt(prompt(row)),
            tuple(map(normalise, (row.text,) if isinstance(row, Document) else responses(row))),
            None if answer is None else normal_answer(answer),
        )
        if content in seen:
            repeated.append(row)
        seen.add(content)
    return repeated


def further_answers(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with another right answer than an earlier row that has the same prompt."""
    first: dict[Hashable, Hashable] = {}
    return [
        row
        for row in rows
        if isinstance(row, Example | PromptOnly)
        and row.right_answer is not None
        and first.setdefault(normal_prompt(row.prompt), answer := normal_answer(row.right_answer)) != answer
    ]


def one_word(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a response of at most one word."""
    return [row for row in rows if any(len(words(answer)) <= 1 for answer in responses(row))]


def with_the_prompt(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose answers all begin with what they answer."""
    return [row for row in rows if repeats_prompt(row)]


def cut_off(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a response that stops in the middle."""
    return [row for row in rows if any(map(unfinished, responses(row)))]


def other_script(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a response in another script than the message that it answers.

    Such a response is a translation, or a slip into another language.
    """
    mismatched = []
    for row in rows:
        prompt_script = script(row.prompt[-1].content) if not isinstance(row, Document) else None
        if prompt_script and any(script(answer) not in (prompt_script, None) for answer in responses(row)):
            mismatched.append(row)
    return mismatched


def odd(sign: Callable[[str], bool], rows: Sequence[Row]) -> list[Row]:
    """Return the rows with any text that shows the sign."""
    return [row for row in rows if any(map(sign, texts(row)))]


def templated_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a text that holds marks of a chat template; documents get no template a second time."""
    return odd(templated, [row for row in rows if not isinstance(row, Document)])


FLAWS: dict[str, Finder] = {
    "near_identical": near_identical,
    "contradictory": contradictory,
    "tied": tied,
    "inverted": inverted,
    "duplicates": duplicates,
    "further_answers": further_answers,
    "one_word": one_word,
    "repeats_prompt": with_the_prompt,
    "unfinished": cut_off,
    "other_script": other_script,
    "templated": templated_rows,
    **{name: partial(odd, sign) for name, sign in ODDITIES.items()},
}


def drop(rows: ParsedRows, reasons: Iterable[str]) -> tuple[ParsedRows, dict[str, int]]:
    """Remove the rows that have one of the flaws. Return the other rows, and how many rows each reason removed.

    Each reason looks at what the reasons before it left, so a row counts for the first reason that applies: after
    `contradictory` no pair is a duplicate of a removed one.
    """
    counts = {}
    for reason in reasons:
        kept = rows.without(FLAWS[reason](rows.rows))
        counts[reason] = len(rows.rows) - len(kept.rows)
        rows = kept
    return rows, counts


def nearly_identical(a: Sequence[str], b: Sequence[str]) -> bool:
    """Return whether 2·M / (|a| + |b|) is at least NEAR_IDENTICAL.

    M is the length of the longest common subsequence of words. Two answers without words are identical.
    """
    return Indel.normalized_similarity(a, b, score_cutoff=NEAR_IDENTICAL) >= NEAR_IDENTICAL


def _pairs(rows: Iterable[Row]) -> list[PreferencePair]:
    """Return the preference pairs among the rows."""
    return [row for row in rows if isinstance(row, PreferencePair)]
