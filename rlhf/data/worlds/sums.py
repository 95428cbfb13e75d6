"""A toy world whose answers can be checked: sums and differences of small numbers.

People ask in a few wordings, and an assistant answers with a number that is right with a known probability and
otherwise drawn from all possible results. A model trained on its answers knows each result, but says it only as often
as it has read it; reinforcement learning can teach it to say the right result always.

`write` makes four files of JSON lines. All hold questions of both sides of the split that rlhf/data/split.py makes by
the text of a question; a result is asked for in several wordings, so that the same one occurs on both sides.

    documents.jsonl       {"text"}                   transcripts for pretraining
    demonstrations.jsonl  {"instruction", "output"}  for SFT
    pairs.jsonl           {"chosen", "rejected"}     a right and a wrong answer, for a reward model
    prompts.jsonl         {"prompt", "answer"}       every question once, for RLOO and GRPO
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rlhf.data.worlds import write_files

FILES = ("documents.jsonl", "demonstrations.jsonl", "pairs.jsonl", "prompts.jsonl")
FORMS = {
    "plus": ("What is {} plus {}?", "Add {} and {}.", "How much is {} and {} together?", "Tell me {} plus {}."),
    "minus": ("What is {} minus {}?", "Take {1} away from {0}.", "How much is {} less {}?", "Tell me {} minus {}."),
}
BEFORE = ("", "Hi. ", "Please help me. ")
AFTER = ("", " Thanks.")
STATEMENTS = ("It is {}.", "The result is {}.", "{}.")


def questions(largest: int) -> dict[str, int]:
    """Return every question about numbers from 0 to `largest` with its answer; a difference is never negative."""
    answers = {}
    for operation, forms in FORMS.items():
        for a in range(largest + 1):
            for b in range(largest + 1 if operation == "plus" else a + 1):
                for form in forms:
                    for before in BEFORE:
                        for after in AFTER:
                            answers[before + form.format(a, b) + after] = a + b if operation == "plus" else a - b
    return answers


def response(rng: random.Random, right: int, accuracy: float, largest: int) -> str:
    """Return a response with the right number, with probability `accuracy`, or with another result at random."""
    number = right
    if rng.random() >= accuracy:
        number = rng.choice([n for n in range(2 * largest + 1) if n != right])
    return rng.choice(STATEMENTS).format(number)


def write(
    directory: Path, *, seed: int, documents: int, demonstrations: int, pairs: int, accuracy: float, largest: int
) -> list[Path]:
    """Write FILES into `directory` and return them. No file depends on another's size."""
    answers = list(questions(largest).items())

    def draws(name: str, count: int) -> Iterator[tuple[random.Random, str, int]]:
        rng = random.Random(f"sums:{name}:{seed}")
        for _ in range(count):
            yield rng, *rng.choice(answers)

    def transcript(question: str, answer: str) -> str:
        return f"\n\nHuman: {question}\n\nAssistant: {answer}"

    texts = (
        {"text": transcript(question, response(rng, right, accuracy, largest))}
        for rng, question, right in draws("documents", documents)
    )
    demonstration_rows = (
        {"instruction": question, "output": response(rng, right, accuracy, largest)}
        for rng, question, right in draws("demonstrations", demonstrations)
    )
    preference_rows = (
        {
            "chosen": transcript(question, response(rng, right, 1.0, largest)),
            "rejected": transcript(question, response(rng, right, 0.0, largest)),
        }
        for rng, question, right in draws("pairs", pairs)
    )
    prompt_rows = ({"prompt": question, "answer": right} for question, right in answers)
    contents: list[Iterable[Mapping[str, object]]] = [texts, demonstration_rows, preference_rows, prompt_rows]
    return write_files(directory, dict(zip(FILES, contents, strict=True)))
