"""Rows of two responses and a verdict on which is better, as HelpSteer3, Chatbot Arena and PKU-SafeRLHF have them.

Two columns hold the responses if their names differ in a mark alone: a and b, 1 and 2, first and second. A column holds
the verdict if its name says so: `winner`, `preferred`, `better_response_id`. Where none stands, ratings decide: numbers
whose names have the marks too, and say nothing else but that they rate.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlhf.data.fields import boolean, has_value, is_free, is_messages, is_text, is_word, twins, values, words
from rlhf.data.margins import UnclearRating, ask_for_sign, margin, number_or_none, number_pairs, ratings_of, twin_fields
from rlhf.data.raw import Malformed

# Marks of the first and of the second response, and those that others beside them would have.
MARKS = (
    ("a", "b", ("c",)),
    ("1", "2", ("0", "3")),
    ("0", "1", ("2",)),
    ("one", "two", ("three",)),
    ("first", "second", ("third",)),
    ("left", "right", ()),
)
PROMPTS = ("prompt", "context", "question", "instruction")
_SIGNED = ("overall_preference", "preference_strength")  # of HelpSteer3 and 2: below 0 the first is better
RESPONSE_WORDS = {
    *("response", "answer", "output", "completion", "conversation", "reply", "generation", "candidate"),
    *("summary", "text", "content"),
}
_VERDICTS = {
    *("winner", "winning", "won", "preferred", "preference", "better", "best", "chosen", "choice", "selected"),
    *("verdict", "label", "judgment", "judgement"),
}
_BESIDE_VERDICTS = RESPONSE_WORDS | {
    *("id", "idx", "index", "number", "model", "name", "side", "the", "which", "overall", "human"),
    "final",
}
_LABELS = {"label", "judgment", "judgement"}  # may name the worse one of two responses as well
_TIES = {"tie", "tied", "draw", "both", "neither", "tie (bothbad)", "both_bad", "bothbad"}
_JUDGEMENT = {  # columns of HelpSteer and of Chatbot Arena that say how a verdict came about
    *("preference_statement", "preference_elaboration", "three_most_similar_preferences"),
    *("all_preferences_unprocessed", "individual_preference", "judge", "turn", "anony", "tstamp"),
    *("openai_moderation", "toxic_chat_tag"),
}
_ANSWERS = ("completion", "response", "output")  # columns of rows of one answer


class Columns(NamedTuple):
    """The columns of two responses, their marks, and the column of the verdict; None where no column has one."""

    first: str
    second: str
    marks: tuple[str, str]
    verdict: str | None


class OtherNumbers(Malformed):
    """A verdict by a number that no response has: the file counts in another way, and none of its numbers is clear."""


def answer_words(name: str) -> set[str]:
    """Return the words for an answer in the name of one, which its ratings may repeat: `response_a_rating`."""
    own = RESPONSE_WORDS & {word.removesuffix("s") for word in words(name)}
    return own | {f"{word}s" for word in own}


def names_verdict(name: str) -> bool:
    """Return whether a column is named as one that says which of two responses is better."""
    own = _verdict_words(name)
    return bool(own) and own <= _VERDICTS and ("chosen" not in own or words(name) == ("chosen",))


def _verdict_words(name: str) -> set[str]:
    """Return the words of a name in the singular, without those that say nothing of what it decides."""
    return {word if word in _VERDICTS else word.removesuffix("s") for word in words(name)} - _BESIDE_VERDICTS


def agrees(name: str, value: object) -> bool:
    """Return whether a verdict beside a chosen and a rejected answer says that the chosen one is better."""
    return names_verdict(name) and _side(value) is True


def contradicts(row: Mapping[str, object]) -> str | None:
    """Return the column that says that the rejected answer of a pair is the better one; None without one."""
    others = (name for name in row if name not in ("chosen", "rejected") and names_verdict(name))
    return next((name for name in others if _side(row[name]) is False), None)


def _side(value: object) -> bool | None:
    """Return whether a verdict beside a pair means the chosen answer (true) or the rejected one; None if neither."""
    text = str(value).strip().lower()
    if text in ("chosen", "rejected"):
        return text == "chosen"
    return boolean(value)


def compared(row: Mapping[str, object]) -> Columns | None:
    """Return the columns of two responses; None for a row without them, and for one that has a rejected answer.

    Columns with values come before those without.
    """
    if has_value(row.get("rejected")):
        return None
    verdict = next(iter(_verdicts(row)), None)
    found = [Columns(*columns, verdict) for columns in _pairs(row)]
    return max(found, key=lambda columns: _are_given(row, columns), default=None)


def preference(row: Mapping[str, object], columns: Columns, rating: str | None = None) -> dict[str, object] | None:
    """Return the preference row of two responses and a verdict; None for a tie. Raises Malformed.

    Ratings of the two become its margin, and decide where there is no verdict; `rating` names the number, where its
    name leaves open that it rates. What else is said of each response, but for texts, goes. The row keeps every other
    column, so that the reader uses it, or refuses to lose it.
    """
    pairs = [f"{first}, {second}" for first, second, _ in _pairs(row) if _are_given(row, (first, second))]
    at_most_one(pairs, "responses", "take one pair out", quote=str)
    at_most_one(_verdicts(row), "verdicts", "take the others out")
    are_whole = _is_whole(row[columns.first])
    prompts = [name for name in PROMPTS if has_value(row.get(name)) and not are_whole]
    prompt = at_most_one(prompts, "texts", "write them into one 'prompt'")
    if prompt is None and not are_whole:
        raise Malformed(f"no prompt under {', '.join(PROMPTS)}; name its column: --rename OLD=prompt")
    above = margin(row, ratings_of(row, *columns.marks, answer_words(columns.first), rating))
    first_is_better = _by_rating(row, columns, above) if columns.verdict is None else _by_verdict(row, columns, above)
    if first_is_better is None:
        return None
    better, worse = (columns.first, columns.second) if first_is_better else (columns.second, columns.first)
    pair = {"chosen": row[better], "rejected": row[worse]} | ({} if prompt is None else {"prompt": row[prompt]})
    rated = {} if above is None else {"margin": above if first_is_better else -above}
    used = {columns.first, columns.second, columns.verdict, prompt, *_about_responses(row, columns)}
    beside = {key: value for key, value in row.items() if key not in used and key not in _JUDGEMENT}
    return beside | rated | pair


def _verdicts(row: Mapping[str, object]) -> list[str]:
    """Return the columns of a row that have a verdict."""
    return [name for name, value in row.items() if has_value(value) and (names_verdict(name) or name in _SIGNED)]


def _pairs(row: Mapping[str, object]) -> list[tuple[str, str, tuple[str, str]]]:
    """Return the pairs of columns that hold two responses, with their marks.

    They are named as responses; or, beside a prompt and a verdict or numbers, without any other answer, they are texts.
    """
    pairs = []
    for one, two, others in MARKS:
        more = {name for mark in others for name, _ in twins(row, one, mark)}
        pairs += [(first, second, (one, two)) for first, second in twins(row, one, two) if first not in more]
    named = [pair for pair in pairs if len(words(pair[0])) == 2 and not RESPONSE_WORDS.isdisjoint(words(pair[0]))]
    judged = _verdicts(row) or any(number_pairs(row, *marks) for _, _, marks in pairs)
    asked = any(has_value(row.get(prompt)) for prompt in PROMPTS) and judged
    if named or not asked or any(has_value(row.get(answer)) for answer in _ANSWERS):
        return named
    return [pair for pair in pairs if all(is_text(row[name]) or is_messages(row[name]) for name in pair[:2])]


def _are_given(row: Mapping[str, object], columns: Sequence[object]) -> bool:
    """Return whether both responses have a value."""
    return all(has_value(row[str(name)]) for name in columns[:2])


def _is_whole(response: object) -> bool:
    """Return whether a response is a whole conversation, the prompt included."""
    return is_messages(response) and any(
        (turn.get("role") or turn.get("from")) in ("user", "human") for turn in response
    )


def _about_responses(row: Mapping[str, object], columns: Columns) -> list[str]:
    """Return the columns without texts that say something of one response, by its name or beside a twin."""
    fields = [name for pair in twin_fields(row, *columns.marks) for name in pair]
    about = {name if name in row else name.partition(".")[0] for name in fields}
    for own in map(words, columns[:2]):
        about |= {name for name in row if {*own} < {*words(name)}}
    return [name for name in about if not any(map(is_text, values(row.get(name))))]


def at_most_one(found: Sequence[str], what: str, way_out: str, quote: Callable[[str], str] = repr) -> str | None:
    """Return the only one of the columns that were found; None without one. Raises Malformed for several."""
    if len(found) > 1:
        raise Malformed(f"{what} under {' and '.join(map(quote, found))}; {way_out}")
    return found[0] if found else None


def _by_rating(row: Mapping[str, object], columns: Columns, above: float | None) -> bool | None:
    """Return whether the first response is rated higher; None for a tie. Raises UnclearRating without a rating."""
    if above is None:
        numbers = [name for name, _ in number_pairs(row, *columns.marks) if not is_free(name, row.get(name))]
        ways = [ask_for_sign(name) for name in numbers[:1]]
        used = {columns.first, columns.second, *PROMPTS, *_about_responses(row, columns), *_JUDGEMENT}
        left = [name for name, value in row.items() if name not in used and has_value(value) and is_word(value)]
        if names := [name for name in left if _would_decide(row, columns, name)]:
            ways += [f"if {' or '.join(map(repr, names))} names the better one: --rename {names[0]}=winner"]
        elif left := [name for name in left if not is_free(name, row[name])]:
            known = f"{columns.first}, {columns.second} or tie"
            ways += [f"if {' or '.join(map(repr, left))} says it, write it as 'winner': {known}"]
        way_out = "".join(f"; {way}" for way in ways)
        raise UnclearRating(
            f"no verdict and no ratings say which response is better, as `winner` or `score_…` do{way_out}"
        )
    return None if above == 0 else above > 0


def _would_decide(row: Mapping[str, object], columns: Columns, name: str) -> bool:
    """Return whether a column would say which response is better if it were named `winner`."""
    try:
        _by_verdict({**row, "winner": row[name]}, columns._replace(verdict="winner"), None)
    except Malformed:
        return False
    return True


def _by_verdict(row: Mapping[str, object], columns: Columns, above: float | None) -> bool | None:
    """Return whether the first response is better; None for a tie. Raises Malformed where that is not clear.

    A number alone is clear where the responses are numbered alike. Elsewhere 1 may be the first or the second.
    """
    verdict, value = str(columns.verdict), row[str(columns.verdict)]
    by_rating = "" if above is None else f"; to let their ratings decide: --ignore {verdict}"
    is_label = _verdict_words(verdict) <= _LABELS
    if is_label and _would_decide(row, columns, verdict):
        raise Malformed(
            f"'{verdict}' leaves open whether it names the better response; if it does: --rename {verdict}=winner"
            f"{by_rating}"
        )
    word = "" if isinstance(value, bool) else str(value).strip().lower()
    number = number_or_none(value)
    known = f"{columns.first}, {columns.second} or tie{' as winner' if is_label else ''}"
    problem: type[Malformed] = Malformed
    if verdict in _SIGNED and words(columns.first) == ("response", "1"):
        known = "below 0 for the first response, above 0 for the second, and 0 for a tie"
        if number is not None and not math.isnan(number):
            return None if number == 0 else number < 0
    elif word in _TIES:
        return None
    elif has_value(value) and value in (row[columns.first], row[columns.second]):
        return value == row[columns.first]
    elif (side := _named_side(word, columns)) is not None:
        return side
    elif verdict in _SIGNED and number is not None:
        known += "; a number below or above 0 is read beside 'response_1' and 'response_2' (--rename)"
    elif columns.marks[0].isdigit() and number is not None:
        problem = OtherNumbers
    raise problem(f"'{verdict}' is {value!r:.40} and leaves open which response is better; write {known}{by_rating}")


def _named_side(word: str, columns: Columns) -> bool | None:
    """Return whether a verdict names the first response or the second, by its mark or its letter; None for neither.

    Words such as `model` or `response` may stand beside the mark.
    """
    numbered, letters = columns.marks[0].isdigit(), ("a", "b")
    if not re.search(r"[^\W\d]", word):  # a number alone, which may be a grade
        grade = "preference" in _verdict_words(str(columns.verdict))
        mark, names = word.removesuffix(".0"), [columns.marks] if numbered and not grade else []
    else:
        own = [part for part in words(word) if part not in _BESIDE_VERDICTS | {"option", "assistant", "system"}]
        mark, names = " ".join(own), [columns.marks, letters, *([] if numbered else [("1", "2")])]
    return next((mark == first for first, second in names if mark in (first, second)), None)
