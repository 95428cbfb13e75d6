"""Messages of conversations as files hold them, and every field of a row or a message that is not text to train on.

A field is used, or it is known to be without influence (`is_inert`), or it refuses the row: an answer may depend on it,
and a model would learn to give that answer without it.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping

from rlhf.data.raw import Malformed
from rlhf.data.rows import Message, MessageRole

_SUFFIX = r"s?(_(chosen|rejected|prompt|response|completion|[ab]|\d+))?"
_OWN = (  # of a message or a part: ids, times, people and models, counts, judgements
    r"id|uid|uuid|idx|index|hash|date|time|timestamp|created|created_at|updated_at|model|annotator|author|lang|language"
    r"|n|tokens|length|count|score|rating|rank|reward|margin|quality"
)
INERT_OF_MESSAGE = re.compile(rf"(.*_)?({_OWN}){_SUFFIX}")
INERT = re.compile(  # of a row: origins and kinds too
    rf"(.*_)?({_OWN}|source|origin|dataset|subset|split|from|url|category|domain|task|type|topic|tag|licen[cs]e|version"
    rf"|turns|level|difficulty|metadata|meta){_SUFFIX}"
)
_INDEX = re.compile(r"(?:unnamed:_\d+(?:_\d+)?)?|__index_level_\d+__")  # as pandas writes it beside its columns
MATTERS = re.compile("image|picture|audio|video|document|passage|context|history|previous|tool")
LABEL = 100  # most characters of a text with spaces that still is a name or a label, and no text to answer
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
    "developer": "system",
    "model": "assistant",
}
_FLAGS: dict[object, bool] = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True}
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
    flags = {field: flag(fields[field], f"{place}.{field}") for field in TRAINED_FLAGS if field in fields}
    marked = next((field for field, trained in flags.items() if trained), None)
    if role != "assistant" and marked:
        raise Malformed(
            f"'{place}.{marked}' asks to train on a {role} turn; only answers of the assistant are trained on"
        )
    unknown = first_unknown(fields, (role_key, content_key, *TRAINED_FLAGS))
    if unknown is not None:
        raise Malformed(f"'{place}.{unknown[:40]}' is not used in training; take it out if the answer does not need it")
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
    """Return the first field of a message with a value that is neither known nor without influence; None without one.

    false is no value there: it says that something was not done with the message.
    """
    others = (name for name, value in fields.items() if name not in known and value is not False and has_value(value))
    return next((name for name in others if not is_inert(name, fields[name], INERT_OF_MESSAGE)), None)


def has_value(value: object) -> bool:
    """Return whether a field says anything; null, NaN, and an empty text, list or object do not."""
    if isinstance(value, float) and math.isnan(value):
        return False
    return bool(value.strip()) if isinstance(value, str) else value is False or value not in (None, [], {})


def is_inert(name: str, value: object, names: re.Pattern[str] = INERT) -> bool:
    """Return whether a field says nothing that an answer depends on, by its name: an id, an origin, a score.

    Its value must be a label too: a number, a short text, or a list of them; metadata and ratings may be anything.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]", "_", name).lower()
    if _INDEX.fullmatch(name):
        return str(value).isdecimal()
    if not names.fullmatch(name) or MATTERS.search(name):
        return False
    return name.endswith(("metadata", "meta", "ratings")) or _is_label(value)


def _is_label(value: object) -> bool:
    """Return whether a value is a name, a number, or a list of them; an object may hold numbers only."""
    if isinstance(value, list):
        return all(map(_is_label, value))
    if isinstance(value, dict):
        return all(isinstance(number, int | float | None) for number in value.values())
    return (
        not isinstance(value, str)
        or not re.search(r"\s", value.strip())
        or (len(value) <= LABEL and "\n" not in value.strip())
    )


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
