"""Questions for a model that can read and calculate: sums of two numbers, whose answers are checked.

`write` makes files of JSON lines. The same two numbers in the other order are another question.

    prompts.jsonl         {"prompt", "answer"}       for RLOO and GRPO
    demonstrations.jsonl  {"instruction", "output"}  for SFT, other questions; only where some are asked for
"""

import random
from collections.abc import Mapping
from pathlib import Path

from rlhf.data.worlds import write_files

QUESTION = "What is {} + {}? Answer with the number only."


def write(directory: Path, *, seed: int, prompts: int, demonstrations: int, largest: int) -> list[Path]:
    """Write the files into `directory` and return them.

    Questions about numbers from 1 to `largest` are drawn without repetition; the recipe has checked that there are
    enough.
    """
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1)]
    drawn = random.Random(f"additions:{seed}").sample(pairs, prompts + demonstrations)
    questions = [(QUESTION.format(a, b), a + b) for a, b in drawn]
    asked, shown = questions[:prompts], questions[prompts:]
    contents: dict[str, list[Mapping[str, object]]] = {
        "prompts.jsonl": [{"prompt": question, "answer": right} for question, right in asked]
    }
    if demonstrations:
        contents["demonstrations.jsonl"] = [{"instruction": q, "output": str(right)} for q, right in shown]
    return write_files(directory, contents)
