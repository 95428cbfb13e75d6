"""Rows of two responses and a verdict on which is better, as HelpSteer3, Chatbot Arena and PKU-SafeRLHF have them."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf.data.margins import difference
from rlhf.data.messages import has_value
from rlhf.data.raw import Malformed

RESPONSES = (  # columns of the first and of the second response
    ("response1", "response2"),
    ("response_1", "response_2"),
    ("response_0", "response_1"),
    ("response_a", "response_b"),
    ("conversation_a", "conversation_b"),
)
PROMPTS = ("prompt", "context", "question")
SIGNED = "overall_preference"  # below 0: the first is better, above 0: the second, 0: a tie
NAMED = ("winner", "preference", "better_response_id")  # names the better one
NUMBERED = ("winner", "better_response_id")  # may hold the better one's number
VERDICT_COLUMNS = (SIGNED, *NAMED)

_JUDGEMENT = re.compile(  # columns of published sets that say how a verdict came about
    r"(individual|all)_preferences?(_.*)?|preference_.*|judge|turn|anony|tstamp|openai_moderation"
    r"|is_response_\d_safe|response_\d_(severity_level|sha256)"
)
_SCORES = ("score_{}", "rating_{}", "response_{}_score", "response_{}_rating")  # with a response's letter or number
_TIES = {"tie", "tie (bothbad)", "both_bad", "bothbad"}


class Columns(NamedTuple):
    """The columns of two responses and of the verdict on them; None where no column has one."""

    first: str
    second: str
    verdict: str | None


def compared(row: Mapping[str, object]) -> Columns | None:
    """Return the columns of two responses; None for a row without them, and for one that has chosen or rejected.

    Columns with values come before those without.
    """
    if "chosen" in row or "rejected" in row:
        return None
    pairs = _pairs(row) or [pair for pair in RESPONSES if pair[0] in row and pair[1] in row]
    return Columns(*pairs[0], next(iter(_with_values(row, VERDICT_COLUMNS)), None)) if pairs else None


def preference(row: Mapping[str, object], columns: Columns) -> dict[str, object] | None:
    """Return the preference row of two responses and a verdict; None for a tie. Raises Malformed.

    It keeps every other column of the row, so that the reader uses it, or refuses to lose it.
    """
    pairs = _pairs(row)
    if len(pairs) > 1:
        raise Malformed(f"responses under {' and '.join(', '.join(pair) for pair in pairs)}; take one pair out")
    _at_most_one(row, VERDICT_COLUMNS, "verdicts", "take the others out")
    conversations = columns.first == "conversation_a"
    prompt = None if conversations else _at_most_one(row, PROMPTS, "texts", "write them into one 'prompt'")
    if prompt is None and not conversations:
        raise Malformed(f"no prompt under {', '.join(PROMPTS)}; name its column: --rename OLD=prompt")
    first_is_better = _first_is_better(row, columns)
    if first_is_better is None:
        return None
    better, worse = columns[:2] if first_is_better else columns[1::-1]
    used = {*columns, *VERDICT_COLUMNS, prompt}
    beside = {key: value for key, value in row.items() if key not in used and not _JUDGEMENT.fullmatch(key.lower())}
    pair = {"chosen": row[better], "rejected": row[worse]} | ({} if prompt is None else {"prompt": row[prompt]})
    return beside | _margin(row, better, worse) | pair


def _with_values(row: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Return those columns of `names` that have a value in a row."""
    return [name for name in names if has_value(row.get(name))]


def _pairs(row: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the pairs of columns that have two responses in a row."""
    return [pair for pair in RESPONSES if len(_with_values(row, pair)) == 2]


def _at_most_one(row: Mapping[str, object], names: Sequence[str], what: str, way_out: str) -> str | None:
    """Return the column of `names` that has a value; None without one. Raises Malformed for several."""
    found = _with_values(row, names)
    if len(found) > 1:
        raise Malformed(f"{what} under {' and '.join(map(repr, found))}; {way_out}")
    return found[0] if found else None


def _margin(row: Mapping[str, object], better: str, worse: str) -> dict[str, float]:
    """Return by how much the better response was scored above the worse one, as a column; empty without scores."""
    for name in _SCORES:
        margin = difference(row, *(name.format(column[-1]) for column in (better, worse)))
        if margin is not None:
            return {"margin": margin}
    return {}


def _first_is_better(row: Mapping[str, object], columns: Columns) -> bool | None:
    """Return whether the first response is better; None for a tie. Raises Malformed where that is not clear.

    A number alone is clear where the responses are numbered alike. Elsewhere 1 may be the first or the second.
    """
    if columns.verdict is None:
        raise Malformed(f"no verdict under {', '.join(VERDICT_COLUMNS)} says which response is better")
    value = row[columns.verdict]
    word = "" if isinstance(value, bool) else str(value).strip().lower()
    if columns.verdict == SIGNED:
        try:
            sign = float(word)
        except ValueError:
            sign = math.nan
        if not math.isnan(sign):
            return None if sign == 0 else sign < 0
    elif word in _TIES:
        return None
    else:
        first, second = _names(columns)
        if word in first | second:
            return word in first
    known = (
        "below 0 for the first response, above 0 for the second, and 0 for a tie"
        if columns.verdict == SIGNED
        else f"{columns.first}, {columns.second} or tie"
    )
    raise Malformed(f"'{columns.verdict}' is {value!r:.40}, which does not say for sure what is better; write {known}")


def _names(columns: Columns) -> tuple[set[str], set[str]]:
    """Return the words that name the first response under the column of the verdict, and those for the second."""
    is_numbered = columns.first[-1].isdigit()
    numbers = (columns.first[-1], columns.second[-1]) if is_numbered else ("1", "2")
    words = ["{0}", "model_{0}", "response_{0}", "conversation_{0}", "response{1}", "response_{1}"]
    words += ["{1}"] if is_numbered and columns.verdict in NUMBERED else []
    first, second = ({word.format(*names) for word in words} for names in zip("ab", numbers, strict=True))
    return first, second
