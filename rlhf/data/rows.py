"""Rows of data after reading: documents, examples, preference pairs, bare prompts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

MessageRole = Literal["system", "user", "assistant"]
Columns = Mapping[str, Any]  # what stands beside the columns of a row's type, for reward functions


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation."""

    role: MessageRole
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text to pretrain on."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the response to imitate; `right_answer` is what rewards compare a response with, where known.

    `good` is the label of a response that was judged by itself (KTO), None without one. A bad one is not imitated.
    `turns_from` is the index of the message in the prompt from which on the assistant's are imitated too.
    """

    prompt: tuple[Message, ...]
    response: str
    source: str
    right_answer: str | None = None
    good: bool | None = None
    turns_from: int | None = None
    columns: Columns = field(default_factory=dict, compare=False, repr=False)

    def earlier(self) -> list["Example"]:
        """Return the answers before the response that are imitated too, each after what was said before it."""
        start = len(self.prompt) if self.turns_from is None else self.turns_from
        return [
            Example(self.prompt[:i], message.content.rstrip(), self.source)
            for i, message in enumerate(self.prompt)
            if i >= start and message.role == "assistant" and message.content.strip()
            if any(said.role == "user" for said in self.prompt[:i])
        ]


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
    columns: Columns = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PromptOnly:
    """A prompt to sample responses to; `right_answer` is what rewards compare them with, where there is one."""

    prompt: tuple[Message, ...]
    source: str
    right_answer: str | None = None
    columns: Columns = field(default_factory=dict, compare=False, repr=False)


Row = Document | Example | PreferencePair | PromptOnly
KINDS: tuple[type[Row], ...] = (Document, Example, PreferencePair, PromptOnly)  # rows of all kinds stand in this order
RowT = TypeVar("RowT", bound=Row)


def of_kind(rows: Iterable[Row], kind: type[RowT]) -> list[RowT]:
    """Return the rows of one kind, in their order."""
    return [row for row in rows if isinstance(row, kind)]


def responses(row: Row) -> tuple[str, ...]:
    """Return the responses of a row: both of a pair, that of an example, () for other rows."""
    if isinstance(row, PreferencePair):
        return row.chosen, row.rejected
    return (row.response,) if isinstance(row, Example) else ()


def texts(row: Row) -> tuple[str, ...]:
    """Return every text of a row, message by message."""
    return (row.text,) if isinstance(row, Document) else (*(said.content for said in row.prompt), *responses(row))


LeftOut = Literal["malformed", "prompts_differ", "identical", "empty", "not_made", "template"]
LEFT_OUT: dict[LeftOut, str] = {  # reasons why rows are left out, in words
    "malformed": "malformed",
    "prompts_differ": "prompts differ",
    "identical": "identical answers",
    "empty": "empty answer",
    "not_made": "no row made of it, such as a tie",
    "template": "cannot be trained as written",
}
