"""Columns of rows: those that each kind of row is read from, and which others may stand beside them."""

from collections.abc import Iterator

from rlhf.data.labels import label_of
from rlhf.data.messages import TRAINED_FLAGS, has_value, is_inert
from rlhf.data.normal import normalise
from rlhf.data.raw import Malformed
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
CONTEXT = ("history", "context", "passage")  # keys of what a prompt continues or is about
INPUTS = ("tools", "functions", "documents", "images", "image", "audio", "audios", "video", "videos")  # beside texts
USED_COLUMNS: dict[RowKind, tuple[str, ...]] = {  # beside `KEYS`, `system` and `TRAINED_FLAGS`
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
    lost = next((key for key in INPUTS if row.get(key) is not False and has_value(row.get(key))), None)
    if lost is not None:
        raise Malformed(f"'{lost}' would be lost, and the answer may depend on it; take the row out")
    context = next((key for key in CONTEXT if kind not in ("text", "prompt") and has_value(row.get(key))), None)
    if context is not None:
        raise Malformed(f"'{context}' would be lost; put it into the prompt, or take the column out")


def unknown_column(row: dict[str, object], kind: RowKind) -> str | None:
    """Return the first column with a value that no stage reads and that an answer may depend on; None without one.

    A document answers nothing. A column that repeats what others say is known, as sets of the hub have it.
    """
    if kind == "text":
        return None
    known = {*KIND_KEYS[kind], *USED_COLUMNS[kind], *TRAINED_FLAGS, "system"}
    if kind in ("preference", "hh") and label_of(row):  # true: as the columns say
        known.add("label")
    others = (name for name, value in row.items() if name not in known and has_value(value))
    unknown = [name for name in others if not is_inert(name, row[name])]
    used = [row[name] for name in row if name in known]
    return next((name for name in unknown if not _is_repeated(row[name], used)), None)


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
    """Return whether a column beside `expected` holds a text or a list and is not named like metadata."""
    return any(
        isinstance(value, str | list | dict) and value and key not in expected and not is_inert(key, value)
        for key, value in row.items()
    )
