"""Parsing of one row of a file, by its kind.

Eight kinds of rows are known. The first row of a file decides its kind, unless the caller names one:

    text          {"text"}                                  -> Document
    hh            {"chosen", "rejected"}: two transcripts   -> PreferencePair
    instruction   {"instruction", "input"?, "output"}       -> Example
    preference    {"prompt", "chosen", "rejected"}: text or lists of messages; lists that hold the whole
                  conversation need no prompt               -> PreferencePair
    completion    {"prompt", "completion" or "response", "answer"?}: text or lists of messages; the answer as below
    labelled      a completion row with "label", true or false: an answer that is judged by itself (KTO)
                                                            -> Example
    question      {"question", "answer"}: text, a worked answer; rewards compare responses with the same answer
                                                            -> Example
    messages      {"messages"} as OpenAI and TRL have it, or {"conversations"} as ShareGPT has it: the last turn is the
                  response, the turns before it are the prompt
                                                            -> Example
    prompt        {"prompt", "answer"?}: text, a transcript or a list of messages that ends with the user's; the answer,
                  text or a number, is what a reward compares responses with
                                                            -> PromptOnly

A text under `system` is the system message of a row that has no other. Other fields that have a value are used, or
without influence by their values (rlhf/data/columns.py), or the row is refused, because its answer may depend on them.
Where the caller names the kind, unknown columns are ignored; texts under a name of CONTEXT and INPUT_COLUMNS never are,
but beside bare prompts. Each parsed row carries its source: `file:line`, or `file:row N` where rows are not lines.

Texts are kept unchanged, with two exceptions: the one space that a transcript puts after `Human:` or `Assistant:`
(and some sets put before a response of plain text) is dropped, and so is white space at the end of a response.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rlhf.data.columns import ANSWER_COLUMNS, KIND_KEYS, either, other_texts, refuse_inputs
from rlhf.data.fields import NO_FACTS, FileFacts, has_value
from rlhf.data.labels import label_of
from rlhf.data.margins import margin_of
from rlhf.data.messages import (
    content_text,
    quoted_keys,
    read_messages,
    spoken_text,
    text,
    trained_flags,
    type_name,
    unread_fields,
)
from rlhf.data.normal import normal_prompt, normalise, says_something
from rlhf.data.raw import Malformed
from rlhf.data.rows import Document, Example, LeftOut, Message, PreferencePair, PromptOnly, Row
from rlhf.data.transcripts import begins_with_turn, is_transcript, parse_hh
from rlhf.data.verdicts import contradicts
from rlhf.errors import UserError
from rlhf.recipe.choices import RowKind


class WrongColumns(Malformed):
    """A row whose columns are not those of a known kind. The message says how to convert the file."""


class OtherKind(Malformed):
    """A row that is not of the kind that it was read as. Naming the kind may help."""


class _Untrained(Exception):
    """A conversation in which no answer is to be trained on."""


class LabelledAnswer(WrongColumns):
    """An answer that is labelled good or bad by itself (KTO) in a file of answers to imitate."""


def kind_of(row: dict[str, object]) -> RowKind | None:
    """Return the kind of a row, judged by the keys that have a value, or else by all keys; None if it is unknown.

    Parquet and hub sets fill absent keys with null. A prompt whose answers are null is no bare prompt: they are
    missing.
    """
    keys = {key for key, value in row.items() if value is not None}
    if kind := _kind_of_keys(keys, row):
        return kind
    if "question" in keys and "answer" in keys:
        return None if other_texts(row, "question", "answer", "system") else "question"
    if "prompt" in keys and row.keys().isdisjoint(ANSWER_COLUMNS):
        return None if other_texts(row, "prompt", "answer", "system") else "prompt"
    return _kind_of_keys(row.keys(), row)


def _kind_of_keys(keys: Collection[str], row: dict[str, object]) -> RowKind | None:
    """Return the kind of a row that has these keys; None if they show none, or may be those of a bare prompt."""
    if "chosen" in keys or "rejected" in keys:
        lists = isinstance(row.get("chosen"), list) or isinstance(row.get("rejected"), list)
        return "preference" if "prompt" in keys or lists else "hh"
    if "instruction" in keys:
        return "instruction"
    if "messages" in keys or "conversations" in keys:
        return "messages"
    if "prompt" in keys and ("completion" in keys or "response" in keys):
        return "completion" if label_of(row) is None else "labelled"
    return "text" if "text" in keys else None


def parse_row(row: dict[str, object], kind: RowKind, source: str, facts: FileFacts = NO_FACTS) -> Row | LeftOut:
    """Return a row of the kind, or the reason why it is left out. Raises Malformed if it is not of that kind."""
    refuse_inputs(row, kind)
    if not all(trained_flags(row).values()):
        return "untrained"
    try:
        return _parse_with_system(row, kind, source, facts)
    except _Untrained:
        return "untrained"


def _parse_with_system(row: dict[str, object], kind: RowKind, source: str, facts: FileFacts) -> Row | LeftOut:
    """Return a row of the kind with the system message that stands beside it. Raises Malformed and _Untrained."""
    parsed = _parse_row(row, kind, source, facts)
    if isinstance(parsed, Document | str):
        return parsed
    return replace(parsed, prompt=_with_system(parsed.prompt, row.get("system")))


def _with_system(prompt: tuple[Message, ...], beside: object) -> tuple[Message, ...]:
    """Return a prompt with the system message that stands beside it, if one does. Raises Malformed for two."""
    if not has_value(beside):
        return prompt
    system = content_text(beside, "system")
    own = next((message.content for message in prompt[:1] if message.role == "system"), "")
    if own.strip() and normalise(own) != normalise(system):
        raise Malformed("'system' differs from the system message of the conversation; keep one of them")
    turns = [message for message in prompt if message.role != "system"]
    return prompt if own.strip() else (Message("system", system), *turns)


def _parse_row(row: dict[str, object], kind: RowKind, source: str, facts: FileFacts) -> Row | LeftOut:
    if kind == "text":
        document = text(_field(row, "text", kind), "text")
        if not says_something(document):
            raise Malformed("'text' is empty")
        return Document(document, source)
    if kind == "instruction":
        return _instruction(row, source)
    if kind == "messages":
        return _conversation(row, source)
    if kind == "completion":
        return _completion(row, source, facts)
    if kind == "labelled":
        return _labelled(row, source, facts)
    if kind == "question":
        return _question(row, source)
    if kind == "prompt":
        return _prompt_only(row, source, facts)
    return _pair(row, kind, source, facts)


def _instruction(row: dict[str, object], source: str) -> Example | LeftOut:
    """Return an example, or why it is left out. Raises Malformed."""
    request = text(_field(row, "instruction", "instruction"), "instruction")
    response = text(_field(row, "output", "instruction"), "output").removeprefix(" ").rstrip()
    if not says_something(request):
        raise Malformed("'instruction' is empty")
    if row.get("input") is not None:
        extra = text(row["input"], "input")
        request += f"\n{extra}" if extra.strip() else ""
    return Example((Message("user", request),), response, source) if says_something(response) else "empty"


def _conversation(row: dict[str, object], source: str) -> Example | LeftOut:
    """Return the example of a list of messages, or why it is left out. Raises Malformed."""
    key = either(row, "messages", "conversations")
    value = _field(row, key, "messages")
    if not isinstance(value, list):
        raise Malformed(f"'{key}' is {type_name(value)}; it must be a list of messages")
    prompt, response = _answer(value, key, None)
    return _example(prompt, response, source)


def _labelled(row: dict[str, object], source: str, facts: FileFacts) -> Example | LeftOut:
    """Return the example of an answer with its label, or why it is left out. Raises Malformed."""
    good = label_of(row)
    if good is None:
        raise Malformed(f"'label' is {str(_field(row, 'label', 'labelled'))[:40]!r}; it must be true or false")
    example = _completion({**row, "label": None}, source, facts)
    return replace(example, good=good) if isinstance(example, Example) else example


def _completion(row: dict[str, object], source: str, facts: FileFacts) -> Example | LeftOut:
    """Return the example of a prompt and its response, or why it is left out. Raises Malformed."""
    if label_of(row) is not None:
        raise LabelledAnswer(
            "an answer that is labelled good or bad by itself (KTO), among answers without a label, which may be bad "
            "ones too: label all of them, or none"
        )
    row_prompt = _prompt(_field(row, "prompt", "completion"), facts)
    key = either(row, "completion", "response")
    prompt, response = _answer(_field(row, key, "completion"), key, row_prompt, facts)
    if not _begins_with(prompt, row_prompt):
        raise Malformed(f"'{key}' holds a conversation that does not begin with 'prompt'")
    return _example(prompt, response, source, _right_answer(row))


def _question(row: dict[str, object], source: str) -> Example | LeftOut:
    """Return a question with its worked answer, or why it is left out. Raises Malformed.

    SFT imitates the answer, and rewards compare responses with it.
    """
    question = text(_field(row, "question", "question"), "question")
    _field(row, "answer", "question")
    answer = _right_answer(row) or ""
    return _example((Message("user", question),), answer, source, answer)


def _prompt_only(row: dict[str, object], source: str, facts: FileFacts) -> PromptOnly:
    """Return a prompt with the right answer, if the row has one. Raises Malformed."""
    prompt = _prompt(_field(row, "prompt", "prompt"), facts)
    if not prompt or prompt[-1].role != "user" or not says_something(prompt[-1].content):
        raise Malformed("'prompt' does not end with a user turn that has text")
    return PromptOnly(prompt, source, _right_answer(row))


def _right_answer(row: dict[str, object]) -> str | None:
    """Return the text that a reward compares responses with; None without one, or if it is empty. Raises Malformed."""
    answer = row.get("answer")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise Malformed(f"'answer' is {answer}; it must be text or a finite number")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        # A table with an empty cell among whole numbers holds them as 7.0, which no text of a response is equal to.
        answer = str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer)
    answer = None if answer is None else text(answer, "answer").strip()
    return answer if answer and says_something(answer) else None  # in a table, no answer is an empty cell


def _example(
    prompt: tuple[Message, ...], response: str, source: str, right_answer: str | None = None
) -> Example | LeftOut:
    """Return an example, or why it is left out. Raises Malformed without a user turn."""
    if not any(message.role == "user" and says_something(message.content) for message in prompt):
        raise Malformed("no user turn with text before the answer")
    return Example(prompt, response.rstrip(), source, right_answer) if says_something(response) else "empty"


def _pair(row: dict[str, object], kind: RowKind, source: str, facts: FileFacts) -> PreferencePair | LeftOut:
    """Return a preference pair, or why it is left out. Raises Malformed."""
    sides = [_field(row, "chosen", kind), _field(row, "rejected", kind)]
    if (verdict := contradicts(row)) is not None:
        raise Malformed(
            f"'{verdict}' is {str(row[verdict])[:40]!r}, so the better answer is not the one under 'chosen': swap the "
            "two, or take the row out"
        )
    row_prompt = None
    if kind == "preference" and (row.get("prompt") is not None or not all(isinstance(side, list) for side in sides)):
        row_prompt = _prompt(_field(row, "prompt", kind), facts)
    prompt, chosen = _answer(sides[0], "chosen", row_prompt, facts)
    other_prompt, rejected = _answer(sides[1], "rejected", row_prompt, facts)
    if normal_prompt(prompt) != normal_prompt(other_prompt):
        return "prompts_differ"
    if row_prompt is not None and not _begins_with(prompt, row_prompt):
        raise Malformed("'chosen' and 'rejected' hold conversations that do not begin with 'prompt'")
    if not any(message.role == "user" and says_something(message.content) for message in prompt):
        raise Malformed("no user turn with text before the answer")
    chosen, rejected = chosen.rstrip(), rejected.rstrip()
    if not says_something(chosen) or not says_something(rejected):
        return "empty"
    if normalise(chosen) == normalise(rejected):
        return "identical"
    return PreferencePair(prompt, chosen, rejected, source, margin_of(row, facts.rating))


def _begins_with(prompt: Sequence[Message], beginning: Sequence[Message]) -> bool:
    """Return whether a prompt begins with some messages, whatever their spelling; a system message may be before."""
    turns, first = normal_prompt(prompt), normal_prompt(beginning)
    start = int(turns[:1] != first[:1] and bool(turns) and turns[0][0] == "system")
    return turns[start : start + len(first)] == first


def _prompt(value: object, facts: FileFacts = NO_FACTS) -> tuple[Message, ...]:
    """Return the messages of a prompt: text, a transcript or a list of messages. Raises Malformed.

    A text is read as a transcript if it has the shape of one, and the file is one of transcripts.
    """
    if isinstance(value, list):
        return read_messages(value, "prompt")
    prompt = spoken_text(value, "prompt")
    if not facts.transcripts.get("prompt", True) or not is_transcript(prompt):
        return (Message("user", prompt),)
    *turns, last = parse_hh(prompt)
    return (*turns, last) if last.content.strip() else tuple(turns)


def parse_prompt(value: object, source: str, system: object = None) -> tuple[Message, ...]:
    """Return the messages of a prompt as preference rows may hold it: text, a transcript or a list of messages.

    `system` is what stands beside it under that name. Raises UserError for anything else.
    """
    try:
        for field in unread_fields(value, "prompt").refused:
            raise Malformed(f"'{field.place}' is not used; take it out if the answer does not need it")
        return _with_system(_prompt(value), system)
    except Malformed as problem:
        raise UserError(f"{source}: {problem}") from None


def _answer(
    value: object, key: str, row_prompt: tuple[Message, ...] | None, facts: FileFacts = NO_FACTS
) -> tuple[tuple[Message, ...], str]:
    """Return the prompt and the answer of one side of a row. Raises Malformed, and _Untrained without an answer.

    The answer is the last assistant turn, or the last one that the row trains on; turns behind it are dropped. A side
    that is only an answer belongs to the prompt of the row, and one that begins with the assistant goes on from it.
    """
    if isinstance(value, list):
        turns = read_messages(value, key)
    else:
        answer = spoken_text(value, key)
        whole = row_prompt is None or (facts.transcripts.get(key, True) and begins_with_turn(answer))
        turns = parse_hh(answer) if whole else (Message("assistant", answer.removeprefix(" ")),)
    if not any(turn.role == "assistant" for turn in turns):
        problem = f"'{key}' has no assistant turn"
        if row_prompt is not None or isinstance(value, list):
            raise Malformed(problem)
        raise WrongColumns(
            rf"{problem}; without a 'prompt' it must be a transcript: '\n\nHuman: ...\n\nAssistant: ...'. "
            "If another column has the prompt: `rlhf data convert FILE --rename OLD=prompt --to new.jsonl`"
        )
    if turns[-1].role != "assistant":
        raise Malformed(f"'{key}' ends with a {turns[-1].role} turn; the answer, an assistant turn, must come last")
    answers = [n for n, turn in enumerate(turns) if turn.role == "assistant" and turn.trained]
    if not answers or (key in ("chosen", "rejected") and not turns[-1].trained):
        raise _Untrained
    *before, last = turns[: answers[-1] + 1]
    if row_prompt is None:
        return tuple(before), last.content
    if turns[0].role == "assistant":
        if row_prompt and row_prompt[-1].role == "assistant" and row_prompt[-1].content.strip():
            raise Malformed(f"'prompt' ends with the beginning of the answer; write it into '{key}' instead")
        before = [*row_prompt, *before]
    return tuple(before), last.content


def _field(row: dict[str, object], key: str, kind: RowKind) -> object:
    """Return the value of a key that a row of the kind needs. Raises OtherKind without the key."""
    if key not in row:
        raise OtherKind(f"no '{key}' key; each {kind} row needs {', '.join(KIND_KEYS[kind])}")
    return row[key]


def row_object(value: object) -> dict[str, object]:
    """Return a raw row that is a JSON object.

    Raises Malformed for any other, for one that could not be read, and for an object that holds rows or whole columns.
    """
    if isinstance(value, Malformed):
        raise value
    if not isinstance(value, dict):
        raise Malformed(f"a row must be a JSON object; this one is {type_name(value)}")
    lists = {key: cells for key, column in value.items() if isinstance(cells := _cells(column), list)}
    if lists and len(lists) == len(value):
        if _are_columns(lists):
            raise WrongColumns(
                "whole columns in one object; write one object for each row, as `to_json(FILE, orient='records', "
                "lines=True)` of pandas and `to_json(FILE)` of datasets do"
            )
        if kind_of(value) is None and all(isinstance(cell, dict) for cells in lists.values() for cell in cells):
            advice = "that list" if len(value) == 1 else "one of these lists"
            raise WrongColumns(f"the rows are under {quoted_keys(value)}; write {advice} alone, or a row on each line")
    return _preference_of_openai(value) if "preferred_output" in value else value


def _preference_of_openai(row: dict[str, object]) -> dict[str, object]:
    """Return a row of OpenAI's file for preference tuning with the names of a preference row. Raises Malformed."""
    request = row.get("input")
    if not isinstance(request, dict) or "messages" not in request:
        raise Malformed("'preferred_output' stands beside no 'input' with 'messages'")
    if has_value(row.get("prompt")):
        raise Malformed("'prompt' and 'input' both hold a prompt; take one out")
    names = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
    given = {name: value for name, value in request.items() if name not in ("messages", "parallel_tool_calls")}
    other = {names.get(name, name): value for name, value in row.items() if name != "input"}
    return {**given, **other, "prompt": request["messages"]}


def _cells(column: object) -> object:
    """Return the values of an object whose keys are numbers, as pandas writes a column; anything else unchanged."""
    if isinstance(column, dict) and column and all(str(key).isdecimal() for key in column):
        return [*column.values()]
    return column


def _are_columns(lists: Mapping[str, Sequence[object]]) -> bool:
    """Return whether lists are the columns of a table: equally long, with texts or lists of messages as their cells.

    A list that is the value of one row under a known key has messages as its cells, which are objects.
    """
    known = [
        lists[key] for key in {*itertools.chain(*KIND_KEYS.values()), *ANSWER_COLUMNS, "conversations"} if key in lists
    ]
    rows = {len(cells) for cells in lists.values()}
    texts = all(isinstance(cell, str | list | None) for cells in known for cell in cells)
    return len(rows) == 1 and 0 not in rows and bool(known) and texts
