"""Margins of preference pairs: by how much the chosen answer was rated above the rejected one."""

import math
from collections.abc import Collection, Container, Iterator, Mapping

from rlhf.data.fields import has_value, leaves, twins, words
from rlhf.data.raw import Malformed

SIDES = ("chosen", "rejected")
_RATINGS = {  # whole names, without the mark of an answer: more is better
    *("score", "scores", "rating", "ratings", "reward", "rewards", "avg rating"),
    *("overall score", "fine grained score"),  # of UltraFeedback
    "winner model",  # of the sets of Chatbot Arena: 1 for the better one
}
_PLACES = {"rank", "ranks", "ranking", "rankings"}  # 1 is the best


class UnclearRating(Malformed):
    """A number that may rate answers, and does not say which are better. The message says what to do."""


class NoSuchRating(Malformed):
    """A row without the number that `data.rating` names."""


def sign_of(name: str, marks: Container[str] = ()) -> int | None:
    """Return 1 where more of a number is better, −1 where it is a place; None where its name leaves that open.

    The whole name has to say so, but for the `marks` of an answer: one more word may turn it round (`bias_score`).
    """
    own = " ".join(word for word in words(name) if word not in marks)
    return 1 if own in _RATINGS else -1 if own in _PLACES else None


def named_rating(
    rating: str, numbers: Collection[str], marks: Container[str] = (), names: Container[str] = ()
) -> tuple[str, int]:
    """Return the number that `data.rating` names, and its sign as `sign_of` does; `+` or `-` before it says the sign.

    `names` are those of all fields, texts too. Raises NoSuchRating if it is none of `numbers`, and UnclearRating where
    its sign is not known.
    """
    signed = rating not in numbers and rating[:1] in ("+", "-")
    name = rating[1:] if signed else rating
    if name not in numbers:
        wrong = "has no numbers" if name in names else "is none"
        there = f"; the numbers there are {', '.join(numbers)}" if numbers else ""
        raise NoSuchRating(f"no number beside each answer rates it: {rating} (data.rating) {wrong}{there}")
    sign = sign_of(name, marks) if not signed else 1 if rating[0] == "+" else -1
    if sign is None:
        raise UnclearRating(ask_for_sign(name))
    return name, sign


def ask_for_sign(name: str) -> str:
    """Return how to say whether more of a number is better."""
    return (
        f"'{name}' does not say whether more of it is better: --set data.rating=+{name} if it is, "
        f"data.rating=-{name} if less is (`rlhf data`, `rlhf new`: --rating +{name} or --rating -{name})"
    )


def margin_of(row: Mapping[str, object], rating: str | None = None) -> float | None:
    """Return by how much the chosen answer is rated above the rejected one, or else the margin that a row states.

    None where it has neither. `rating` names the number that rates. Raises Malformed as `margin` does.
    """
    above = margin(row, pair_ratings(row, rating))
    return _number(row, "margin") if above is None else above


def margin(row: Mapping[str, object], ratings: Collection[tuple[int, str, str]]) -> float | None:
    """Return by how much the first of two answers is rated above the other by its `ratings`; None without any.

    A rating of one answer alone says nothing. Of several the smallest difference counts. Raises Malformed for a number
    that is not finite, for a rating that is no number beside one that is, and for ratings that disagree.
    """
    fields = dict(_fields(row))
    found = {first: (sign, _difference(fields, first, second)) for sign, first, second in ratings}
    known = {first: sign * difference for first, (sign, difference) in found.items() if difference is not None}
    if len({(above > 0) - (above < 0) for above in known.values()}) > 1:  # the order of columns must not decide
        name = next(iter(known))
        raise UnclearRating(
            f"{', '.join(known)} do not agree on which answer is better; name one: --set data.rating={name} "
            f"(`rlhf data`, `rlhf new`: --rating {name})"
        )
    return min(known.values(), key=abs, default=None)


def pair_ratings(row: Mapping[str, object], rating: str | None) -> list[tuple[int, str, str]]:
    """Return what rates the answers of a pair as `ratings_of` does; none without the number that `rating` names."""
    try:
        return ratings_of(row, *SIDES, rating=rating)
    except NoSuchRating:
        return []


def ratings_of(
    row: Mapping[str, object], one: str, other: str, beside: Collection[str] = (), rating: str | None = None
) -> list[tuple[int, str, str]]:
    """Return the names of two numbers each that rate two answers, behind the sign of `sign_of`.

    Their names differ as the marks `one` and `other` of the answers do and say how they rate (`score_chosen`,
    `score_rejected`), or `rating` names one of them; words of `beside` may stand there too. Raises as `named_rating`.
    """
    marks, pairs = {one, other, *beside}, number_pairs(row, one, other)
    if rating is None:
        return [(sign, *pair) for pair in pairs if (sign := sign_of(pair[0], marks)) is not None]
    of_name = {name: pair for pair in pairs for name in pair}
    name, sign = named_rating(rating, of_name, marks)
    return [(sign, *of_name[name])]


def number_pairs(row: Mapping[str, object], one: str, other: str) -> list[tuple[str, str]]:
    """Return the names of fields as `twin_fields` does, of which one at least is a number."""
    fields = dict(_fields(row))
    return [pair for pair in twin_fields(row, one, other) if any(number_or_none(fields[n]) is not None for n in pair)]


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
