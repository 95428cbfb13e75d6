"""Margins of preference pairs: by how much the chosen answer was rated above the rejected one."""

import math
from collections.abc import Callable, Iterator, Mapping

from rlhf.data.fields import has_value, leaves, twins, words
from rlhf.data.raw import Malformed

SIDES = ("chosen", "rejected")
_PLACES = {"rank", "ranks", "ranking", "rankings", "order", "place", "places", "position"}  # 1 is the best
_MEASURES = {  # words of names that count or identify an answer, or say how bad it is: no rating, where more is better
    *("severity", "level", "toxicity", "toxic", "harm", "harmfulness", "error", "errors", "penalty", "refusal"),
    *("id", "ids", "uid", "idx", "index", "hash", "seed", "time", "date", "year", "temperature"),
    *("n", "num", "number", "count", "counts", "len", "length", "lengths", "size", "turns", "turn", "rounds"),
    *("token", "tokens", "word", "words", "char", "chars", "characters", "bytes", "lines", "sentences", "label"),
    *("loss", "nll", "ppl", "perplexity", "logp", "logps", "logprob", "logprobs", "prob", "probs", "probability"),
}
_RATINGS = {  # words of names of numbers, of which more is better
    *("rating", "ratings", "rated", "score", "scores", "scored", "reward", "rewards", "grade", "grades"),
    *("quality", "overall", "preference", "preferred", "better", "winner", "won", "win", "wins", "helpfulness"),
    *("elo", "stars", "points", "votes", "upvotes", "likes"),
}


def judges(name: str) -> bool:
    """Return whether a number of this name may judge an answer: it is none that counts or identifies it."""
    return _MEASURES.isdisjoint(words(name))


def decides(name: str) -> bool:
    """Return whether a number of this name says by itself which answer is better, as a score or a place does."""
    return judges(name) and (is_place(name) or not _RATINGS.isdisjoint(words(name)))


def is_place(name: str) -> bool:
    """Return whether a number of this name is a place, of which 1 is the best."""
    return not _PLACES.isdisjoint(words(name))


def margin_of(
    row: Mapping[str, object], sides: tuple[str, str] = SIDES, counts: Callable[[str], bool] = judges
) -> float | None:
    """Return the difference of the ratings, or else the margin that a row states; None where it has neither.

    Ratings are two numbers that count by their name, as `counts` says, and whose names differ as the names of the
    answers do, which are those of the better and of the worse one: `rm_score_chosen` and `rm_score_rejected`. One
    without its counterpart says nothing. Raises Malformed for a number that is not finite, and for a rating that is no
    number beside one that is.
    """
    fields = dict(_fields(row))
    for better, worse in twin_fields(row, *sides):
        numbers = number_or_none(fields[better]), number_or_none(fields[worse])
        if not counts(better) or numbers == (None, None):
            continue
        margin = _difference(fields, better, worse)
        if margin is not None:
            return -margin if is_place(better) else margin
    return _number(row, "margin")


def twin_fields(row: Mapping[str, object], one: str, other: str) -> list[tuple[str, str]]:
    """Return the names of the fields of a row that say something of each answer: `scores.chosen`, `scores.rejected`.

    The answers themselves are none.
    """
    return [pair for pair in twins(dict(_fields(row)), one, other) if words(pair[0]) != (one,)]


def _fields(row: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the fields of a row and of the objects in it, with dotted names; those without a value too."""
    for name, value in row.items():
        yield from leaves(name, value) if isinstance(value, dict) else [(name, value)]


def number_or_none(value: object) -> float | None:
    """Return a number, or a text as a table has numbers; None for anything else. It need not be finite."""
    try:
        return None if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        return math.inf if isinstance(value, int) else None


def _difference(row: Mapping[str, object], better: str, worse: str) -> float | None:
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
