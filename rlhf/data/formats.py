"""Readers: data files and hub sets in; documents, examples, preference pairs and bare prompts out.

Eight kinds of rows are known. The first row of a file decides its kind, unless the caller names one:

    text          {"text"}                                  -> Document
    hh            {"chosen", "rejected"}: two transcripts   -> PreferencePair
    instruction   {"instruction", "input"?, "output"}       -> Example
    preference    {"prompt", "chosen", "rejected"}: text or lists of messages; lists that hold the whole
                  conversation need no prompt               -> PreferencePair
    completion    {"prompt", "completion" or "response", "answer"?}: text or lists of messages; the answer as below
                                                            -> Example
    question      {"question", "answer"}: text, a worked answer; rewards compare responses with the same answer
                                                            -> Example
    messages      {"messages"} as OpenAI and TRL have it, or {"conversations"} as ShareGPT has it: the last turn is the
                  response, the turns before it are the prompt
                                                            -> Example
    prompt        {"prompt", "answer"?}: text, a transcript or a list of messages that ends with the user's; the answer,
                  text or a number, is what a reward compares responses with
                                                            -> PromptOnly

Other keys are ignored. Only of a prompt or a question with another text beside it, which may be an answer under an
unknown name or a passage to read, the caller must name the kind. Each row out carries its source: `file:line`, or
`file:row N` where rows are not lines.

Texts are kept as they stand, with two exceptions: the one space that a transcript puts after `Human:` or `Assistant:`
(and some sets put before a response of plain text) is dropped, and so is white space at the end of a response.

Whatever cannot be used is a `DataError` of one line. A bad row may be skipped instead, and is then listed in the
report; damage to the file itself (cut off, not UTF-8, not Parquet) always stops. Rows with an empty answer, and pairs
whose two sides answer different prompts or give the same answer, are found in the best sets and are never an error:
they are left out and listed.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from rlhf.data import hub, raw
from rlhf.data.raw import DataError as DataError
from rlhf.data.raw import Malformed

Role = Literal["system", "user", "assistant"]
Kind = Literal["text", "hh", "instruction", "preference", "completion", "question", "messages", "prompt"]
Format = Literal["auto", "text", "hh", "instruction", "preference", "completion", "question", "messages", "prompt"]
OnBadRow = Literal["stop", "skip"]

KEYS: dict[Kind, tuple[str, ...]] = {
    "text": ("text",),
    "hh": ("chosen", "rejected"),
    "instruction": ("instruction", "output"),
    "preference": ("prompt", "chosen", "rejected"),
    "completion": ("prompt", "completion"),
    "question": ("question", "answer"),
    "messages": ("messages",),
    "prompt": ("prompt",),
}
LABELS = re.compile(r"(.*_)?(id|uid|uuid|idx|index|hash|source|split|category|task|type|lang|language|topic|tags?)")


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text to pretrain on."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the response to imitate; `answer` is what rewards compare responses with, where it is known."""

    prompt: tuple[Message, ...]
    response: str
    source: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two responses to one prompt; people preferred `chosen`."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    source: str


@dataclass(frozen=True, slots=True)
class PromptOnly:
    """A prompt to sample responses to; `answer` is the right one, where it is known."""

    prompt: tuple[Message, ...]
    source: str
    answer: str | None = None


Row = Document | Example | PreferencePair | PromptOnly
LeftOut = Literal["prompts differ", "identical", "empty answer"]


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file, or one split of a hub set; `sha256` is of the file's bytes, of a hub set's rows as JSON lines."""

    name: str
    sha256: str
    kind: Kind
    rows: int


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What was read and what was left out; `malformed` pairs a source with the reason, the others are sources."""

    files: tuple[FileReport, ...]
    malformed: tuple[tuple[str, str], ...]
    prompts_differ: tuple[str, ...]
    identical: tuple[str, ...]
    empty: tuple[str, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def summary(self) -> str:
        left_out = len(self.malformed) + len(self.prompts_differ) + len(self.identical) + len(self.empty)
        return (
            f"{self.rows - left_out:,} of {self.rows:,} rows kept from {', '.join(file.name for file in self.files)}; "
            f"left out: {len(self.malformed)} malformed, {len(self.prompts_differ)} with prompts that differ, "
            f"{len(self.identical)} with identical answers, {len(self.empty)} with an empty answer"
        )


@dataclass(frozen=True, slots=True)
class Rows:
    documents: tuple[Document, ...]
    examples: tuple[Example, ...]
    pairs: tuple[PreferencePair, ...]
    report: ReadReport
    prompts: tuple[PromptOnly, ...] = ()


class Advice(NamedTuple):
    """Ways out that an error about malformed rows names; they depend on who reads the rows."""

    skip: str
    format: str


RECIPE_ADVICE = Advice("Set data.on_bad_row: skip to leave such rows out", "Name it in data.format or repair the file")
CONVERT_ADVICE = Advice("Leave such rows out with --skip-bad-rows", "Repair the file")
CHECK_ADVICE = Advice("Repair the row", "Repair the file")


def read(
    files: Sequence[str | Path],
    *,
    on_bad_row: OnBadRow = "stop",
    format: Format = "auto",
    advice: Advice = RECIPE_ADVICE,
) -> Rows:
    """Read JSON lines, JSON arrays (both also gzipped) and Parquet; which it is shows in the content, not the name."""
    if isinstance(files, str) or not files:
        raise DataError(f"data files: {files!r} is not a list of at least one file; name the files in data.files")
    sources = ((str(path), raw.rows(path), partial(raw.sha256, path)) for path in map(Path, files))
    return parse(sources, on_bad_row=on_bad_row, format=format, advice=advice)


Source = tuple[str, Iterable[tuple[str, object]], Callable[[], str]]  # name, (source, row) of each row, hash


def parse(
    sources: Iterable[Source],
    *,
    on_bad_row: OnBadRow = "stop",
    format: Format = "auto",
    advice: Advice = RECIPE_ADVICE,
) -> Rows:
    """Parse raw rows, those of each source by one kind. Raises DataError as `read` does."""
    reader = _Reader(on_bad_row, format, advice)
    for name, rows, sha256 in sources:
        reader.take(name, rows, sha256)
    return reader.rows()


def read_hub(
    name: str,
    revision: str,
    *,
    split: str = "train",
    data_dir: str | None = None,
    on_bad_row: OnBadRow = "stop",
    format: Format = "auto",
) -> Rows:
    """Read one split of a data set on the hub at one commit; `name` may also be a local folder that holds a set."""
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise DataError(
            f"{name}: revision {revision!r} is not a commit of 40 hex digits; branches and tags can move, and the run "
            "could not be repeated. Copy the commit from the set's history on the hub into data.revision"
        )
    import datasets  # slow to import, and only needed here

    label = "/".join(part for part in (name, data_dir, split) if part)
    try:
        # Through the pinned files: offline, `load_dataset` of a name takes the newest commit that it has ever seen.
        folder = name if Path(name).is_dir() else hub.snapshot(name, revision, data_dir)
        table = datasets.load_dataset(folder, split=split, data_dir=data_dir)
    except Exception as error:  # the library raises a dozen unrelated types, some with the reason only in the cause
        way_out = "check data.name, data.data_dir, the split and the network; `rlhf fetch` keeps all for later"
        reason = hub.reason(error, f"https://huggingface.co/datasets/{name}", revision, way_out)
        raise DataError(f"{label}: not loaded: {reason}") from error
    digest = hashlib.sha256()

    def rows() -> Iterator[tuple[str, object]]:
        for number, row in enumerate(table, 1):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
            yield f"{label}:row {number}", row

    reader = _Reader(on_bad_row, format)
    reader.take(label, rows(), digest.hexdigest)
    return reader.rows()


# HH transcripts

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLE_OF_SPEAKER: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}
_SPEAKER_OF_ROLE = {role: speaker for speaker, role in _ROLE_OF_SPEAKER.items()}


def parse_hh(text: str) -> tuple[Message, ...]:
    """Turns of a transcript; text before the first turn is a system message. A text without turns is that alone."""
    lead, *parts = _TURN.split(text)
    messages = [Message("system", lead)] if lead.strip() else []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        messages.append(Message(_ROLE_OF_SPEAKER[speaker], content.removeprefix(" ")))
    return tuple(messages)


def render_hh(messages: Sequence[Message]) -> str:
    """A prompt as a transcript that ends where the assistant is to answer: `...\\n\\nHuman: Hello\\n\\nAssistant:`.

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


# What `render_hh` writes, for those who use a trained model with a chat interface: servers, transformers' pipelines.
# GAP is what makes a tokenizer begin as it does without a BOS in the text (rlhf/data/tokenize.py).
HH_CHAT_TEMPLATE = (
    "{{ (bos_token or '') + GAP }}{% for m in messages %}"
    "{% if m.role != 'system' %}{{ '\\n\\n' + ('Human' if m.role == 'user' else 'Assistant') + ': ' + m.content }}"
    "{% elif loop.first %}{{ m.content }}"
    "{% else %}{{ raise_exception('only the first message can be a system message') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)

# One row


_ROLES: dict[object, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
}
_TYPES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def _kind_of(row: dict[str, object]) -> Kind | None:
    """Kind by the keys that have a value; Parquet and hub sets fill absent keys with null."""
    for keys in ({key for key, value in row.items() if value is not None}, row.keys()):
        if "chosen" in keys or "rejected" in keys:
            lists = isinstance(row.get("chosen"), list) or isinstance(row.get("rejected"), list)
            return "preference" if "prompt" in keys or lists else "hh"
        if "instruction" in keys:
            return "instruction"
        if "messages" in keys or "conversations" in keys:
            return "messages"
        if "prompt" in keys and ("completion" in keys or "response" in keys):
            return "completion"
        if "text" in keys:
            return "text"
    if row.get("question") is not None and row.get("answer") is not None:
        return None if _other_texts(row, "question", "answer") else "question"
    return None if row.get("prompt") is None or _other_texts(row, "prompt", "answer") else "prompt"


def _other_texts(row: dict[str, object], *own: str) -> bool:
    """Whether a column beside `own` may have a meaning: one with a text or a list, whose name is none of a label."""
    others = (key for key, value in row.items() if isinstance(value, str | list | dict) and value and key not in own)
    return not all(LABELS.fullmatch(key.lower()) for key in others)


def _parse(row: dict[str, object], kind: Kind, source: str) -> Row | LeftOut:
    if kind == "text":
        text = _text(_field(row, "text", kind), "text")
        if not text.strip():
            raise Malformed("'text' is empty")
        return Document(text, source)
    if kind == "instruction":
        return _instruction(row, source)
    if kind == "messages":
        return _conversation(row, source)
    if kind == "completion":
        return _completion(row, source)
    if kind == "question":
        return _question(row, source)
    if kind == "prompt":
        return _prompt_only(row, source)
    return _pair(row, kind, source)


def _instruction(row: dict[str, object], source: str) -> Example | LeftOut:
    request = _text(_field(row, "instruction", "instruction"), "instruction")
    response = _text(_field(row, "output", "instruction"), "output").removeprefix(" ").rstrip()
    if not request.strip():
        raise Malformed("'instruction' is empty")
    if row.get("input") is not None:
        extra = _text(row["input"], "input")
        request += f"\n{extra}" if extra.strip() else ""
    return Example((Message("user", request),), response, source) if response else "empty answer"


def _conversation(row: dict[str, object], source: str) -> Example | LeftOut:
    key = "messages" if row.get("messages") is not None or "conversations" not in row else "conversations"
    value = _field(row, key, "messages")
    if not isinstance(value, list):
        raise Malformed(f"'{key}' is {_type_name(value)}; it must be a list of messages")
    prompt, response = _answer(value, key, None)
    return _example(prompt, response, source)


def label_of(row: dict[str, object]) -> bool | None:
    """Whether a row's answer is labelled good (KTO); None where it has no such label. Tables hold labels as text."""
    value = row.get("label")
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())


def _completion(row: dict[str, object], source: str) -> Example | LeftOut:
    if label_of(row) is not None:
        raise Malformed(
            "an answer that is labelled good or bad by itself (KTO), and no pair of answers; "
            "`rlhf data convert FILE --to pairs.jsonl` pairs good and bad answers to the same prompt"
        )
    given = _prompt(_field(row, "prompt", "completion"))
    key = "response" if row.get("response") is not None and row.get("completion") is None else "completion"
    prompt, response = _answer(_field(row, key, "completion"), key, given)
    if prompt != given:
        raise Malformed(f"'{key}' holds a conversation that does not begin with 'prompt'")
    return _example(prompt, response, source, _right_answer(row))


def _question(row: dict[str, object], source: str) -> Example | LeftOut:
    """Read a question with its worked answer, which is both what SFT imitates and what rewards compare with."""
    question = _text(_field(row, "question", "question"), "question")
    answer = _text(_field(row, "answer", "question"), "answer").strip()
    return _example((Message("user", question),), answer, source, answer)


def _prompt_only(row: dict[str, object], source: str) -> PromptOnly:
    prompt = _prompt(_field(row, "prompt", "prompt"))
    if not prompt or prompt[-1].role != "user" or not prompt[-1].content.strip():
        raise Malformed("'prompt' does not end with a user turn that has text")
    return PromptOnly(prompt, source, _right_answer(row))


def _right_answer(row: dict[str, object]) -> str | None:
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    return None if answer is None else _text(answer, "answer").strip()


def _example(prompt: tuple[Message, ...], response: str, source: str, answer: str | None = None) -> Example | LeftOut:
    if not any(message.role == "user" and message.content.strip() for message in prompt):
        raise Malformed("no user turn with text before the answer")
    return Example(prompt, response.rstrip(), source, answer) if response.strip() else "empty answer"


def _pair(row: dict[str, object], kind: Kind, source: str) -> PreferencePair | LeftOut:
    sides = [_field(row, "chosen", kind), _field(row, "rejected", kind)]
    given = None
    if kind == "preference" and (row.get("prompt") is not None or not all(isinstance(side, list) for side in sides)):
        given = _prompt(_field(row, "prompt", kind))
    prompt, chosen = _answer(sides[0], "chosen", given)
    other_prompt, rejected = _answer(sides[1], "rejected", given)
    if prompt != other_prompt:
        return "prompts differ"
    if given is not None and prompt != given:
        raise Malformed("'chosen' and 'rejected' hold conversations that do not begin with 'prompt'")
    if not any(message.role == "user" and message.content.strip() for message in prompt):
        raise Malformed("no user turn with text before the answer")
    chosen, rejected = chosen.rstrip(), rejected.rstrip()
    if not chosen or not rejected:
        return "empty answer"
    return "identical" if chosen == rejected else PreferencePair(prompt, chosen, rejected, source)


def _prompt(value: object) -> tuple[Message, ...]:
    if isinstance(value, list):
        return _messages(value, "prompt")
    text = _text(value, "prompt")
    return parse_hh(text)[:-1] if text.rstrip().endswith("\n\nAssistant:") else (Message("user", text),)


def parse_prompt(value: object, source: str) -> tuple[Message, ...]:
    """A prompt as preference rows may hold it: text, a transcript or a list of messages. Raises DataError."""
    try:
        return _prompt(value)
    except Malformed as problem:
        raise DataError(f"{source}: {problem}") from None


def _answer(value: object, key: str, given: tuple[Message, ...] | None) -> tuple[tuple[Message, ...], str]:
    """Split one side at its last assistant turn; a side that is only an answer belongs to the given prompt."""
    if isinstance(value, list):
        messages = _messages(value, key)
    else:
        text = _text(value, key)
        whole = given is None or text.startswith("\n\nHuman:")
        messages = parse_hh(text) if whole else (Message("assistant", text.removeprefix(" ")),)
    if not any(message.role == "assistant" for message in messages):
        hint = "" if given else r"; without a 'prompt' it must be a transcript: '\n\nHuman: ...\n\nAssistant: ...'"
        raise Malformed(f"'{key}' has no assistant turn{hint}")
    if messages[-1].role != "assistant":
        raise Malformed(f"'{key}' ends with a {messages[-1].role} turn; the answer, an assistant turn, must come last")
    if given is not None and len(messages) == 1:
        return given, messages[0].content
    return messages[:-1], messages[-1].content


def _messages(values: list[object], key: str) -> tuple[Message, ...]:
    messages = []
    for number, value in enumerate(values, 1):
        where = f"{key}[{number}]"
        if not isinstance(value, dict):
            raise Malformed(f"'{where}' is {_type_name(value)}; a message is an object with role and content")
        name = value.get("role", value.get("from"))
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise Malformed(f"'{where}' has the role {str(name)[:40]!r}; known are {', '.join(map(str, _ROLES))}")
        if role == "system" and number > 1:
            raise Malformed(f"'{where}' is a system message; only the first can be one")
        messages.append(Message(role, _text(value.get("content", value.get("value")), f"{where}.content")))
    return tuple(messages)


def _field(row: dict[str, object], key: str, kind: Kind) -> object:
    if key not in row:
        raise Malformed(f"no '{key}' key; each {kind} row needs {', '.join(KEYS[kind])}")
    return row[key]


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"'{name}' is {_type_name(value)}; it must be text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Malformed(f"'{name}' holds half a surrogate pair at character {error.start}") from None
    return value


def _type_name(value: object) -> str:
    return _TYPES.get(type(value), type(value).__name__)


def names(keys: Iterable[str]) -> str:
    """The first few keys for a message; a damaged row may have any number of any length."""
    shown = [repr(key[:40]) for key in itertools.islice(keys, 8)]
    return ", ".join(shown) or "no keys"


# All rows


class _Reader:
    """Gathers rows from one file after another, and keeps account of those left out."""

    def __init__(self, on_bad_row: OnBadRow, format: Format, advice: Advice = RECIPE_ADVICE):
        for name, value, known in (("on_bad_row", on_bad_row, OnBadRow), ("format", format, Format)):
            if value not in get_args(known):
                raise ValueError(f"{name} is one of {', '.join(get_args(known))}, not {value!r}")
        self.on_bad_row = on_bad_row
        self.advice = advice
        self.format = format
        self.kept: list[Row] = []
        self.left_out: dict[LeftOut, list[str]] = {"prompts differ": [], "identical": [], "empty answer": []}
        self.malformed: list[tuple[str, str]] = []
        self.files: list[FileReport] = []

    def take(self, name: str, rows: Iterable[tuple[str, object]], sha256: Callable[[], str]) -> None:
        """Parse the (source, row) of one file; `sha256` is asked for when all have been read."""
        kind: Kind | None = None if self.format == "auto" else self.format
        count = 0
        bad: list[tuple[str, str]] = []
        for source, value in rows:
            count += 1
            try:
                row = _object(value)
                kind = self._checked_kind(row, kind)
                outcome = _parse(row, kind, source)
            except Malformed as problem:
                if self.on_bad_row == "stop":
                    raise DataError(f"{source}: {str(problem).removesuffix('.')}. {self.advice.skip}") from None
                bad.append((source, str(problem)))
            else:
                if isinstance(outcome, str):
                    self.left_out[outcome].append(source)
                else:
                    self.kept.append(outcome)
        if not count:
            raise DataError(f"{name}: no rows in it; put one JSON object on each line, or name another file")
        if kind is None or 2 * len(bad) > count:
            raise DataError(
                f"{name}: {len(bad):,} of {count:,} rows are malformed, more than half: likely the wrong format. "
                f"{self.advice.format}; the first is {bad[0][0]}: {bad[0][1]}"
            )
        self.malformed += bad
        self.files.append(FileReport(name, sha256(), kind, count))

    def _checked_kind(self, row: dict[str, object], kind: Kind | None) -> Kind:
        """The file's kind, which the first row decides that is of any."""
        found = _kind_of(row)
        if kind is None:
            if found is None:
                known = "; ".join(f"{name} ({', '.join(keys)})" for name, keys in KEYS.items() if name != "prompt")
                alone = " Prompts without answers: data.format: prompt ignores other columns" if "prompt" in row else ""
                raise Malformed(
                    f"unknown columns: {names(row)}. Rename them to those of a known kind: {known}. "
                    f"`rlhf data convert FILE --rename problem=prompt --to new.jsonl` does that.{alone}"
                )
            return found
        if self.format == "auto" and found not in (None, kind):
            raise Malformed(
                f"one {found} row among {kind} rows, which have {', '.join(KEYS[kind])}; this one has {names(row)}. "
                "Keep one kind in a file, or name it in data.format"
            )
        return kind

    def rows(self) -> Rows:
        report = ReadReport(
            tuple(self.files),
            tuple(self.malformed),
            tuple(self.left_out["prompts differ"]),
            tuple(self.left_out["identical"]),
            tuple(self.left_out["empty answer"]),
        )
        return Rows(
            tuple(row for row in self.kept if isinstance(row, Document)),
            tuple(row for row in self.kept if isinstance(row, Example)),
            tuple(row for row in self.kept if isinstance(row, PreferencePair)),
            report,
            tuple(row for row in self.kept if isinstance(row, PromptOnly)),
        )


def _object(value: object) -> dict[str, object]:
    if isinstance(value, Malformed):
        raise value
    if not isinstance(value, dict):
        raise Malformed(f"a row must be a JSON object; this one is {_type_name(value)}")
    return value
