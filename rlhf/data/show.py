"""Rows as they will be trained: the text that the model sees, with a mark at what it learns from.

│ context, as the template writes it
┃ what is trained: the answer, or the chosen one
╎ the rejected answer, or one that is labelled bad
"""

import itertools
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from rlhf.data.rows import Document, Example, PreferencePair, PromptOnly, Row
from rlhf.data.tokenize import UNCUT, DialogueTokenizer, imitated
from rlhf.data.worlds import gym
from rlhf.terminal import excerpt, harmless

LONGEST = 4000  # characters of a text that are shown
CONTEXT, TRAINED, REJECTED = ("│", "dim"), ("┃", "bold green"), ("╎", "red")  # marks, with styles
Part = tuple[str, tuple[str, str]]  # text, and its mark


def row(shown: Row, tokenizer: DialogueTokenizer | None, lengths: tuple[int, int] = (UNCUT, UNCUT)) -> RenderableType:
    """Return a row for a rich console. `lengths`: tokens of the longest prompt and of the longest sequence.

    Without a tokenizer the text is that of a plain transcript, and nothing is cut.
    """
    parts, tokens = _written(shown, tokenizer, lengths) if tokenizer else (_plain(shown), "")
    title = Text(f"{shown.source}  {_kind(shown)}{tokens}", "bold")
    return Group(title, *itertools.chain.from_iterable(_lines(text, mark) for text, mark in parts), *_beside(shown), "")


def _written(shown: Row, tokenizer: DialogueTokenizer, lengths: tuple[int, int]) -> tuple[list[Part], str]:
    """Return the text of a row's ids by what is trained, and how many tokens that is."""

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    if isinstance(shown, Document):
        pieces = tokenizer.encode_texts([shown.text], lengths[1])
        return [(text(ids), TRAINED) for ids in pieces], f", {sum(map(len, pieces)):,} tokens trained"
    if isinstance(shown, PromptOnly):
        (ids,), _ = tokenizer.encode_prompts([shown.prompt], lengths[0])
        return [(text(ids), CONTEXT)], f", {len(ids):,} tokens"
    if isinstance(shown, PreferencePair):
        sides = [(shown.prompt, shown.chosen), (shown.prompt, shown.rejected)]
        chosen, rejected = tokenizer.encode(sides, *lengths)[0]
        if chosen is None or rejected is None:
            return _plain(shown), ", left out: nothing of an answer fits"
        parts = [(text(chosen.prompt), CONTEXT), (text(chosen.response), TRAINED), (text(rejected.response), REJECTED)]
        return parts, f", {len(chosen.response):,} and {len(rejected.response):,} tokens trained"
    if shown.good is None:
        sequences = tokenizer.encode_turns([shown], *lengths)[0]
    else:
        sequences = [imitated(ids) for ids in tokenizer.encode([(shown.prompt, shown.response)], *lengths)[0] if ids]
    mark = REJECTED if shown.good is False else TRAINED
    parts = []
    for number, sequence in enumerate(sequences, 1):
        if sequences[1:]:
            parts.append((f"sequence {number} of {len(sequences)}", ("", "italic")))
        left = iter(sequence.ids)
        for is_trained, run in itertools.groupby(sequence.imitated):
            parts.append((text(list(itertools.islice(left, len(list(run))))), mark if is_trained else CONTEXT))
    trained = sum(sum(sequence.imitated) for sequence in sequences)
    return parts, f", {trained:,} of {sum(len(sequence.ids) for sequence in sequences):,} tokens trained"


def _plain(shown: Row) -> list[Part]:
    """Return the text of a row without a tokenizer."""
    if isinstance(shown, Document):
        return [(shown.text, TRAINED)]
    earlier = {len(answer.prompt) for answer in shown.earlier()} if isinstance(shown, Example) else set()
    parts = [
        (f"{message.role}: {message.content}", TRAINED if index in earlier else CONTEXT)
        for index, message in enumerate(shown.prompt)
    ]
    if isinstance(shown, Example):
        parts.append((f"assistant: {shown.response}", REJECTED if shown.good is False else TRAINED))
    if isinstance(shown, PreferencePair):
        parts += [(f"assistant: {shown.chosen}", TRAINED), (f"assistant: {shown.rejected}", REJECTED)]
    return parts


def _kind(shown: Row) -> str:
    """Return in words what a row is."""
    match shown:
        case Document():
            return "text"
        case PromptOnly():
            return "prompt"
        case PreferencePair():
            return f"pair{'' if shown.margin is None else f', margin {shown.margin:g}'}"
        case Example():
            label = "" if shown.good is None else ", labelled good" if shown.good else ", labelled bad"
            answers = len(shown.earlier()) + 1
            return (f"conversation, {answers} answers" if answers > 1 else "answer") + label


def _lines(text: str, mark: tuple[str, str]) -> Iterator[Text]:
    """Yield the lines of a text behind its mark, with invisible characters as escapes."""
    shown = text.strip("\n")
    more = f"… ({len(shown) - LONGEST:,} more characters)" if len(shown) > LONGEST else ""
    for line in (harmless(shown[:LONGEST]) + more).split("\n"):
        yield Text(f"{mark[0]} {line}", style=mark[1])


def _beside(shown: Row) -> Iterator[Text]:
    """Yield lines on what stands beside: the right answer, and what reward functions alone get."""
    if isinstance(shown, Document):
        return
    if isinstance(shown, Example | PromptOnly) and shown.right_answer is not None:
        yield Text(f"  answer, for rewards: {excerpt(gym.right_answer(shown.right_answer))}", "dim")
    for name, value in shown.columns.items():
        yield Text(f"  {name}, for reward functions alone: {excerpt(str(value))}", "dim")
