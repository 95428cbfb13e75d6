"""Rows of data after reading: documents, examples, preference pairs, bare prompts."""

from dataclasses import dataclass, field
from typing import Literal

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
LeftOut = Literal["prompts_differ", "identical", "empty", "untrained"]
LEFT_OUT: dict[LeftOut, str] = {  # reasons why rows are left out, in words
    "prompts_differ": "prompts differ",
    "identical": "identical answers",
    "empty": "empty answer",
    "untrained": "no answer to train on",
}
