"""Signs of bad data that can be counted: in what every run reads, and further ones for `rlhf data check`.

No model reads the texts, so an answer that is wrong or chosen by mistake goes unseen. `rlhf data show` shows some.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from rlhf.data.chat_template import MARK_SHAPE
from rlhf.data.formats import ParsedRows
from rlhf.data.normal import normal_answer, normal_prompt, normalise
from rlhf.data.rows import KINDS, Document, Example, PreferencePair, PromptOnly, Row, of_kind, responses, texts
from rlhf.data.split import divide
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.terminal import counted

SHOWN = 3  # places that are named
FEW = 30  # pairs, too few to tell whether length decides
WORDS = 13  # that a training and a held-out row have in common, in order, where one is likely a copy of the other
# Marks of turns beside those that MARK_SHAPE finds: of Llama 2 and Mistral, Gemma, HH, Alpaca, and ends of texts
TEMPLATED = re.compile(
    rf"{MARK_SHAPE.pattern}|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|\A<s>|</s>\Z"
    r"|\A\s*Human: [\s\S]*\n\nAssistant:|### Instruction:\n[\s\S]*### Response:"
)


class Finding(NamedTuple):
    """What was found in how many rows of `total`, the first of them, and what it means; a `fault` is bad."""

    name: str
    rows: int
    total: int
    places: Sequence[str]
    meaning: str
    fault: bool = True

    def __str__(self) -> str:
        places = f", as {', '.join(place.rpartition('/')[2] for place in self.places)}" if self.places else ""
        return f"{self.name}: {self.rows:,} of {self.total:,}{places}: {self.meaning}"


def _found(name: str, rows: Sequence[Row], total: int, meaning: str, fault: bool = True) -> Iterator[Finding]:
    """Yield the finding that these rows are, if there are any."""
    if rows:
        yield Finding(name, len(rows), total, [row.source for row in rows[:SHOWN]], meaning, fault)


def at_reading(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield what a run says of its rows: scores against the choice, marks of a template in texts."""
    pairs = [row for row in rows if isinstance(row, PreferencePair) and row.margin is not None]
    inverted = [row for row in pairs if row.margin is not None and row.margin < 0]
    tied = [row for row in pairs if row.margin == 0]
    yield from _found("inverted", inverted, len(pairs), "the rejected answer has the higher score")
    yield from _found("tied", tied, len(pairs), "both answers are scored alike, so the choice is arbitrary", False)
    dialogues = [row for row in rows if not isinstance(row, Document)]
    templated = [row for row in dialogues if any("<" in t or ":" in t or "[" in t for t in texts(row)) and _marked(row)]
    yield from _found("templated", templated, len(dialogues), "texts hold a template's marks, and get them twice")


def _marked(row: Row) -> bool:
    return any(TEMPLATED.search(text) for text in texts(row))


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return what a run says of its rows, in lines."""
    return [str(finding) for finding in at_reading(rows)]


def check(rows: ParsedRows, heldout: ParsedRows | None = None) -> list[Finding]:
    """Return what is wrong with rows, and what is to be known of them.

    Leaks are looked for between `rows` and `heldout`, or between `rows` and the tenth of them that seed 0 holds out.
    """
    if heldout is None:
        train, test = divide(rows.rows, seed=0, fraction=0.1)
    else:
        train, test = [*rows.rows], [*heldout.rows]
    return [
        *at_reading(rows.rows),
        *_repeated(rows.rows),
        *_contradictions(rows.rows),
        *_longer(of_kind(rows.rows, PreferencePair)),
        *_leaks(train, test),
    ]


def _content(row: Row) -> Hashable:
    """Return what is equal for rows that say the same, whatever their spelling."""
    if isinstance(row, Document):
        return normalise(row.text)
    return type(row), normal_prompt(row.prompt), tuple(map(normalise, responses(row))), _right(row)


def _right(row: Row) -> Hashable:
    return normal_answer(row.right_answer) if isinstance(row, Example | PromptOnly) and row.right_answer else None


def _repeated(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield the rows that say what an earlier row says; the first of each is not among them."""
    seen: set[int] = set()
    repeated = []
    for row in rows:
        key = hash(_content(row))
        if key in seen:
            repeated.append(row)
        seen.add(key)
    yield from _found("duplicates", repeated, len(rows), "copies weigh more; keep one of each")


def _contradictions(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield pairs whose answers are also labelled the other way, and rows with another right answer than before."""
    pairs = [row for row in rows if isinstance(row, PreferencePair)]
    keys = [(normal_prompt(p.prompt), normalise(p.chosen), normalise(p.rejected)) for p in pairs]
    labelled = {*keys}
    both = [p for p, (said, chosen, rejected) in zip(pairs, keys, strict=True) if (said, rejected, chosen) in labelled]
    yield from _found("contradictory", both, len(pairs), "the same answers are labelled both ways; keep one")
    first: dict[Hashable, Hashable] = {}
    answered = [row for row in rows if isinstance(row, Example | PromptOnly) and row.right_answer]
    differing = [r for r in answered if first.setdefault(normal_prompt(r.prompt), _right(r)) != _right(r)]
    yield from _found("further answers", differing, len(answered), "another right answer than the first to a prompt")


def _longer(pairs: Sequence[PreferencePair]) -> Iterator[Finding]:
    """Yield in how many pairs the chosen answer has more words."""
    lengths = [(len(pair.chosen.split()), len(pair.rejected.split())) for pair in pairs]
    longer, unequal = sum(a > b for a, b in lengths), sum(a != b for a, b in lengths)
    if unequal:
        bias = unequal >= FEW and not 0.3 <= longer / unequal <= 0.7
        meaning = "length alone predicts the choice, and a policy will learn it" if bias else "among unequal lengths"
        yield Finding("chosen longer", longer, unequal, (), meaning, bias)


def _leaks(train: Sequence[Row], heldout: Sequence[Row]) -> Iterator[Finding]:
    """Yield the held-out rows with a prompt and answer, or WORDS words in a row, that training rows have too."""
    if not (train and heldout):
        return
    meaning = "training rows say the same, so results look better than they are"
    known = {hash(_content(row)) for row in train}
    exact = [row for row in heldout if hash(_content(row)) in known]
    yield from _found("leaked", exact, len(heldout), meaning)
    rest = [row for row in heldout if hash(_content(row)) not in known]
    grams = [(row, {*_grams(row)}) for row in rest]
    wanted = Counter(gram for _, own in grams for gram in own)
    shared = {gram for row in train for gram in _grams(row) if gram in wanted}
    overlap = [row for row, own in grams if own and 2 * len(own & shared) > len(own)]
    yield from _found("overlapping", overlap, len(heldout), f"most of their runs of {WORDS} words are in training rows")


def _grams(row: Row) -> Iterator[int]:
    """Yield the hash of each run of WORDS words in a row's answers, or in the last thing said where it has none."""
    for text in responses(row) or texts(row)[-1:]:
        words = text.split()
        for start in range(len(words) - WORDS + 1):
            yield hash(tuple(words[start : start + WORDS]))


def cut(rows: ParsedRows, tokenizer: DialogueTokenizer, lengths: tuple[int, int]) -> Iterator[Finding]:
    """Yield how many prompts and answers are cut at a recipe's lengths, of a prompt and of the whole, in tokens."""
    dialogues = [
        (row.prompt, answer) for row in rows.rows if not isinstance(row, Document) for answer in responses(row)
    ]
    counts = tokenizer.encode(dialogues, *lengths)[1]
    for key, meaning in (
        ("prompts_cut", f"prompts longer than {lengths[0]} tokens lose their beginning"),
        ("responses_cut", f"answers beyond {lengths[1]} tokens lose their end"),
        ("dropped", "nothing of the answer is left; such rows are left out"),
    ):
        if counts[key]:
            yield Finding(key.replace("_", " "), counts[key], len(dialogues), (), meaning)


def in_words(rows: ParsedRows) -> str:
    """Return how many rows of which kind there are."""
    found = Counter(type(row) for row in rows.rows)
    names = zip(KINDS, ("text", "demonstration", "pair", "prompt"), strict=True)
    return ", ".join(counted(found[kind], name) for kind, name in names if found[kind]) or "no rows"
