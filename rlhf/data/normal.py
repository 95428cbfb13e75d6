"""The normal form of texts: two spellings of one text have the same. It is compared, and never trained on."""

import re
import unicodedata
from collections.abc import Hashable, Sequence
from decimal import Decimal

from rlhf.data.rows import Message

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def normalise(text: str) -> str:
    """Return a text in Unicode's form NFC, each run of white space as one space, none at its ends.

    Line ends of any kind and no-break spaces are white space.
    """
    return " ".join((text if text.isascii() else unicodedata.normalize("NFC", text)).split())


def normal_answer(right_answer: str) -> Hashable:
    """Return what is equal for spellings of one right answer: the value of a number (10, 10.0, 1e1), or the text."""
    text = normalise(right_answer)
    return Decimal(text) if _NUMBER.fullmatch(text) else text


def normal_prompt(prompt: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """Return the roles and the normal texts of a prompt."""
    return tuple((message.role, normalise(message.content)) for message in prompt)
