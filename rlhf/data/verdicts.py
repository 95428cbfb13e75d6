"""Rows of two responses and a verdict on which one is better, as HelpSteer3 and Chatbot Arena publish them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from rlhf.data.raw import Malformed

RESPONSES = (  # columns of the first and of the second response
    ("response1", "response2"),
    ("response_1", "response_2"),
    ("response_a", "response_b"),
    ("conversation_a", "conversation_b"),
)
PROMPTS = ("prompt", "context", "question")
BESIDE = ("system", "history", "context", "passage")  # columns that the reader uses, or refuses to lose
SIGNED = "overall_preference"  # below 0: the first is better, above 0: the second, 0: a tie
NAMED = ("winner", "preference")  # names the better one
VERDICTS = (SIGNED, *NAMED)

_FIRST = {"a", "model_a", "response_a", "response1", "response_1", "conversation_a"}
_SECOND = {"b", "model_b", "response_b", "response2", "response_2", "conversation_b"}
_TIES = {"tie", "tie (bothbad)", "both_bad", "bothbad"}


class Columns(NamedTuple):
    """The columns of two responses and of the verdict on them; None where no column has one."""

    first: str
    second: str
    verdict: str | None


def compared(row: Mapping[str, object]) -> Columns | None:
    """Return the columns of two responses; None for a row without them, and for one that has chosen or rejected."""
    if "chosen" in row or "rejected" in row:
        return None
    pair = next((pair for pair in RESPONSES if pair[0] in row and pair[1] in row), None)
    return pair and Columns(*pair, next((column for column in VERDICTS if row.get(column) is not None), None))


def preference(row: Mapping[str, object], columns: Columns) -> dict[str, object] | None:
    """Return the preference row of two responses and a verdict; None for a tie. Raises Malformed."""
    prompt = next((column for column in PROMPTS if row.get(column) is not None), None)
    conversations = columns.first == "conversation_a"
    if prompt is None and not conversations:
        raise Malformed(f"no prompt under {', '.join(PROMPTS)}; name its column: --rename OLD=prompt")
    first_is_better = _first_is_better(row, columns)
    if first_is_better is None:
        return None
    better, worse = columns[:2] if first_is_better else columns[1::-1]
    result = {column: row[column] for column in BESIDE if column in row and column != prompt}
    if not conversations and prompt is not None:
        result["prompt"] = row[prompt]
    return {**result, "chosen": row[better], "rejected": row[worse]}


def _first_is_better(row: Mapping[str, object], columns: Columns) -> bool | None:
    """Return whether the first response is better; None for a tie. Raises Malformed where that is not clear.

    A number under `winner` is clear where the responses are numbered alike. Elsewhere 1 may be the first or the second.
    """
    if columns.verdict is None:
        raise Malformed(f"no verdict under {', '.join(VERDICTS)} says which response is better")
    value = row[columns.verdict]
    word = "" if isinstance(value, bool) else str(value).strip().lower()
    if columns.verdict == SIGNED:
        try:
            sign = float(word)
        except ValueError:
            sign = math.nan
        if not math.isnan(sign):
            return None if sign == 0 else sign < 0
    elif columns.verdict == "winner" and columns.first in ("response1", "response_1") and word in ("1", "2"):
        return word == "1"
    elif word in _TIES:
        return None
    elif word in _FIRST | _SECOND:
        return word in _FIRST
    known = (
        "below 0 for the first response, above 0 for the second, and 0 for a tie"
        if columns.verdict == SIGNED
        else f"{columns.first}, {columns.second} or tie"
    )
    raise Malformed(f"'{columns.verdict}' is {value!r:.40}, which does not say for sure what is better; write {known}")
