"""Held-out splits and shuffles that depend on a seed alone.

A row's side follows from its own conversation and the seed, not from its place in the file or from the other rows:
adding, removing or re-ordering rows moves no row to the other side. Rows that share a prompt, or that show one
conversation at different depths, share a key and therefore a side.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from rlhf.data.normal import normalise, says_something
from rlhf.data.rows import Document, Message, Row, RowT
from rlhf.data.transcripts import parse_hh

T = TypeVar("T")
Part = Literal["train", "validation", "test"]


def is_heldout(key: str, seed: int, fraction: float) -> bool:
    """Return whether `key` is among the held-out `fraction` of all keys.

    The first 8 bytes of a SHA-256 decide: read as a number in [0, 1), those of a held-out key are below `fraction`. A
    larger fraction holds out a superset.
    """
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction


def part(key: str, seed: int, heldout_fraction: float, validation_fraction: float = 0.0) -> Part:
    """Return the part of the data to which `key` belongs.

    The validation rows are the `validation_fraction` of all keys that come first among the held-out ones; the test rows
    are the other held-out ones. Another validation_fraction moves nothing in or out of the training rows.
    """
    if not is_heldout(key, seed, heldout_fraction):
        return "train"
    return "validation" if is_heldout(key, seed, validation_fraction) else "test"


def conversation_key(prompt: Sequence[Message]) -> str:
    """Return the user's first message in its normal form.

    Transcripts that start with the same message are mostly one conversation cut at different depths, so the start
    decides. Raises ValueError when no user message holds text; the readers admit no such prompt.
    """
    for message in prompt:
        if message.role == "user" and says_something(message.content):
            return normalise(message.content)
    raise ValueError("a prompt without a user message has no conversation key")


def document_key(document: Document) -> str:
    """Return the conversation key of a transcript, and of any other text its normal form.

    A transcript thereby keeps the side of its pairs.
    """
    try:
        return conversation_key(parse_hh(document.text))
    except ValueError:
        return normalise(document.text)


def row_key(row: Row) -> str:
    """Return the key that decides on which side of the split a row is."""
    return document_key(row) if isinstance(row, Document) else conversation_key(row.prompt)


def divide(rows: Iterable[RowT], *, seed: int, fraction: float) -> tuple[list[RowT], list[RowT]]:
    """Return train and held-out rows, each in the order given. No key is on both sides."""
    sides: tuple[list[RowT], list[RowT]] = ([], [])
    for row in rows:
        sides[is_heldout(row_key(row), seed, fraction)].append(row)
    return sides


def shuffled(rows: Iterable[T], seed: int) -> list[T]:
    """Return all rows in an order that depends on the seed and on their number alone."""
    result = list(rows)
    random.Random(f"shuffle:{seed}").shuffle(result)
    return result
