"""Dialogues as one text, in the style of Anthropic's HH data: `\\n\\nHuman: ...\\n\\nAssistant: ...`."""

import re
from collections.abc import Sequence

from rlhf.data.rows import Message, MessageRole

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_LINE_END = re.compile("\r\n|[\r\x85\u2028\u2029]")
_ROLE_OF_SPEAKER: dict[str, MessageRole] = {"Human": "user", "Assistant": "assistant"}
_SPEAKER_OF_ROLE = {role: speaker for speaker, role in _ROLE_OF_SPEAKER.items()}


def parse_hh(text: str) -> tuple[Message, ...]:
    """Return the turns of a transcript.

    Text before the first turn is a system message; a text without turns is a system message as a whole.
    Line ends of other systems become those of Unix, in front of turns and within them.
    """
    lead, *parts = _TURN.split(unix(text))
    messages = [Message("system", lead)] if lead.strip() else []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        messages.append(Message(_ROLE_OF_SPEAKER[speaker], content.removeprefix(" ")))
    return tuple(messages)


def unix(text: str) -> str:
    """Return a text whose line ends are those of Unix."""
    return text if text.isascii() and "\r" not in text else _LINE_END.sub("\n", text)


def render_hh(messages: Sequence[Message]) -> str:
    """Return a prompt as a transcript that ends where the assistant answers: `...\\n\\nHuman: Hello\\n\\nAssistant:`.

    `parse_hh` gives the same messages back, plus an empty assistant turn, as long as no content holds a turn marker
    itself. The response follows after one space. Raises ValueError when a system message is not the first.
    """
    text = ""
    for position, message in enumerate(messages):
        if message.role != "system":
            text += f"\n\n{_SPEAKER_OF_ROLE[message.role]}: {message.content}"
        elif position == 0:
            text = message.content
        else:
            raise ValueError(f"message {position + 1} of the prompt is a system message; only the first can be one")
    return text + "\n\nAssistant:"


# The text of `render_hh` as a chat template, for chat interfaces to a trained model: servers, transformers' pipelines.
# GAP is '' or ' ': `write_chat_template` (rlhf/data/tokenize.py) chooses the one that yields the training ids.
HH_CHAT_TEMPLATE = (
    "{{ (bos_token or '') + GAP }}{% for m in messages %}"
    "{% if m.role != 'system' %}{{ '\\n\\n' + ('Human' if m.role == 'user' else 'Assistant') + ': ' + m.content }}"
    "{% elif loop.first %}{{ m.content }}"
    "{% else %}{{ raise_exception('only the first message can be a system message') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
