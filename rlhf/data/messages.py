"""Messages of conversations as files hold them.

A field of a message is used, or it is known to be without influence (rlhf/data/fields.py), or it refuses the row: an
answer may depend on it, and a model would learn to give that answer without it.
"""

import itertools
import re
from collections.abc import Iterable, Mapping

from rlhf.data.fields import (
    MESSAGE,
    NO_FACTS,
    Field,
    FileFacts,
    Unread,
    boolean,
    fields_of_messages,
    has_value,
    is_free,
    switches_training,
)
from rlhf.data.raw import Malformed
from rlhf.data.rows import Message, MessageRole

_TOOL_FIELDS = ("tool_calls", "function_call")
_TOOL_ROLES = ("tool", "function", "function_call", "tool_call", "tool_response", "observation", "ipython")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")
_ROLES: dict[object, MessageRole] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    "model": "assistant",
}
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])(?:role|content|from|value)\1\s*:.*\}\s*\]\s*""", re.DOTALL)
_TYPES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def read_messages(values: list[object], key: str) -> tuple[Message, ...]:
    """Return a list of messages with known roles; `key` is its name in errors. Raises Malformed."""
    return tuple(_message(value, f"{key}[{number}]", number) for number, value in enumerate(values, 1))


def _message(value: object, place: str, number: int) -> Message:
    """Return the message that stands at a place of a row. Raises Malformed."""
    if not isinstance(value, dict):
        raise Malformed(f"'{place}' is {type_name(value)}; a message is an object with role and content")
    fields = {name: content for name, content in value.items() if content is not None}  # Parquet fills nulls in
    role_key = "role" if "role" in fields else "from"
    content_key = "content" if "content" in fields else "value"
    name = fields.get(role_key)
    is_tool = isinstance(name, str) and name in _TOOL_ROLES
    if is_tool or any(fields.get(field) for field in _TOOL_FIELDS):
        what = "is a tool's turn" if is_tool else "has tool calls"
        raise Malformed(f"'{place}' {what}; tool calls and tool turns are not trained on: take the row out")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise Malformed(f"'{place}' has the role {str(name)[:40]!r}; known are {', '.join(map(str, _ROLES))}")
    if role == "system" and number > 1:
        raise Malformed(f"'{place}' is a system message; only the first can be one")
    reasoning = next((field for field in _REASONING_FIELDS if has_value(fields.get(field))), None)
    if reasoning is not None:
        raise Malformed(
            f"'{place}.{reasoning}' would be lost; write it into the content as <think>…</think>, or take it out"
        )
    flags = trained_flags(fields, f"{place}.")
    marked = next((field for field, trained in flags.items() if trained), None)
    if role != "assistant" and marked:
        raise Malformed(
            f"'{place}.{marked}' asks to train on a {role} turn; only answers of the assistant are trained on"
        )
    return Message(role, content_text(fields.get(content_key), f"{place}.content"), all(flags.values()))


def content_text(value: object, place: str) -> str:
    """Return the content of a message: text, or a list of text parts, which are joined. Raises Malformed."""
    if not isinstance(value, list):
        return text(value, place)
    return "".join(_part_text(part, f"{place}[{number}]") for number, part in enumerate(value, 1))


def _part_text(part: object, place: str) -> str:
    """Return the text of one part of a content. Raises Malformed for any other part."""
    if isinstance(part, str):
        return text(part, place)
    if not isinstance(part, dict):
        raise Malformed(f"'{place}' is {type_name(part)}; a part of a content is text, or an object with type and text")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise Malformed(f"'{place}' is a part of type {str(kind)[:40]!r}; only text can be trained on")
    others = ((name, value) for name, value in part.items() if name not in ("type", "text") and has_value(value))
    unknown = next((name for name, value in others if not is_free(name, value)), None)
    if unknown is not None:
        raise Malformed(f"'{place}.{unknown[:40]}' is not used in training; take it out")
    return text(part.get("text"), f"{place}.text")


def trained_flags(fields: Mapping[str, object], prefix: str = "") -> dict[str, bool]:
    """Return the fields of a message or a row that say whether it is trained on. Raises Malformed unless 0 or 1.

    null says nothing, and beside a row neither does an empty cell.
    """
    named = {name: value for name, value in fields.items() if switches_training(name)}
    named = {name: value for name, value in named.items() if value is not None and (prefix or has_value(value))}
    flags = {name: boolean(value) for name, value in named.items()}
    for name, trained in flags.items():
        if trained is None:
            raise Malformed(
                f"'{prefix}{name}' is {str(named[name])[:40]!r}; it must be 0 (context only) or 1 (trained on), or be "
                f"listed in data.ignore (--ignore {name})"
            )
    return {name: bool(trained) for name, trained in flags.items()}


def unread_fields(messages: object, column: str, facts: FileFacts = NO_FACTS) -> Unread:
    """Return the fields of messages that no stage reads.

    Ids, times and the like are neither refused nor named. A field of 0 or 1, or of true or false, may switch training
    off and is refused also where it is constant.
    """
    unread = Unread([], [])
    for place, name, value in fields_of_messages(messages, column):
        own = name.removeprefix(MESSAGE).partition(".")[0]
        if is_free(name, value, facts) or switches_training(own):
            continue
        if facts.is_constant(name, value):
            unread.named.append(own)
        else:
            unread.refused.append(Field(place, own, value))
    return unread


def text(value: object, name: str) -> str:
    """Return a value that is text which UTF-8 can express. Raises Malformed for any other; `name` is its key."""
    if not isinstance(value, str):
        raise Malformed(f"'{name}' is {type_name(value)}; it must be text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Malformed(f"'{name}' holds half a surrogate pair at character {error.start}") from None
    return value


def spoken_text(value: object, name: str) -> str:
    """Return a value that is text, and no list of messages as a cell of a table holds it. Raises Malformed."""
    content = text(value, name)
    if _MESSAGES_AS_TEXT.fullmatch(content):
        raise Malformed(
            f"'{name}' is a list of messages written as text, as CSV files hold lists: write the rows as JSON lines or "
            "Parquet, which keep lists"
        )
    return content


def type_name(value: object) -> str:
    """Return the type of a value in words, for a message."""
    return _TYPES.get(type(value), type(value).__name__)


def quoted_keys(keys: Iterable[str]) -> str:
    """Return the first few keys, shortened, for a message; a damaged row may have many long keys."""
    quoted = [repr(key[:40]) for key in itertools.islice(keys, 8)]
    return ", ".join(quoted) or "no keys"
