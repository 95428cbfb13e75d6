"""Margins of preference pairs: by how much the chosen answer was scored above the rejected one."""

import math
from collections.abc import Mapping

from rlhf.data.messages import has_value
from rlhf.data.raw import Malformed

SCORES = (  # columns that score the chosen and the rejected answer
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_rating", "rejected_rating"),
    ("reward_chosen", "reward_rejected"),
    ("chosen_reward", "rejected_reward"),
)


def margin_of(row: Mapping[str, object]) -> float | None:
    """Return the difference of the scores, or else the margin that a row states; None where it has neither.

    A score without its counterpart says nothing. Raises Malformed for one that is not a finite number.
    """
    row = {name.replace("-", "_"): value for name, value in row.items()}
    for columns in SCORES:
        margin = difference(row, *columns)
        if margin is not None:
            return margin
    return _number(row, "margin")


def difference(row: Mapping[str, object], better: str, worse: str) -> float | None:
    """Return the difference of two columns' numbers; None without one of them. Raises Malformed if it is not finite."""
    high, low = _number(row, better), _number(row, worse)
    return None if high is None or low is None else _finite(high - low, f"{better} - {worse}")


def _number(row: Mapping[str, object], column: str) -> float | None:
    """Return a number of a row; None without one: null, NaN, an empty cell. Raises Malformed."""
    value = row.get(column)
    if not has_value(value):
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        return _finite(float(value), column)
    except (ValueError, OverflowError):
        raise Malformed(
            f"'{column}' is {value!r:.40}; it must be a finite number, or null where there is none"
        ) from None


def _finite(number: float, name: str) -> float:
    """Return a number that is finite. Raises Malformed for any other."""
    if not math.isfinite(number):
        raise Malformed(f"'{name}' is {number}; it must be a finite number, or null where there is none")
    return number
