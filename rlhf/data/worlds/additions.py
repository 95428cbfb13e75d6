"""Questions for a model that can read and calculate: sums of two numbers, whose answers are checked.

`write` makes files of JSON lines. The same two numbers in the other order are another question.

    prompts.jsonl         {"prompt", "answer"}       for RLOO and GRPO
    demonstrations.jsonl  {"instruction", "output"}  for SFT, other questions; only where some are asked for
"""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlhf.files import json_lines

QUESTION = "What is {} + {}? Answer with the number only."


def files(demonstrations: int) -> tuple[str, ...]:
    """Return the names of the files for a number of demonstrations."""
    return ("prompts.jsonl", "demonstrations.jsonl") if demonstrations else ("prompts.jsonl",)


def write(directory: Path, *, seed: int, prompts: int, demonstrations: int, largest: int) -> None:
    """Write the files into `directory`, the same bytes for the same arguments.

    Questions about numbers from 1 to `largest` are drawn without repetition; the recipe has checked that there are
    enough.
    """
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1)]
    drawn = random.Random(f"additions:{seed}").sample(pairs, prompts + demonstrations)
    questions = [(QUESTION.format(a, b), a + b) for a, b in drawn]
    contents: list[Iterable[Mapping[str, object]]] = [
        [{"prompt": question, "answer": right} for question, right in questions[:prompts]],
        [{"instruction": question, "output": str(right)} for question, right in questions[prompts:]],
    ]
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(files(demonstrations), contents, strict=False):
        (directory / name).write_text(json_lines(rows), encoding="utf-8")
