"""Tasks of reasoning-gym: the same questions everywhere, answers that their verifier takes, one line for mistakes."""

import json
import re
from typing import Any

import pytest

from rlhf.data.load import divide_rows
from rlhf.data.rows import PromptOnly, of_kind
from rlhf.data.source import read_source
from rlhf.data.worlds import gym
from rlhf.errors import UserError
from rlhf.packages import package_version
from rlhf.recipe import Recipe
from rlhf.stages.online.rewards import find
from tests.helpers import small
from tests.lines import read_all_lines

VERSION = package_version("reasoning-gym")
needs_package = pytest.mark.skipif(VERSION is None, reason="reasoning-gym comes with the tasks extra")
EASY: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
SLOW = {"futoshiki", "knight_swap", "zebra_puzzles", "intermediate_integration", "composite"}  # or a mixture of others


def recipe(**changes: object) -> Recipe:
    """Return a recipe with sums of two numbers."""
    section = {"version": VERSION or "0.1.25", "task": "chain_sum", "size": 60, "config": EASY} | changes
    return small(data__source="reasoning_gym", data__reasoning_gym=section).recipe


@needs_package
def test_training_and_held_out_questions_differ_and_each_reward_gets_its_answer(tmp_path):
    corpus = divide_rows(read_source(recipe(), tmp_path), recipe())
    prompts, entries = corpus.prompts("grpo"), corpus.right_answers()
    assert prompts.train and prompts.test and not {*prompts.train} & {*prompts.test}
    assert len(entries) == 60
    prompt, entry = next((p, e) for p, e in entries.items() if len(gym.right_answer(e)) > 1)
    right = gym.right_answer(entry)
    a, operation, b = prompt[-1].content.split(": ")[1].split()[:3]
    assert int(right) == (int(a) + int(b) if operation == "+" else int(a) - int(b))

    answers = [right, f"It is {right}", "none"]
    whole, last, exact, numeric = (
        find(name, "here")({"prompts": [""] * 3, "completions": answers, "answer": [entry] * 3})
        for name in ("reasoning_gym", r"reasoning_gym(extract='-?\d+')", "exact_answer", "numeric_answer")
    )
    assert whole == [1, len(right) / len(answers[1]), 0] and last == numeric == [1, 1, 0] and exact == [1, 0, 0]
    above = find("reasoning_gym(threshold=0.2)", "here")
    assert above({"prompts": [""] * 3, "completions": answers, "answer": [entry] * 3}) == [1, 1, 0]
    with pytest.raises(UserError, match="reasoning_gym"):
        above({"prompts": [""], "completions": [right], "answer": [right]})


@needs_package
def test_questions_do_not_depend_on_the_hashes_of_text(tmp_path, monkeypatch):
    written = []
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        for task in ("word_ladder", "isomorphic_strings"):  # they take words from sets
            parsed = read_source(recipe(task=task, config={}, size=3), tmp_path / seed)
            written.append([row.prompt for row in of_kind(parsed.rows, PromptOnly)])
    assert written[:2] == written[2:]


@needs_package
def test_an_entry_of_every_task_is_scored_as_its_item(tmp_path):
    from reasoning_gym.factory import DATASETS

    for task in sorted({*DATASETS} - SLOW):
        gym.write(str(tmp_path), seed=3, task=task, config={}, size=2)
        for row in read_all_lines(tmp_path / gym.FILE):
            right = gym.right_answer(row["answer"])
            assert not right or gym.score(row["answer"], right) == 1, task
            assert all(0 <= gym.score(row["answer"], junk) <= 1 for junk in ("", "hello", "[[1,2],[3]]", None)), task


@needs_package
def test_a_fraction_that_a_verifier_does_not_read_is_kept_as_text(tmp_path):
    gym.write(str(tmp_path), seed=0, task="gsm_symbolic", config={}, size=100)  # the package's own metadata has some
    metadata = [json.loads(row["answer"])["metadata"]["variables"] for row in read_all_lines(tmp_path / gym.FILE)]
    assert any(isinstance(value, str) and re.fullmatch(r"\d+/\d+", value) for v in metadata for value in v.values())


@needs_package
def test_questions_whose_right_answer_the_verifier_refuses_are_left_out(tmp_path, monkeypatch):
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    monkeypatch.setattr(ChainSumDataset, "score_answer", lambda _, answer, entry: float(int(answer) % 2))
    gym.write(str(tmp_path), seed=0, task="chain_sum", config=EASY, size=20)
    rows = read_all_lines(tmp_path / gym.FILE)
    assert len(rows) == 20 and all(int(gym.right_answer(row["answer"])) % 2 for row in rows)
