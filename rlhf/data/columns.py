"""Columns of rows: those that each kind of row is read from, and which others may stand beside them."""

import itertools
from collections.abc import Iterator

from rlhf.data.fields import (
    NO_FACTS,
    Field,
    FileFacts,
    Unread,
    has_value,
    is_free,
    is_text,
    is_word,
    leaves,
    switches_training,
    values,
)
from rlhf.data.margins import SIDES, number_or_none, pair_ratings, twin_fields
from rlhf.data.normal import normalise
from rlhf.data.raw import Malformed
from rlhf.data.verdicts import agrees, names_verdict
from rlhf.recipe.choices import RowKind

KIND_KEYS: dict[RowKind, tuple[str, ...]] = {
    "text": ("text",),
    "hh": ("chosen", "rejected"),
    "instruction": ("instruction", "output"),
    "preference": ("prompt", "chosen", "rejected"),
    "completion": ("prompt", "completion"),
    "labelled": ("prompt", "completion", "label"),
    "question": ("question", "answer"),
    "messages": ("messages",),
    "prompt": ("prompt",),
}
ANSWER_COLUMNS = ("chosen", "rejected", "completion", "response")
MESSAGE_COLUMNS = ("prompt", "messages", "conversations", *ANSWER_COLUMNS)  # that may hold messages
CONTEXT = ("history", "context", "passage")  # keys of what a prompt continues or is about
INPUT_COLUMNS = ("tools", "functions", "documents", "images", "image", "audio", "audios", "video", "videos")
USED_COLUMNS: dict[RowKind, tuple[str, ...]] = {  # beside `KIND_KEYS`, `system` and what switches training
    "text": (),
    "hh": (),
    "instruction": ("input",),
    "preference": (),
    "completion": ("response", "answer", "label"),
    "labelled": ("response",),
    "question": (),
    "messages": ("conversations",),
    "prompt": ("answer",),
}


def either(row: dict[str, object], *names: str) -> str:
    """Return which of several columns for one thing has a value; the first without any.

    Raises Malformed where two have different values.
    """
    given = [name for name in names if has_value(row.get(name))]
    if len(given) > 1 and row[given[0]] != row[given[1]]:
        raise Malformed(f"'{given[0]}' and '{given[1]}' differ, and only one of them can be trained on; take one out")
    present = [name for name in names if name in row]
    return (given or present or names)[0]


def refuse_inputs(row: dict[str, object], kind: RowKind) -> None:
    """Raise Malformed for a column that holds what an answer is about, and that no stage can give to the model."""
    lost = next((key for key in INPUT_COLUMNS if row.get(key) is not False and has_value(row.get(key))), None)
    if lost is not None:
        raise Malformed(f"'{lost}' would be lost, and the answer may depend on it; take the row out")
    context = next((key for key in CONTEXT if kind not in ("text", "prompt") and has_value(row.get(key))), None)
    if context is not None:
        raise Malformed(f"'{context}' would be lost; put it into the prompt, or take the column out")


def unread_columns(row: dict[str, object], kind: RowKind, facts: FileFacts = NO_FACTS) -> Unread:
    """Return the columns of a row that no stage reads.

    Ids, times and the like are neither refused nor named; nor is a column that repeats what others say, as sets of the
    hub have it. What a pair says of each of its answers is about them, if it is no text. A document answers nothing.
    """
    used = {*KIND_KEYS[kind], *USED_COLUMNS[kind], "system"}
    told = [row[name] for name in row if name in used]
    is_pair = kind in ("preference", "hh")
    about = set(itertools.chain(*twin_fields(row, *SIDES))) if is_pair else set()
    rates = {name for _, *names in pair_ratings(row, facts.rating) for name in names} if is_pair else set()
    unread = Unread([], [])
    for column, content in row.items():
        if column in used or switches_training(column) or _is_repeated(content, told):
            continue
        verdict = is_pair and names_verdict(column) and has_value(content)
        if is_pair and (column == "margin" or (verdict and agrees(column, content))):
            continue
        others = [leaf for leaf in leaves(column, content) if verdict or not _is_free(*leaf, rates, facts)]
        if kind == "text" or (not verdict and all(_is_told(name, value, about, facts) for name, value in others)):
            unread.named.extend([column] if others else [])
        else:
            unread.refused.append(Field(column, column, content))
    return unread


def _is_free(name: str, value: object, rates: set[str], facts: FileFacts) -> bool:
    """Return whether a field is without influence, or it is the rating of an answer, which the margin is made of."""
    return is_free(name, value, facts) or (name in rates and number_or_none(value) is not None)


def _is_told(name: str, value: object, about: set[str], facts: FileFacts) -> bool:
    """Return whether a field is named and no more: it is about an answer, or the same throughout the file."""
    return is_word(value) and (name in about or facts.is_constant(name, value))


def _is_repeated(value: object, used: list[object]) -> bool:
    """Return whether a column says once more what others say: one of their texts, all of them, or their messages."""
    if not isinstance(value, str):
        return value in used
    texts = {normalise(text) for text in _texts(used)}
    value = normalise(value)
    return value in texts or (len(texts) > 1 and all(text in value for text in texts))


def _texts(values: object) -> Iterator[str]:
    """Yield the texts of columns, and of the messages in them."""
    if isinstance(values, str) and values.strip():
        yield values
    elif isinstance(values, list):
        for value in values:
            yield from _texts(value)
    elif isinstance(values, dict):
        yield from _texts([values.get("content", values.get("value"))])


def other_texts(row: dict[str, object], *expected: str) -> bool:
    """Return whether a column beside `expected` holds a text, or messages, that may be what is answered or an answer.

    One word may be a label; with a mark behind it, as a sentence has it, it is a text.
    """
    texts = (name for name, value in row.items() if name not in expected and any(map(is_text, values(value))))
    return any(not is_free(name, row[name]) for name in texts)
