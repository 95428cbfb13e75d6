"""Fields of rows and messages by the shape of their names and values: what may stand beside texts unread.

A name alone frees no field. One is without influence on an answer if its values are ids, hashes, times or addresses of
pages, or if a whole file has one and the same word or number in it, which tells no row from another.
"""

import datetime
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeGuard

from rlhf.data.scripts import words as spoken_words
from rlhf.data.transcripts import begins_with_turn, is_transcript
from rlhf.errors import UserError

# Columns whose texts may be transcripts, and what tells that of one text.
TRANSCRIPTS: dict[str, Callable[[str], bool]] = {
    "prompt": is_transcript,
    **dict.fromkeys(("chosen", "rejected", "completion", "response"), begins_with_turn),
}
SURVEYED = 10_000  # rows of a file that decide what holds for the file
LONGEST_WORD = 100  # characters
MESSAGE = "[]."  # before the name of a field of messages, wherever they stand
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+")
_INDEX = re.compile(r"(?:Unnamed: \d+(?:\.\d+)?)?|__index_level_\d+__")  # as pandas writes it beside its columns
_POINTS_AT_INPUT = re.compile("image|picture|photo|audio|video|document|passage|context|history|previous|tool")
_IDS = {"id", "uid", "uuid", "guid", "idx", "index", "hash", "sha", "md"}
_TIMES = {"time", "timestamp", "tstamp", "date", "datetime", "created", "updated", "modified"}
_HASH = re.compile(r"(?i)(?=.*\d)(?:[0-9a-f]{16,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
_TIME = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)?")
_CLOCK = re.compile(r"(?=(?:.*\d){4})[\d\s:./+TZ-]+")
_URL = re.compile(r"(?i)https?://\S+")
_ENDING = re.compile(r"\.([a-z]\w{1,7}|\d[a-z]\w?)\Z")
_OF_PAGES = {
    *("html", "htm", "xhtml", "shtml", "stm", "php", "asp", "aspx", "jsp", "jspx"),
    *("cfm", "cgi", "cms", "do", "ece", "pl", "md"),
}
_ID = re.compile(r"\S*\d\S*|(?=\S*[a-z])[A-Za-z]\S*[A-Z]\S*")  # with a digit, or a capital inside of it
_TRAINED = re.compile(r"train\w*|loss(?:es)?|weights?|learn\w*|supervis\w*|backprop\w*")
_OF_TRAINED = {
    *("on", "in", "into", "is", "it", "do", "to", "for", "with", "per", "the", "this", "be", "has", "should"),
    *("use", "used", "include", "included", "including", "apply", "applied", "compute", "computed", "enable"),
    *("enabled", "turn", "message", "msg", "token", "tokens", "sft", "flag", "mask"),
}
_BOOLEANS: dict[object, bool] = {0: False, 1: True, "0": False, "1": True, "0.0": False, "1.0": True}
_BOOLEANS |= {"false": False, "true": True}


@lru_cache(maxsize=10_000)
def words(name: str) -> tuple[str, ...]:
    """Return the words of a name in lower case: `scoreChosen`, `score-chosen` and `score.chosen` have the same."""
    return tuple(word.lower() for word in _WORDS.findall(name))


def has_value(value: object) -> bool:
    """Return whether a field says anything; null, NaN, and an empty text, list or object do not. false and 0 do."""
    if isinstance(value, float) and math.isnan(value):
        return False
    return bool(value.strip()) if isinstance(value, str) else value is False or value not in (None, [], {})


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the fields with a value of an object in an object, with dotted names; any other value under its name."""
    waiting = [(name, value)]  # no recursion: a row may be nested as deep as Python's stack
    while waiting:
        place, inner = waiting.pop()
        if isinstance(inner, dict):
            waiting += [(f"{place}.{key}", below) for key, below in reversed(inner.items())]
        elif has_value(inner):
            yield place, inner


def twins(names: Collection[str], one: str, other: str) -> list[tuple[str, str]]:
    """Return the names that differ in a word alone, which is `one` in the first and `other` in the second."""
    by_words = {words(name): name for name in names}
    return [
        (name, by_words[twin])
        for own, name in by_words.items()
        for place, word in enumerate(own)
        if word == one and (twin := (*own[:place], other, *own[place + 1 :])) in by_words
    ]


def boolean(value: object) -> bool | None:
    """Return a value that is true or false, 1 or 0, or their text, as a boolean; None for any other."""
    key = value.strip().lower() if isinstance(value, str) else value
    return _BOOLEANS.get(key) if isinstance(key, str | bool | int | float) else None


def switches_training(name: str) -> bool:
    """Return whether a field says by its name that something is trained on: `train`, `loss_mask`, `includeInLoss`."""
    own = words(name)
    kinds = [bool(_TRAINED.fullmatch(word)) for word in own]
    known = all(trains or word in _OF_TRAINED for trains, word in zip(kinds, own, strict=True))
    return any(kinds) and known and own[0] != "mask"  # a mask of the loss, or a loss that is masked


def is_word(value: object) -> bool:
    """Return whether a value is a number or a single word, or a list of such."""
    return all(isinstance(part, int | float) or _is_single(part) for part in values(value))


def is_text(value: object) -> bool:
    """Return whether a value is a text: words, or one word with a mark behind it as a sentence has it."""
    return isinstance(value, str) and bool(value.strip()) and not (_is_single(value) and re.search(r"\w\s*\Z", value))


def _is_single(value: object) -> bool:
    """Return whether a value is a single word; a long text is none, whatever its script."""
    return isinstance(value, str) and len(value) <= LONGEST_WORD and len(spoken_words(value)) <= 1


def values(value: object) -> Iterator[object]:
    """Yield the values in lists and objects, however deep; any other value itself."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, list | dict):
            waiting += reversed([*inner.values()] if isinstance(inner, dict) else inner)
        else:
            yield inner


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What holds for all rows of a file, and no row can say by itself.

    `ids` are names of fields, dotted, those of messages behind `[].`, and `constant` has such names with the one value;
    `transcripts` says of the columns of prompts and answers with texts whether these are transcripts. `rating` is the
    number that rates answers because the user names it.
    """

    ids: frozenset[str] = frozenset()
    constant: Mapping[str, str] = field(default_factory=dict)
    transcripts: Mapping[str, bool] = field(default_factory=dict)
    sample: tuple[dict[str, object], ...] = ()
    rating: str | None = None

    def is_constant(self, name: str, value: object) -> bool:
        """Return whether a field has this value, a number or a word, in all rows; one of 0 or 1 may be a switch."""
        return self.constant.get(name) == repr(value) and boolean(value) is None


NO_FACTS = FileFacts()


class Field(NamedTuple):
    """A field where it stands in a row (`messages[2].mask`), its name (`mask`), and its value."""

    place: str
    name: str
    value: object


class Unread(NamedTuple):
    """Fields that no stage reads: those that an answer may depend on, and the names of those that a report names."""

    refused: list[Field]
    named: list[str]


_SAMPLE = 100  # rows by which a refusal names all columns that it is about


@dataclass(slots=True)
class _Column:
    rows: int = 0
    ids: int = 0
    values: set[str] = field(default_factory=set)  # at most two


def survey(rows: Iterable[tuple[str, object]]) -> FileFacts:
    """Return what holds for a file by its first rows. A file that cannot be read on is left to its reader."""
    columns: dict[str, _Column] = {}
    texts: dict[str, list[bool]] = {}
    count = 0
    sample = []
    try:
        for _, row in itertools.islice(rows, SURVEYED):
            if not isinstance(row, dict):
                continue
            count += 1
            sample += [row] if count <= _SAMPLE else []
            for name, has_shape in TRANSCRIPTS.items():
                if isinstance(text := row.get(name), str):
                    texts.setdefault(name, []).append(has_shape(text))
            seen = set()
            for _, name, value in fields(row):
                column = columns.setdefault(name, _Column())
                column.rows += name not in seen
                seen.add(name)
                column.ids += _is_id(value)
                if len(column.values) < 2:
                    column.values.add(repr(value) if is_word(value) else "")
    except UserError:
        pass
    return FileFacts(
        frozenset(name for name, column in columns.items() if _names_id(name) and 2 * column.ids >= column.rows),
        {
            name: next(iter(column.values))
            for name, column in columns.items()
            if 1 < column.rows == count and len(column.values) == 1 and column.values != {""}
        },
        {name: 2 * sum(shapes) > len(shapes) for name, shapes in texts.items()},
        tuple(sample),
    )


def fields(row: Mapping[str, object]) -> Iterator[Field]:
    """Yield the fields of a row that have a value, and those of its messages but for role and content."""
    for column, value in row.items():
        if is_messages(value):
            yield from fields_of_messages(value, column)
        for name, leaf in leaves(column, value):
            yield Field(name, name, leaf)


def fields_of_messages(messages: object, column: str) -> Iterator[Field]:
    """Yield the fields of messages that have a value, but for role and content; their names begin with `[].`."""
    for number, message in enumerate(messages if isinstance(messages, list) else (), 1):
        if isinstance(message, dict):
            names = (("role", "from"), ("content", "value"))
            read = [new if message.get(new) is not None else old for new, old in names]
            for key in (key for key in message if key not in read):
                for name, leaf in leaves(key, message[key]):
                    yield Field(f"{column}[{number}].{name}", MESSAGE + name, leaf)


def is_messages(value: object) -> TypeGuard[list[dict[str, object]]]:
    """Return whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)


def is_free(name: str, value: object, facts: FileFacts = NO_FACTS) -> bool:
    """Return whether a field is an id, a hash, a time or the address of a page, by its values."""
    if isinstance(value, list):
        return all(is_free(name, element, facts) for element in values(value))
    if _INDEX.fullmatch(name):
        return str(value).isdecimal()
    if isinstance(value, bool | dict) or _POINTS_AT_INPUT.search(" ".join(words(name))):
        return False
    if isinstance(value, datetime.date | datetime.time):
        return True
    text = str(value).strip()
    if _HASH.fullmatch(text) or _TIME.fullmatch(text) or _is_page(text):
        return True
    if _names_id(name) and is_word(value):
        return name in facts.ids or _is_id(value)
    return not _TIMES.isdisjoint(words(name)) and bool(_CLOCK.fullmatch(text))


def _is_page(text: str) -> bool:
    """Return whether a text is the address of a page; another ending says that it is that of an image or a file."""
    if not _URL.fullmatch(text):
        return False
    path = re.split("[?#]", text.partition("//")[2], maxsplit=1)[0]
    ending = _ENDING.search(path.rpartition("/")[2].lower()) if "/" in path else None
    return ending is None or ending[1] in _OF_PAGES


def _names_id(name: str) -> bool:
    return any(word.removesuffix("s") in _IDS for word in words(name))


def _is_id(value: object) -> bool:
    """Return whether a value has the shape of an id: a whole number, or a word with a digit or a capital inside."""
    if isinstance(value, list):
        return all(map(_is_id, values(value)))
    if isinstance(value, bool | float):
        return isinstance(value, float) and value.is_integer()
    return bool(_ID.fullmatch(str(value).strip())) if isinstance(value, int | str) else False
