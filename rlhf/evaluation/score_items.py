"""Items that `rlhf score` scores: a prompt with answers, from the command line, data files or a run's samples."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf.data import formats, raw
from rlhf.data.parsing import parse_prompt
from rlhf.data.rows import Message
from rlhf.errors import UserError
from rlhf.files import JsonObject
from rlhf.terminal import say

ANSWERS = ("response", "base", "SFT", "PPO", "DPO")  # keys of samples under which an answer is plain text


class Item(NamedTuple):
    """A prompt and its answers by name.

    `prompt` is text if a run may have written it so. `row` is the row of a run's samples that it was read from.
    """

    source: str
    prompt: tuple[Message, ...] | str
    answers: dict[str, str]
    row: JsonObject


def command_line_items(prompt: str, responses: Sequence[str]) -> list[Item]:
    """Return the items of a prompt and its responses from the command line."""
    messages = parse_prompt(prompt, "--prompt")
    return [Item("", messages, {"response": response}, {}) for response in responses]


def read(files: Sequence[Path]) -> list[Item]:
    """Return the items of files: preference pairs, demonstrations, rows with `prompt` and `response`, samples.

    Raises UserError for files of any other kind.
    """
    return [item for file in files for item in _items(file)]


def _items(file: Path) -> Iterator[Item]:
    """Yield the items of a file. Raises UserError."""
    rows = raw.rows(file)
    first = next(rows, None)
    if first is not None and _answers(first[1]):
        yield from (_item(source, row) for source, row in itertools.chain([first], rows))
        return
    data = formats.read([file])
    for note in data.report.notes:
        say(note)
    if not data.pairs and not data.examples:
        raise UserError(f"{file}: texts without prompts and answers; score needs pairs, or prompts with responses")
    for pair in data.pairs:
        yield Item(pair.source, pair.prompt, {"chosen": pair.chosen, "rejected": pair.rejected}, {})
    for example in data.examples:
        yield Item(example.source, example.prompt, {"response": example.response}, {})


def _answers(row: object) -> dict[str, str]:
    """Return the answers by name in a row of a run's samples, or of `prompt` and `response`; {} for any other row."""
    if not isinstance(row, dict) or "prompt" not in row:
        return {}
    answers = {name: value.get("response") for name, value in row.items() if isinstance(value, dict)}
    answers |= {name: row[name] for name in ANSWERS if name in row and name not in answers}
    return {name: text for name, text in answers.items() if isinstance(text, str)}


def _item(source: str, row: object) -> Item:
    """Return the item of a row. Raises UserError for a row without prompt and answer."""
    answers = _answers(row)
    if not isinstance(row, dict) or not answers:
        raise UserError(f"{source}: {row if isinstance(row, Exception) else 'no prompt with an answer in this row'}")
    as_text = "step" in row and isinstance(row["prompt"], str)  # as a run writes it, in the model's own template
    prompt = row["prompt"] if as_text else parse_prompt(row["prompt"], source, row.get("system"))
    return Item(source, prompt, answers, row)
