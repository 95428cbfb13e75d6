"""Tasks of the package reasoning-gym: its generators make questions, and its verifiers score answers.

`write` makes prompts.jsonl of rows {"prompt", "answer"}. The package makes each item from a seed of its
own, so that no held-out question comes from the seed of a training one. No question comes twice, and none whose right
answer its own verifier refuses.

Many tasks have several right answers, and a verifier reads more than one of them. So `answer` is an entry: JSON of the
task, its config, an answer that is right (null where the package names none) and what the verifier reads. The reward
`reasoning_gym` gets the entry, every other reward the right answer alone (`right_answer`).
"""

import dataclasses
import difflib
import functools
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.data.normal import normalise, says_something
from rlhf.errors import UserError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

FILE = "prompts.jsonl"
PACKAGE = KEY = "reasoning_gym"  # the module, and the key of an entry that names its task
TUPLE = "tuple"  # the one key of what stands for a tuple, which JSON lacks
ITEM_SEEDS = 1_000_000  # of the package, which makes an item of each: as many for a seed of a recipe, or more
SEED_LIMIT = 2**31  # numpy's generators, which some tasks seed, take no more than twice that
ROUNDS = 10  # of as many items as questions are wanted, at most: few questions are left when they repeat


def first_item(seed: int, number: int, size: int) -> int:
    """Return the package's seed of the first of `size` items in a round; of no others, until SEED_LIMIT ends them."""
    return (seed * max(ITEM_SEEDS, ROUNDS * size) + number * size) % SEED_LIMIT


def write(folder: str, *, seed: int, task: str, config: Mapping[str, Any], size: int) -> None:
    """Write `size` different questions of a task into FILE in `folder`, or as many as it has.

    The same arguments give the same bytes. Raises UserError for a task or a config that the package does not have.
    """
    rows: dict[str, dict[str, str]] = {}
    for number in range(ROUNDS):
        first = first_item(seed, number, size)
        random.seed(first)
        dataset = _dataset(task, json.dumps({**config, "seed": first, "size": size}))
        known = len(rows)
        for index in range(size):
            item = dataset[index]
            question = normalise(item["question"])
            if question not in rows and says_something(question) and (entry := _entry(dataset, task, config, item)):
                rows[question] = {"prompt": item["question"], "answer": entry}
            if len(rows) == size:
                break
        if len(rows) in (known, size):
            break
    text = "".join(json.dumps(row) + "\n" for row in rows.values())
    (Path(folder) / FILE).write_text(text, encoding="utf-8")


def score(entry: str, response: str | None) -> float:
    """Return the verifier's score of a response to an entry's question, mostly from 0 to 1.

    A response that the verifier fails on is wrong: some of them parse it without a check.
    """
    fields = _fields(entry)
    dataset = _dataset(fields[KEY], json.dumps(fields["config"]))
    try:
        return float(dataset.score_answer(response, fields))
    except Exception:  # of whatever the package calls
        return 0.0


def is_entry(answer: str) -> bool:
    """Return whether a right answer is an entry."""
    return answer.startswith(f'{{"{KEY}": ')


def right_answer(answer: str) -> str:
    """Return the plain right answer of an entry, "" where it has none; any other answer as it is."""
    return (_fields(answer)["answer"] or "") if is_entry(answer) else answer


def _entry(dataset: "ProceduralDataset", task: str, config: Mapping[str, Any], item: dict[str, Any]) -> str | None:
    """Return the entry of an item; None where its verifier refuses its right answer, read back from the entry."""
    answer = item["answer"]
    fields = {KEY: task, "config": config, "question": item["question"], "answer": answer, "metadata": item["metadata"]}
    # A fraction or another value that JSON lacks becomes its text: the check that follows shows whether that matters.
    entry = json.dumps({key: _tagged(value) for key, value in fields.items()}, default=str)
    return entry if answer is None or dataset.score_answer(answer, _fields(entry)) >= 1 else None


def _tagged(value: Any) -> Any:
    """Return a value with its tuples as JSON can hold them."""
    if isinstance(value, dict):
        return {key: _tagged(part) for key, part in value.items()}
    parts = [_tagged(part) for part in value] if isinstance(value, list | tuple) else value
    return {TUPLE: parts} if isinstance(value, tuple) else parts


def _fields(entry: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(
        entry, object_hook=lambda read: tuple(read[TUPLE]) if read.keys() == {TUPLE} else read
    )
    return fields


@functools.lru_cache(maxsize=8)
def _dataset(task: str, config: str) -> "ProceduralDataset":
    """Return the package's data set of a task with a config in JSON. Raises UserError."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, 3, 0.4)
        hint = f"nearest: {', '.join(near)}" if near else f"it has {len(DATASETS)}, from {min(DATASETS)} on"
        raise UserError(f"data.reasoning_gym.task: {task} is no task of reasoning-gym; {hint}")
    options = json.loads(config)
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"data.reasoning_gym.config: {task} has no {unknown[0]}; it has {', '.join(known)}")
    try:
        return create_dataset(task, **options)
    except Exception as error:  # asserts, and whatever a value of another type leads to
        raise UserError(f"data.reasoning_gym.config: {task}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":  # by rlhf/data/source.py, in a process where each text has the same hash every time
    write(**json.loads(sys.argv[1]))
