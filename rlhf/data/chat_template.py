"""A tokenizer's own chat template, which is a program in a file and is tried before use."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from rlhf.data.rows import Message
from rlhf.errors import UserError

WORD = "quokka"
CLOCK = "strftime_now"  # the function by which templates write today's date; a recipe may set what it returns
PROBES = (
    (Message("user", f"What is a {WORD}?"),),
    (Message("user", "Hello."), Message("assistant", "Hello."), Message("user", f"What is a {WORD}?")),
)

EXCHANGE = (Message("user", WORD), Message("assistant", WORD), Message("user", WORD))
WITH_SYSTEM = (Message("system", WORD), *EXCHANGE)
# How the marks of most published templates look, and nothing else: <|user|>, <｜User｜>, <|turn>, <turn|>, [|user|]
MARK_SHAPE = re.compile(r"<[|｜][^\s<>|｜]*\w[^\s<>|｜]*[|｜]?>|<[^\s<>|｜/]{2,}[|｜]>|\[\|[A-Za-z]{3,}\|\]")
BRACKETED = re.compile(r"(?<!\S)[<\[{|]\S*\w\S*[>\]}|](?!\S)")  # a word such as [INST] or <|user|>


def with_settings(template: str, variables: Mapping[str, object], system_prompt: str | None) -> str:
    """Return a chat template in which variables have given values and conversations have a system message.

    `variables` are what `apply_chat_template` would pass on, such as `enable_thinking`; that of CLOCK is the date that
    the template writes. A conversation that begins with a system message keeps it. Since the template itself says so, a
    server that uses it renders what training did.
    """
    lines = [_setting(name, json.dumps(value, ensure_ascii=False)) for name, value in variables.items()]
    if system_prompt is not None:
        message = json.dumps({"role": "system", "content": system_prompt}, ensure_ascii=False)
        lines.append(
            "{%- if not messages or messages[0]['role'] != 'system' %}"
            f"{{%- set messages = [{message}] + messages %}}"
            "{%- endif %}"
        )
    # Jinja drops the line break behind a tag here, and with it what a template may begin with.
    return "".join([*lines, "\n", template]) if lines else template


def _setting(name: str, value: str) -> str:
    """Return the tag that gives a variable a value, written as JSON; CLOCK is a function, which returns it."""
    if name == CLOCK:
        return f"{{%- macro {name}(format) %}}{{{{ {value} }}}}{{%- endmacro %}}"
    return f"{{%- set {name} = {value} %}}"


def check(render: Callable[[Sequence[Message]], str]) -> None:
    """Raise UserError for a template that fails on two short conversations, or leaves out what was said in them.

    `render` is the function that later renders real conversations, in jinja's sandbox.
    """
    try:
        texts = [render(messages) for messages in PROBES]
    except UserError as error:
        raise UserError(f"{error}; use tokenizer.template: hh") from None
    if not all(WORD in text for text in texts):
        raise UserError("the tokenizer's chat template leaves out a message; use tokenizer.template: hh")


def is_mark(token: str, written: str) -> bool:
    """Return whether an added token marks something: by its look, or because the template, or what it writes, has it.

    One of letters and digits alone, or of signs alone, is none: it may be a word, an indentation or a full stop.
    """
    return bool(
        MARK_SHAPE.fullmatch(token) or (token in written and re.search(r"\w", token) and re.search(r"[^\w\s]", token))
    )


def written(render: Callable[[Sequence[Message]], str]) -> list[str]:
    """Return what a checked template writes of short conversations, with a system message where it takes one."""
    texts = []
    for conversation in (EXCHANGE, WITH_SYSTEM):
        with suppress(UserError):
            texts.append(render(conversation))
    return texts


def turn_marks(render: Callable[[Sequence[Message]], str], known: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of the plain text by which a checked template marks turns: `[INST]`, `<|user|>`, `USER:`.

    Marks are the lines that it writes between messages and after them, of letters or digits with other signs. One that
    begins a line there counts only where it begins a line. Words in brackets count everywhere, also where they are
    written before the first message: other text there may be a system prompt. `known` are tokens that need no mark.
    """
    marks: dict[str, None] = {}
    for text in written(render):
        for token in sorted(known, key=len, reverse=True):
            text = text.replace(token, " ")
        first, *others = text.split(WORD)
        brackets = [re.escape(word) for part in (first, *others) for word in BRACKETED.findall(part)]
        lines = [mark for part in others for mark in _marking_lines(part)]
        marks |= dict.fromkeys([*brackets, *lines])
    return re.compile("|".join(marks) or r"(?!)", re.MULTILINE)


def _marking_lines(part: str) -> list[str]:
    """Return a pattern of each line between two messages that can be told from words and from mere punctuation."""
    lines = [(index, line.strip()) for index, line in enumerate(part.split("\n"))]
    marking = [(index, line) for index, line in lines if re.search(r"\w", line) and not line.isalnum()]
    return [(r"^[ \t]*" if index else r"(?<!\w)") + re.escape(line) for index, line in marking]
