"""Rows of one prompt and several answers, each with a rating or a rank, as UltraFeedback and Nectar have them.

The answers are a list of objects, each with a text and a number (`completions`, `answers`), or a list of texts beside a
list of as many numbers (`responses` and `scores` or `ranks`). A prompt gives one pair, of the answers that are rated
best and worst; or all pairs of answers with different ratings. The difference of the ratings is the pair's margin.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhf.data.columns import ANSWER_COLUMNS, CONTEXT, INPUT_COLUMNS
from rlhf.data.fields import has_value, is_free, is_messages, is_text, leaves, switches_training, values, words
from rlhf.data.margins import UnclearRating, ask_for_sign, named_rating, number_or_none, sign_of
from rlhf.data.messages import trained_flags
from rlhf.data.raw import Malformed
from rlhf.data.verdicts import PROMPTS, RESPONSE_WORDS, answer_words, at_most_one, names_verdict
from rlhf.recipe.choices import RatedPairs
from rlhf.terminal import counted

_OTHER_ANSWERS = (*ANSWER_COLUMNS, "output", "messages", "conversations")
_READ = {*INPUT_COLUMNS, *CONTEXT, "system", "input"}
_MEAN = "fine-grained_score"  # of UltraFeedback: of the ratings of its aspects; comes before its overall score
_ASPECTS = {
    f"annotations.{aspect}.Rating" for aspect in ("helpfulness", "honesty", "instruction_following", "truthfulness")
}


class _Found(NamedTuple):
    """The columns of a row that were read, its answers with their ratings, and the name of the rating."""

    columns: list[str]
    answers: Sequence[tuple[object, float | None]]
    rating: str


class Rated(NamedTuple):
    """The prompt of a row, its answers with ratings (more is better), and the columns beside them that are kept."""

    prompt: object
    answers: list[tuple[object, float]]
    rating: str
    beside: dict[str, object]


@dataclass(slots=True)
class Count:
    """The prompts with rated answers in a file, the pairs and ties, what rates the answers, and columns without use."""

    prompts: int = 0
    pairs: int = 0
    ties: int = 0
    ratings: dict[str, None] = field(default_factory=dict)
    unused: dict[str, None] = field(default_factory=dict)

    def in_words(self, how: RatedPairs) -> str:
        """Return a line: `4 prompts with rated answers: 3 pairs of the best and the worst by score, 1 tie left out`."""
        kind = "the best and the worst" if how == "best_worst" else "all that are rated differently"
        prompts = f"{counted(self.prompts, 'prompt')} with rated answers"
        rating = " or ".join(self.ratings)
        return f"{prompts}: {counted(self.pairs, 'pair')} of {kind} by {rating}, {counted(self.ties, 'tie')} left out"


def rated_answers(row: Mapping[str, object], rating: str | None) -> Rated | None:
    """Return the rated answers of a row; None for a row without. `rating` names the rating where there are several.

    Raises Malformed where it is not clear which numbers are the ratings, and for fewer than two rated answers.
    """
    prompts = [name for name in PROMPTS if has_value(row.get(name))]
    answered = (row.get(name) for name in _OTHER_ANSWERS)
    if not prompts or any(has_value(answer) and not isinstance(answer, int | float) for answer in answered):
        return None
    found = _of_objects(row, rating) or _of_lists(row, rating)
    if found is None:
        _refuse_verdict(row)
        return None
    (column, *numbers), answers, by = found
    prompt = at_most_one(prompts, "texts", "write them into one 'prompt'")
    known = [(answer, value) for answer, value in answers if value is not None and has_value(answer)]
    if len(known) < 2:
        raise Malformed(f"'{column}' has fewer than two answers with a rating; take the row out")
    beside = {name: value for name, value in row.items() if name not in (column, *numbers, prompt)}
    asked = row[str(prompt)]
    if prompt == "instruction" and has_value(extra := beside.pop("input", None)):
        asked = f"{asked}\n{extra}"
    return Rated(asked, known, by, beside)


def _refuse_verdict(row: Mapping[str, object]) -> None:
    """Raise Malformed for a list of answers without ratings and a verdict, whose number may count from 0 or from 1."""
    answers = next((name for name, value in row.items() if _is_answers(name, value)), None)
    verdict = next((name for name, value in row.items() if has_value(value) and names_verdict(name)), None)
    if answers is not None and verdict is not None:
        raise Malformed(
            f"'{answers}' is a list, and '{verdict}' may count its answers from 0 or from 1: write 'ranks', the place "
            "of each answer, 1 for the best"
        )


def pairs(rated: Rated, how: RatedPairs, count: Count) -> Iterator[dict[str, object]]:
    """Yield the pairs of a prompt's answers as preference rows, and count them.

    Of answers that are rated alike the first one is taken. Labels, numbers and lists beside them are not used.
    """
    kept = {name: value for name, value in rated.beside.items() if _may_be_read(name, value)}
    count.unused |= dict.fromkeys(name for name, value in rated.beside.items() if name not in kept and has_value(value))
    count.prompts += 1
    count.ratings |= {rated.rating: None}
    by_rating = sorted(rated.answers, key=lambda answer: -answer[1])  # stable: the first of equal ones stays first
    worst = min(rated.answers, key=lambda answer: answer[1])
    for better, worse in itertools.combinations(by_rating, 2) if how == "all" else [(by_rating[0], worst)]:
        if better[1] == worse[1]:
            count.ties += 1
            continue
        count.pairs += 1
        yield kept | {"prompt": rated.prompt, "chosen": better[0], "rejected": worse[0], "margin": better[1] - worse[1]}


def _may_be_read(name: str, value: object) -> bool:
    """Return whether a column beside rated answers is read, or holds texts or messages that these may depend on."""
    if name in _READ or switches_training(name):
        return True
    if isinstance(value, list):
        return is_messages(value) and any("role" in item or "from" in item for item in value)
    return any(map(is_text, values(value)))


def _of_objects(row: Mapping[str, object], rating: str | None) -> _Found | None:
    """Return the column of a list of objects with one text and a rating each, and these; None without such a list."""
    lists = {name: value for name, value in row.items() if is_messages(value) and _has_texts(value)}
    column = _one_list([name for name in lists if name not in PROMPTS])
    if column is None:
        return None
    for number, item in enumerate(lists[column], 1):
        _refuse_untrained(item, f"{column}[{number}]")
    names = [name for item in lists[column] for name in _texts(item)]
    marks = answer_words(column).union(*map(answer_words, names))
    by, ratings = _ratings([_leaves(item) for item in lists[column]], rating, marks)
    texts = [item[name] for item, name in zip(lists[column], names, strict=True)]
    return _Found([column], list(zip(texts, ratings, strict=True)), by)


def _leaves(item: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of an object with a value, those of objects in it with dotted names."""
    return dict(itertools.chain(*(leaves(name, value) for name, value in item.items())))


def _texts(item: Mapping[str, object]) -> list[str]:
    """Return the fields of an object that are named as an answer's text, and are no number."""
    named = (name for name in item if not RESPONSE_WORDS.isdisjoint(words(name)))
    return [name for name in named if has_value(item[name]) and not isinstance(item[name], int | float)]


def _has_texts(items: Sequence[Mapping[str, object]]) -> bool:
    """Return whether a list holds two objects or more with one text each, which are no turns of a conversation."""
    return len(items) > 1 and all(len(_texts(item)) == 1 and not {"role", "from"} & item.keys() for item in items)


def _of_lists(row: Mapping[str, object], rating: str | None) -> _Found | None:
    """Return the columns of a list of texts and of lists of numbers, and the texts rated by these; None without.

    A list that is named `ranked_answers` needs no numbers: the best answer stands first.
    """
    lists = {name: value for name, value in row.items() if isinstance(value, list) and len(value) > 1}
    numbers = {name: value for name, value in lists.items() if all(number_or_none(n) is not None for n in value)}
    texts = {name: value for name, value in lists.items() if name not in PROMPTS and _is_answers(name, value)}
    beside = {
        column: {name: value for name, value in numbers.items() if name != column and len(value) == len(answers)}
        for column, answers in texts.items()
        if all(isinstance(answer, str) for answer in answers)
    }
    column = _one_list([name for name, rating_lists in beside.items() if rating_lists or _are_ranked(name)])
    if column is None:
        return None
    if not beside[column]:
        by_place = [(text, -float(place)) for place, text in enumerate(texts[column])]
        return _Found([column], by_place, f"{column} (the best first)")
    unclear = next((name for name, places in beside[column].items() if _may_be_order(name, places)), None)
    if rating is None and unclear is not None:
        raise Malformed(
            f"'{unclear}' may hold the place of each answer, or the answers by place: write it as 'ranks', the place "
            f"of each answer, 1 for the best, or say that it is that: --set data.rating={unclear} "
            f"(`rlhf data`, `rlhf new`: --rating {unclear})"
        )
    rows = zip(*beside[column].values(), strict=True)
    items = [dict(zip(beside[column], row_numbers, strict=True)) for row_numbers in rows]
    by, ratings = _ratings(items, rating, answer_words(column))
    return _Found([column, *beside[column]], list(zip(texts[column], ratings, strict=True)), by)


def _one_list(found: Sequence[str]) -> str | None:
    """Return which list has the answers: the only one, or the only one whose whole name says so; None without one.

    Raises Malformed for several.
    """
    named = [name for name in found if answer_words(name).issuperset(words(name))]
    return at_most_one(named or found, "lists of answers", "leave out the others: data.ignore (--ignore)")


def _are_ranked(name: str) -> bool:
    """Return whether a list is named as one of answers from the best to the worst, and as nothing else."""
    return {*words(name)} - answer_words(name) == {"ranked"}


def _refuse_untrained(answer: Mapping[str, object], place: str) -> None:
    """Raise Malformed for one of several answers that is not to be trained on: no pair can be made with half of it."""
    if off := [name for name, trained in trained_flags(answer, f"{place}.").items() if not trained]:
        raise Malformed(f"'{place}.{off[0]}' is {answer[off[0]]!r}; take the answer out, or --ignore {off[0]}")


def _may_be_order(name: str, places: Sequence[object]) -> bool:
    """Return whether a `ranking` may name the answers from the best to the worst, and says another thing as places."""
    numbers = [number_or_none(place) for place in places]
    start = min(number for number in numbers if number is not None)
    in_order = [start + n for n in range(len(numbers))]
    if {"ranking", "rankings"}.isdisjoint(words(name)) or sorted(map(str, numbers)) != sorted(map(str, in_order)):
        return False
    return numbers != [numbers.index(place) + start for place in in_order]


def _is_answers(name: str, value: object) -> bool:
    """Return whether a column is named as a list of answers and has at least two texts, or objects."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(isinstance(answer, str | dict) for answer in value)
        and bool(answer_words(name))
    )


def _ratings(
    items: Sequence[Mapping[str, object]], rating: str | None, marks: set[str]
) -> tuple[str, list[float | None]]:
    """Return what rates the answers, in words, and the rating of each by its fields; more is better.

    `marks` are words for an answer that the name of its rating may have too. Fields in objects have dotted names.
    Without a rating of its own the mean of UltraFeedback's aspects rates an answer. Raises Malformed where several may
    be the rating, and where none says by its name which answers are better.
    """
    names = dict.fromkeys(name for item in items for name in item)
    numbers = [name for name in names if all(n.get(name) is None or number_or_none(n[name]) is not None for n in items)]
    own = [(name, sign) for name in numbers if (sign := sign_of(name, marks)) is not None]
    own = [(name, sign) for name, sign in own if name == _MEAN] or own
    if rating is not None:
        some = [name for name in names if any(number_or_none(item.get(name)) is not None for item in items)]
        own = [named_rating(rating, some, marks, names)]
    if len(own) > 1:
        several = ", ".join(name for name, _ in own)
        raise Malformed(f"{several} may each be the rating of an answer; name one: --set data.rating={own[0][0]}")
    if own:
        name, sign = own[0]
        found = [_finite(item.get(name), name) for item in items]
        by = f"{name} ({'more' if sign > 0 else 'less'} is better)"
        return by, [None if number is None else sign * number for number in found]
    if aspects := [name for name in names if name in _ASPECTS]:
        return "the mean of its aspects", [_mean([_finite(item.get(name), name) for name in aspects]) for item in items]
    unclear = [name for name in numbers if not all(is_free(name, item.get(name)) for item in items)]
    way_out = "".join(f"; {ask_for_sign(name)}" for name in unclear[:1])
    raise UnclearRating(f"no number beside each answer rates it: write a 'rank' beside each, 1 for the best{way_out}")


def _finite(value: object, name: str) -> float | None:
    """Return a rating; None for what is no number, and for NaN. Raises Malformed for an infinite one."""
    number = number_or_none(value)
    if number is not None and math.isinf(number):
        raise Malformed(f"'{name}' is {number}; a rating must be a finite number")
    return None if number is None or math.isnan(number) else number


def _mean(numbers: Sequence[float | None]) -> float | None:
    """Return the mean of those that are known; None without any."""
    known = [number for number in numbers if number is not None]
    return statistics.fmean(known) if known else None
