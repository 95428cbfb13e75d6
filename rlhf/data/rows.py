"""Rows of data after reading: documents, examples, preference pairs, bare prompts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

MessageRole = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation. An answer that the row gives no weight is not `trained`: it is context alone."""

    role: MessageRole
    content: str
    trained: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text to pretrain on."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the response to imitate; `right_answer` is what rewards compare a response with, where known.

    `good` is the label of a response that was judged by itself (KTO), None without one. A bad one is not imitated.
    """

    prompt: tuple[Message, ...]
    response: str
    source: str
    right_answer: str | None = None
    good: bool | None = None


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two responses to one prompt; people preferred `chosen`.

    `margin` is by how much `chosen` was scored above `rejected`, where that is known.
    """

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    source: str
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class PromptOnly:
    """A prompt to sample responses to; `right_answer` is what rewards compare them with, where there is one."""

    prompt: tuple[Message, ...]
    source: str
    right_answer: str | None = None


Row = Document | Example | PreferencePair | PromptOnly
KINDS: tuple[type[Row], ...] = (Document, Example, PreferencePair, PromptOnly)  # rows of all kinds stand in this order
RowT = TypeVar("RowT", bound=Row)


def of_kind(rows: Iterable[Row], kind: type[RowT]) -> list[RowT]:
    """Return the rows of one kind, in their order."""
    return [row for row in rows if isinstance(row, kind)]


LeftOut = Literal["prompts_differ", "identical", "empty", "untrained"]
LEFT_OUT: dict[LeftOut, str] = {  # reasons why rows are left out, in words
    "prompts_differ": "prompts differ",
    "identical": "identical answers",
    "empty": "empty answer",
    "untrained": "no answer to train on",
}
