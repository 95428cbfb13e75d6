"""Preference pairs of random words, as long as real ones: memory and speed depend on lengths and not on words.

They go with the stand-in tokenizer (`tokenizer.source: words`), for which every number below is one token.
"""

import csv
import random
from pathlib import Path

from rlhf.data.worlds import write_files

PROMPT_OVERHEAD = 3  # BOS and the two marks of a turn
WORDS = 10_000  # fewer than any real vocabulary has
# Tokens of 200 of the 1,794 usable dialogues in the first 1,800 of HH-RLHF's harmless-base test split, at even
# distances in the order of their length, with Llama-2's tokenizer; a prompt counts BOS, a response does not count EOS.
# All 1,794 have 136, 43 and 53 tokens on average, the 200 here much the same.
HH = Path(__file__).with_name("lengths_of_hh.csv")


def lengths_of_hh() -> list[tuple[int, int, int]]:
    """Return the tokens of (prompt, chosen, rejected) of the dialogues in `HH`."""
    with HH.open(encoding="utf-8", newline="") as file:
        return [(int(row["prompt"]), int(row["chosen"]), int(row["rejected"])) for row in csv.DictReader(file)]


def write(directory: Path, *, pairs: int, shape: str, longest: int, seed: int) -> list[Path]:
    """Write pairs.jsonl, of `pairs` rows with distinct prompts.

    `shape` is `hh`, lengths of real dialogues, or else prompt and responses have `longest` tokens each.
    """
    rng = random.Random(f"lengths:{seed}")
    table = lengths_of_hh()

    def text(tokens: int) -> str:
        return " ".join(str(rng.randrange(WORDS)) for _ in range(tokens))

    rows: dict[str, dict[str, str]] = {}
    while len(rows) < pairs:
        prompt, chosen, rejected = rng.choice(table) if shape == "hh" else (longest + PROMPT_OVERHEAD, longest, longest)
        words = text(prompt - PROMPT_OVERHEAD)
        rows[words] = {"prompt": words, "chosen": text(chosen), "rejected": text(rejected)}
    return write_files(directory, {"pairs.jsonl": rows.values()})
