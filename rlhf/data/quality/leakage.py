"""Leakage: held-out rows that have a copy or near copy on the training side.

A split by conversations cannot see them. Such rows flatter an evaluation, because the model has seen the answer. Whole
rows and near copies are detected; a paraphrase is not.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rlhf.data.normal import normalise
from rlhf.data.quality.flaws import prompt, responses
from rlhf.data.rows import Document, Row
from rlhf.data.scripts import split_without_spaces, words
from rlhf.data.split import row_key

ANSWER_WORDS = 13  # shorter answers fit many questions: I’m sorry, I don’t know how to do that.
SHINGLE = 13  # words in a row, as GPT-3's authors counted overlap (arXiv 2005.14165, appendix C)
CONTAINED = 0.8  # least share of the shingles of a held-out exchange that one training row holds
BOILERPLATE = 10  # a shingle or an answer of more rows than that belongs to a template and proves nothing

_WORD = re.compile(r"\w+")


class Leaks(NamedTuple):
    """Leaked held-out rows, each with a training row that contains it or nearly does, by the test that detected them.

    same_start   the conversation begins with the same message: none where rlhf/data/split.py made the sides
    same_turn    the last message and an answer to it are the same
    same_answer  an answer of at least ANSWER_WORDS is the same, and at most BOILERPLATE rows have it
    near_copies  one training row holds CONTAINED of an exchange's shingles: last message with an answer, the last
                 message of a prompt without one, or a text

    same_turn and same_answer ignore case and white space; shingles ignore punctuation too. `leaking` holds every
    training row that contains a held-out one or nearly does.
    """

    by_kind: dict[str, list[tuple[Row, Row]]]
    leaking: list[Row]

    @property
    def heldout(self) -> list[tuple[Row, Row]]:
        """Return every leaked held-out row once, each with a training row."""
        return list({id(row): (row, like) for pairs in self.by_kind.values() for row, like in pairs}.values())


def leaks(training: Sequence[Row], heldout: Sequence[Row]) -> Leaks:
    """Look for held-out rows in the training side. This takes a few seconds for 50,000 dialogues."""
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    leaking: dict[int, Row] = {}
    rows_with = Counter(answer for row in (*training, *heldout) for answer in {*_answers(row)})

    def own_answers(row: Row) -> list[Hashable]:
        return [answer for answer in _answers(row) if rows_with[answer] <= BOILERPLATE]

    for name, keys in (("same_start", _starts), ("same_turn", _turns), ("same_answer", own_answers)):
        pairs[name], rows = _same(training, heldout, keys)
        leaking |= rows
    pairs["near_copies"], rows = _near_copies(training, heldout)
    return Leaks(pairs, list((leaking | rows).values()))


Matches = tuple[list[tuple[Row, Row]], dict[int, Row]]  # held-out rows with a training row; training rows by identity


def _same(training: Iterable[Row], heldout: Sequence[Row], keys: Callable[[Row], Iterable[Hashable]]) -> Matches:
    """Return the held-out rows that share a key with a training row, and these training rows."""
    heldout_keys = {key for row in heldout for key in keys(row)}
    first: dict[Hashable, Row] = {}
    leaking: dict[int, Row] = {}
    for row in training:
        for key in heldout_keys.intersection(keys(row)):
            first.setdefault(key, row)
            leaking[id(row)] = row
    matches = ((row, next((first[key] for key in keys(row) if key in first), None)) for row in heldout)
    return [(row, like) for row, like in matches if like], leaking


def _starts(row: Row) -> list[Hashable]:
    """Return the key of the conversation that the row begins."""
    return [row_key(row)]


def _turns(row: Row) -> list[Hashable]:
    """Return the last message with each answer to it."""
    return [(_normalized(prompt(row)[-1].content), _normalized(answer)) for answer in responses(row)]


def _answers(row: Row) -> list[Hashable]:
    """Return the answers that are long enough to be told apart."""
    return [_normalized(answer) for answer in responses(row) if len(words(answer)) >= ANSWER_WORDS]


def _normalized(text: str) -> str:
    """Return a text without differences of case and white space."""
    return normalise(text.casefold())


def _near_copies(training: Iterable[Row], heldout: Sequence[Row]) -> Matches:
    """Return the held-out rows of which one training row holds a near copy, and these training rows.

    Only the shingles of the held-out side are kept, as hashes. A first pass selects the exchanges of which enough
    shingles occur anywhere on the training side; a second pass looks for single rows that hold enough of one exchange.
    """
    rows_with = Counter(shingle for row in heldout for shingle in set().union(*_exchanges(row)))
    present: set[int] = set()
    sharing = []
    for row in training:
        hits = rows_with.keys() & set(_row_shingles(row))
        present |= hits
        rows_with.update(hits)
        if hits:
            sharing.append(row)
    distinctive = {shingle for shingle, rows in rows_with.items() if rows <= BOILERPLATE}
    suspects: list[tuple[Row, int]] = []  # a held-out row, and the shingles that one training row must hold
    index: dict[int, list[int]] = defaultdict(list)
    for row in heldout:
        for shingles in _exchanges(row):
            exchange_shingles = shingles & distinctive
            if exchange_shingles and len(exchange_shingles & present) >= CONTAINED * len(exchange_shingles):
                for shingle in exchange_shingles:
                    index[shingle].append(len(suspects))
                suspects.append((row, len(exchange_shingles)))
    found: dict[int, tuple[Row, Row]] = {}
    leaking = {}
    for row in sharing if suspects else ():
        shared = Counter(suspect for shingle in set(_row_shingles(row)) for suspect in index.get(shingle, ()))
        for suspect, count in shared.items():
            copied, total = suspects[suspect]
            if count >= CONTAINED * total:
                found.setdefault(id(copied), (copied, row))
                leaking[id(row)] = row
    return [found[id(row)] for row in heldout if id(row) in found], leaking


def _exchanges(row: Row) -> list[set[int]]:
    """Return the shingles of each answer with the message that it answers, of a message without one, or of a text."""
    if isinstance(row, Document):
        return [set(_shingles(_words(row.text)))]
    question = _words(prompt(row)[-1].content)
    return [set(_shingles(question + _words(answer))) for answer in responses(row) or ("",)]


def _row_shingles(row: Row) -> Iterator[int]:
    """Yield the shingles of everything in a row."""
    if isinstance(row, Document):
        yield from _shingles(_words(row.text))
        return
    prompt_words = [word for message in prompt(row) for word in _words(message.content)]
    yield from _shingles(prompt_words)
    for answer in responses(row):
        yield from _shingles(prompt_words[1 - SHINGLE :] + _words(answer))


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return split_without_spaces(_WORD.findall(normalise(text).casefold()))


def _shingles(words: Sequence[str]) -> Iterator[int]:
    """Yield the hash of every SHINGLE words in a row."""
    return map(hash, zip(*(words[i:] for i in range(SHINGLE)), strict=False))
