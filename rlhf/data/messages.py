"""Messages of conversations as files hold them, and every field of a row or a message that is not text to train on.

A field is used, or it is known to be without influence (`is_inert`), or it refuses the row: an answer may depend on it,
and a model would learn to give that answer without it.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from rlhf.data.raw import Malformed
from rlhf.data.rows import Message, MessageRole

INERT = re.compile(  # ids, origins, kinds, times, people and models, counts, judgements that a label expresses already
    r"(.*_)?(id|uid|uuid|idx|index|hash|source|origin|dataset|subset|split|from|url|category|domain|task|type|topic|tag"
    r"|lang|language|licen[cs]e|version|date|time|timestamp|created|created_at|updated_at|model|annotator|author"
    r"|turns|tokens|length|count|score|rating|rank|reward|margin|n|difficulty|quality|metadata|meta)s?"
    r"(_(chosen|rejected|prompt|response|completion|[ab]|\d+))?"
)
TRAINED_FLAGS = ("weight", "train", "training", "loss", "loss_mask")  # 0 or false: context, never a target
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
}
_FLAGS: dict[object, bool] = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True}
_TYPES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


class Turn(NamedTuple):
    """A message, and whether the file allows an answer in it to be trained on."""

    message: Message
    trained: bool = True


def read_turns(values: list[object], key: str) -> tuple[Turn, ...]:
    """Return a list of messages with known roles; `key` is its name in errors. Raises Malformed."""
    return tuple(_turn(value, f"{key}[{number}]", number) for number, value in enumerate(values, 1))


def _turn(value: object, place: str, number: int) -> Turn:
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
    flags = {field: flag(fields[field], f"{place}.{field}") for field in TRAINED_FLAGS if field in fields}
    marked = next((field for field, trained in flags.items() if trained), None)
    if role != "assistant" and marked:
        raise Malformed(
            f"'{place}.{marked}' asks to train on a {role} turn; only answers of the assistant are trained on"
        )
    unknown = first_unknown(fields, (role_key, content_key, *TRAINED_FLAGS))
    if unknown is not None:
        raise Malformed(f"'{place}.{unknown[:40]}' is not used in training; take it out if the answer does not need it")
    return Turn(Message(role, content_text(fields.get(content_key), f"{place}.content")), all(flags.values()))


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
    unknown = first_unknown(part, ("type", "text"))
    if unknown is not None:
        raise Malformed(f"'{place}.{unknown[:40]}' is not used in training; take it out")
    return text(part.get("text"), f"{place}.text")


def flag(value: object, place: str) -> bool:
    """Return whether a weight or flag says that something is trained on. Raises Malformed unless it is 0 or 1."""
    key = value.strip().lower() if isinstance(value, str) else value
    if not isinstance(key, str | bool | int | float) or key not in _FLAGS:
        raise Malformed(f"'{place}' is {str(value)[:40]!r}; it must be 0 (context only) or 1 (trained on)")
    return _FLAGS[key]


def first_unknown(fields: Mapping[str, object], known: Collection[str]) -> str | None:
    """Return the first field with a value that is neither known nor without influence; None if there is none."""
    others = (name for name, value in fields.items() if name not in known and has_value(value))
    return next((name for name in others if not is_inert(name)), None)


def has_value(value: object) -> bool:
    """Return whether a field says anything; null, NaN, false, and an empty text, list or object do not."""
    if isinstance(value, float) and math.isnan(value):
        return False
    return bool(value.strip()) if isinstance(value, str) else value is not False and value not in (None, [], {})


def is_inert(name: str) -> bool:
    """Return whether the name of a field says that no answer depends on it: an id, an origin, a score."""
    return INERT.fullmatch(name.lower()) is not None


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


def type_name(value: object) -> str:
    """Return the type of a value in words, for a message."""
    return _TYPES.get(type(value), type(value).__name__)


def quoted_keys(keys: Iterable[str]) -> str:
    """Return the first few keys, shortened, for a message; a damaged row may have many long keys."""
    quoted = [repr(key[:40]) for key in itertools.islice(keys, 8)]
    return ", ".join(quoted) or "no keys"
