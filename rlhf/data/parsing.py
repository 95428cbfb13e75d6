"""Rows of TRL's dataset types, standard or conversational, as rows of ours (huggingface.co/docs/trl/dataset_formats).

    text                 {"text"}                                         -> Document
    messages             {"messages"}                                     -> Example; all answers, or the last one
    prompt_only          {"prompt", "answer"?}                            -> PromptOnly
    prompt_completion    {"prompt", "completion", "answer"?}              -> Example
    unpaired_preference  {"prompt", "completion", "label"}                -> Example that is judged by itself
    preference           {"prompt"?, "chosen", "rejected", "margin"?}     -> PreferencePair

`answer` is what a reward compares with. A pair of two conversations needs no prompt. A text under `system` is the
system message of a row without one. Whatever stands beside goes to reward functions, but for NOT_READ, which refuse the
row. A message has a role and a content; a further field with a value refuses its row, for an answer may depend on it.

Texts are kept as they are, but for one space before an answer and white space behind it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf.data.normal import normal_prompt, normalise, says_something
from rlhf.data.raw import Malformed
from rlhf.data.rows import Columns, Document, Example, LeftOut, Message, MessageRole, PreferencePair, PromptOnly, Row
from rlhf.errors import UserError
from rlhf.recipe.choices import RowType, Turns

COLUMNS: dict[RowType, tuple[str, ...]] = {  # that a row of the type must have; the first type that fits is taken
    "preference": ("chosen", "rejected"),
    "unpaired_preference": ("prompt", "completion", "label"),
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
    "text": ("text",),
    "prompt_only": ("prompt",),
}
READ = {"prompt", "system", "answer", "margin", "score_chosen", "score_rejected"}  # beside those of the type
NOT_READ = ("tools", "images", "image", "videos", "audio", "documents")  # of TRL's types and of chat templates
ROLES: dict[object, MessageRole] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
Prompt = tuple[Message, ...]


def parse_row(
    row: Mapping[str, Any], kind: RowType, source: str, labels: Mapping[str, bool] = LABELS, turns: Turns = "all"
) -> Row | LeftOut:
    """Return a row of a type, or why it is left out. `labels` are in lower case. Raises Malformed."""
    if lost := next((name for name in NOT_READ if has_value(row.get(name))), None):
        raise Malformed(f"'{lost}' is not read, and an answer may depend on it; take the row out, or {ignore(lost)}")
    lacking = (name for name in COLUMNS[kind] if name not in row or (name == "prompt" and not row[name]))
    if missing := next(lacking, None):
        raise Malformed(f"no '{missing}'; a row of type {kind} has {', '.join(COLUMNS[kind])}")
    if kind == "text":
        text = _text(row["text"] or "", "text")
        return Document(text, source) if says_something(text) else "empty"
    parsed = _parsed(row, kind, source, labels, turns)
    if isinstance(parsed, str):
        return parsed
    return replace(parsed, prompt=_with_system(parsed.prompt, row.get("system")), columns=beside(row, kind))


def beside(row: Mapping[str, Any], kind: RowType) -> Columns:
    """Return the columns that a type does not read and that have a value."""
    return {name: v for name, v in row.items() if name not in READ and name not in COLUMNS[kind] and has_value(v)}


def has_value(value: object) -> bool:
    """Return whether a cell holds something: neither null, NaN, an empty text nor an empty list or object."""
    return not (value is None or value in ("", [], {}) or (isinstance(value, float) and math.isnan(value)))


def ignore(name: str) -> str:
    """Return the setting that leaves a column, or a field of messages, out."""
    return f"--set data.ignore=[{name}]"


def _parsed(
    row: Mapping[str, Any], kind: RowType, source: str, labels: Mapping[str, bool], turns: Turns
) -> Example | PromptOnly | PreferencePair | LeftOut:
    prompt = prompt_of(row["prompt"]) if row.get("prompt") is not None else ()
    if kind == "prompt_only":
        if prompt[-1].role != "user" or not says_something(prompt[-1].content):
            raise Malformed("'prompt' does not end with a text of the user's")
        return PromptOnly(prompt, source, _right_answer(row))
    if kind == "preference":
        return _pair(row, prompt, source)
    said, answer = _answered(row, kind, prompt)
    good = _label(row["label"], labels) if kind == "unpaired_preference" else None
    first = 0 if kind == "messages" else len(prompt)
    turns_from = first if turns == "all" and any(m.role == "assistant" for m in said[first:]) else None
    if not says_something(answer):
        return "empty"
    return Example(said, answer, source, _right_answer(row), good, turns_from)


def _answered(row: Mapping[str, Any], kind: RowType, prompt: Prompt) -> tuple[Prompt, str]:
    """Return what is said before the last answer of a row, and that answer. Turns behind it teach nothing."""
    if kind != "messages":
        return _side(row, "completion", prompt)
    conversation = messages(row["messages"], "messages")
    while conversation and conversation[-1].role != "assistant":
        conversation = conversation[:-1]
    if not conversation:
        raise Malformed("'messages' has no assistant turn, which is the answer")
    return _side({"messages": conversation}, "messages", ())


def _pair(row: Mapping[str, Any], prompt: Prompt, source: str) -> PreferencePair | LeftOut:
    (said, chosen), (other, rejected) = (_side(row, key, prompt) for key in ("chosen", "rejected"))
    if normal_prompt(said) != normal_prompt(other):
        return "prompts_differ"
    if not (says_something(chosen) and says_something(rejected)):
        return "empty"
    if normalise(chosen) == normalise(rejected):
        return "identical"
    return PreferencePair(said, chosen, rejected, source, _margin(row))


def _side(row: Mapping[str, Any], key: str, prompt: Prompt) -> tuple[Prompt, str]:
    """Return what is said before an answer, and the answer: a text, messages after the prompt, or all of them."""
    value = "" if row[key] is None else row[key]  # a null answer is an empty one
    if isinstance(value, str):
        if not prompt:
            raise Malformed(f"'{key}' is text, and no 'prompt' is before it (transcripts: --set data.format=hh)")
        said, answer = prompt, _text(value, key).removeprefix(" ")
    else:
        *before, last = value if isinstance(value, tuple) else messages(value, key)
        if last.role != "assistant":
            raise Malformed(f"'{key}' ends with a {last.role} turn; the answer, an assistant turn, must come last")
        whole = bool(before) and before[0].role != "assistant"
        if whole and prompt and not _begins_with(before, prompt):
            raise Malformed(f"'{key}' is a conversation that does not begin with 'prompt'")
        said, answer = tuple(before) if whole else (*prompt, *before), last.content
    if not any(message.role == "user" and says_something(message.content) for message in said):
        raise Malformed(f"no user turn with text before the answer in '{key}'")
    return said, answer.rstrip()


def _begins_with(conversation: Sequence[Message], prompt: Prompt) -> bool:
    """Return whether a conversation begins with a prompt, whatever its spelling; a system message may be before."""
    turns, first = normal_prompt(conversation), normal_prompt(prompt)
    start = int(turns[0][0] == "system" != first[0][0])
    return turns[start : start + len(first)] == first


def _with_system(prompt: Prompt, beside: object) -> Prompt:
    """Return a prompt with the system message that stands beside it. Raises Malformed for two that differ."""
    if not has_value(beside):
        return prompt
    system = _text(beside, "system")
    if prompt[0].role != "system":
        return (Message("system", system), *prompt)
    if normalise(prompt[0].content) != normalise(system):
        raise Malformed("'system' differs from the system message of the conversation; keep one of them")
    return prompt


def prompt_of(value: object) -> Prompt:
    """Return the messages of a prompt: a text is what the user says. Raises Malformed."""
    return messages(value, "prompt") if isinstance(value, list) else (Message("user", _text(value, "prompt")),)


def parse_prompt(value: object, source: str) -> Prompt:
    """Return the messages of a prompt, a text or a list. Raises UserError."""
    try:
        return prompt_of(value)
    except Malformed as problem:
        raise UserError(f"{source}: {problem}") from None


def messages(value: object, key: str) -> Prompt:
    """Return a list of messages; `key` is its name in errors. Raises Malformed."""
    if not isinstance(value, list) or not value:
        kinds = "a list of messages with role and content" if key == "messages" else "text or a list of messages"
        raise Malformed(f"'{key}' is {type(value).__name__}; it must be {kinds}")
    return tuple(_message(message, f"{key}[{number}]", number) for number, message in enumerate(value, 1))


def _message(message: Any, place: str, number: int) -> Message:
    if not isinstance(message, dict):
        raise Malformed(f"'{place}' is {type(message).__name__}; a message is an object with role and content")
    role = ROLES.get(name := message.get("role")) if isinstance(message.get("role"), str) else None
    others = {field: value for field, value in message.items() if field not in ("role", "content")}
    if field := next((field for field, value in others.items() if has_value(value)), None):
        raise Malformed(f"'{place}.{field}' is not read, and an answer may depend on it; if none does: {ignore(field)}")
    if role is None or (role == "system" and number > 1):
        raise Malformed(f"'{place}' has the role {str(name)[:40]!r}; use {', '.join(map(str, ROLES))}, system first")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{place}.content[{n}]") for n, part in enumerate(content, 1))
    return Message(role, _text(content, f"{place}.content"))


def _part(part: Any, place: str) -> str:
    """Return the text of a part of a content. Raises Malformed for a picture, and for any other field with a value."""
    fields = {name: v for name, v in part.items() if has_value(v)} if isinstance(part, dict) else {"type": part}
    if fields.get("type", "text") != "text" or fields.keys() - {"type", "text"}:
        raise Malformed(f"'{place}' is more than a text part ({', '.join(map(str, fields))}); only text is trained on")
    return _text(fields.get("text", ""), place)


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"'{place}' is {'null' if value is None else type(value).__name__}; it must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed(f"'{place}' holds half a surrogate pair, which is no character; write it anew") from None
    return value


def _label(value: object, labels: Mapping[str, bool]) -> bool:
    said = str(value).strip()
    if (good := labels.get(said.lower())) is None:
        way_out = "say what its two words mean: --set data.labels.GOOD=true --set data.labels.BAD=false"
        raise Malformed(f"'label' is {said[:40]!r}, neither true nor false: {way_out}")
    return good


def _right_answer(row: Mapping[str, Any]) -> str | None:
    answer = row.get("answer")
    if isinstance(answer, float) and answer.is_integer():  # a table with an empty cell among whole numbers
        answer = int(answer)
    if not has_value(answer):
        return None
    text = _text(answer if isinstance(answer, str) else str(answer), "answer").strip()
    return text if says_something(text) else None


def _margin(row: Mapping[str, Any]) -> float | None:
    """Return by how much `chosen` was scored above `rejected`; None where no two numbers say so."""
    better, worse = _number(row.get("score_chosen")), _number(row.get("score_rejected"))
    return _number(row.get("margin")) if better is None or worse is None else better - worse


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
