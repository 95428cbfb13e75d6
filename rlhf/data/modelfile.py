"""A Modelfile for Ollama: a chat template in Go's syntax, stop words and sampling settings.

Ollama writes conversations by a template of its own. A model sees the tokens of training only if that one writes what
the chat template does. The chat template is a program in Jinja and is not translated. It writes a few conversations,
and the text between two messages is kept by their roles. Where longer conversations show that this text depends on more
than the two roles, no Modelfile is made.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rlhf.data.chat_template import WORD
from rlhf.data.rows import Message, MessageRole
from rlhf.data.tokenize import TURNS, DialogueTokenizer, chat_text
from rlhf.errors import UserError

Between = dict[tuple[str, str], str]  # what stands between messages of two roles
START = END = ""  # in place of a role: no message is before the first one, none behind the last
TURN: tuple[MessageRole, MessageRole] = ("assistant", "user")
CONVERSATIONS: tuple[tuple[MessageRole, ...], ...] = (("user",), ("user", *TURN), ("user", *TURN, *TURN, *TURN))
MODELFILE, GGUF = "Modelfile", "model.gguf"  # names; one lies beside the other


def modelfile(tokenizer: DialogueTokenizer, sampling: Mapping[str, float]) -> str:
    """Return the Modelfile of a model with this tokenizer, whose chat template is written already, and sampling.

    Comments in it say what Ollama does otherwise than the chat template. Raises UserError for a chat template that Go's
    syntax cannot follow.
    """
    found, notes = between(tokenizer)
    notes += [f"{what} differs from the chat template's" for what in _rewritten(tokenizer, found)]
    stops = [tokenizer.hf.eos_token, *TURNS[:1]] if tokenizer.template == "hh" else [tokenizer.hf.eos_token]
    settings = {**sampling, "min_p": 0, "repeat_penalty": 1}  # Ollama's own are not neutral
    lines = [
        *(f"# {note}" for note in notes),
        f"FROM ./{GGUF}",
        f'TEMPLATE """{go_template(found)}"""',
        *(f'PARAMETER stop """{stop}"""' for stop in stops),
        *(f"PARAMETER {name} {value}" for name, value in settings.items()),
    ]
    return "\n".join(lines) + "\n"


def between(tokenizer: DialogueTokenizer) -> tuple[Between, list[str]]:
    """Return the text between messages, and what of it had to be left out, as sentences.

    A program that tokenizes it with the special tokens that the tokenizer adds, as llama.cpp does, has the ids of
    training. Raises UserError.
    """
    found = _read(tokenizer, CONVERSATIONS, {})
    try:
        return _read(tokenizer, [("system", *roles) for roles in CONVERSATIONS], found), []
    except UserError as error:
        return found, [f"System messages are left out: {error}"]


def text_of(found: Between, messages: Sequence[Message]) -> str:
    """Return a conversation that ends with a user's message, up to where the answer begins."""
    roles = (START, *(message.role for message in messages), END)
    texts = [found[pair] for pair in pairwise(roles)]
    return "".join(text + content for text, content in zip(texts, [*(m.content for m in messages), ""], strict=True))


def go_template(found: Between) -> str:
    """Return a template of Ollama that writes the text between messages, and their contents."""
    roles = sorted({role for _, role in found} - {END})
    known = " ".join(map(_quoted, roles))
    return "\n".join(
        [
            '{{- $before := "" }}',
            "{{- range .Messages }}",
            *(
                f"{{{{- if and (eq $before {_quoted(before)}) (eq .Role {_quoted(role)}) }}}}"
                f"{{{{ {_quoted(text)} }}}}{{{{ end }}}}"
                for (before, role), text in found.items()
                if text and role != END
            ),
            f"{{{{- if eq .Role {known} }}}}{{{{ .Content }}}}{{{{ $before = .Role }}}}{{{{ end }}}}",
            "{{- end }}",
            f'{{{{- if eq $before "user" }}}}{{{{ {_quoted(found["user", END])} }}}}{{{{ end }}}}',
        ]
    )


def _quoted(text: str) -> str:
    """Return a text as a string of Go that is printable ASCII: Ollama drops other signs from a Modelfile."""
    return re.sub(r"[^\x00-\x7e]", lambda sign: f"\\U{ord(sign[0]):08x}", json.dumps(text, ensure_ascii=False))


def _read(
    tokenizer: DialogueTokenizer, conversations: Sequence[Sequence[MessageRole]], known: Mapping[tuple[str, str], str]
) -> Between:
    """Return what a chat template writes between the messages of conversations, which agree with what is `known`.

    Raises UserError where it depends on more than the roles of two messages.
    """
    found = {**known}
    for roles in conversations:
        contents = [f"{WORD}{number}" for number in range(len(roles))]
        messages = [Message(role, content) for role, content in zip(roles, contents, strict=True)]
        text = _typed(tokenizer, chat_text(tokenizer.hf, messages, add_generation_prompt=True))
        if re.findall("|".join(contents), text) != contents:
            raise UserError("the chat template does not write each message once and in order")
        for pair, part in zip(pairwise((START, *roles, END)), re.split("|".join(contents), text), strict=True):
            if found.setdefault(pair, part) != part:
                where = f"a message of {pair[0]}" if pair[0] else "a conversation's first message"
                raise UserError(f"what the chat template writes behind {where} depends on more than the two roles")
    return found


def _typed(tokenizer: DialogueTokenizer, text: str) -> str:
    """Return the text that a tokenizer turns into the ids of `text` when it adds its own special tokens.

    It then adds BOS and, behind it, SentencePiece's space. tokenizers adds no second space, llama.cpp does: so of
    several texts the shortest. Raises UserError where none is known.
    """
    ids = tokenizer.hf(text, add_special_tokens=False)["input_ids"]
    without_bos = text.removeprefix(str(tokenizer.hf.bos_token or ""))
    for candidate in (without_bos.removeprefix(" "), without_bos, text):
        if tokenizer.hf(candidate)["input_ids"] == ids:
            return candidate
    raise UserError("the tokenizer adds special tokens that the chat template does not write")


def _rewritten(tokenizer: DialogueTokenizer, found: Between) -> list[str]:
    """Return the kinds of messages that a chat template does not write as they are."""
    opened, closed = tokenizer.reasoning.opened, tokenizer.reasoning.closed
    kinds = {"White space around messages": f" {WORD}\n"}
    if closed is not None:
        kinds["Reasoning in earlier answers"] = f"{opened}\n{WORD}\n{closed}\n\n{WORD}"
    rewritten = []
    for kind, content in kinds.items():
        messages = (Message("user", content), Message("assistant", content), Message("user", content))
        text = _typed(tokenizer, chat_text(tokenizer.hf, messages, add_generation_prompt=True))
        rewritten += [kind] if text != text_of(found, messages) else []
    return rewritten
