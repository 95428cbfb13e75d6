"""The world of additions: right answers, no question twice, and the same bytes for the same arguments."""

import re
from typing import Any

from rlhf.data.load import divide_rows
from rlhf.data.source import read_source
from rlhf.data.worlds import additions
from tests.helpers import small
from tests.lines import read_all_lines

SIZES: dict[str, Any] = {"prompts": 60, "demonstrations": 20, "largest": 9}


def test_the_answers_are_right_and_no_question_comes_twice(tmp_path):
    additions.write(tmp_path, seed=0, **SIZES)
    prompts, demonstrations = (read_all_lines(tmp_path / name) for name in ("prompts.jsonl", "demonstrations.jsonl"))
    rows = [(row["prompt"], row["answer"]) for row in prompts]
    rows += [(row["instruction"], int(row["output"])) for row in demonstrations]
    assert len(prompts) == 60 and len({question for question, _ in rows}) == 80
    for question, right in rows:
        a, b = map(int, re.findall(r"\d+", question))
        assert a + b == right and 1 <= min(a, b) <= max(a, b) <= 9


def test_files_repeat_and_change_with_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        additions.write(tmp_path / name, seed=seed, **SIZES)
    a, b, c = ((tmp_path / name / "prompts.jsonl").read_bytes() for name in "abc")
    assert a == b != c


def test_the_rows_of_a_recipe_have_answers_on_both_sides(tmp_path):
    recipe = small(data__source="additions", data__additions={**SIZES, "demonstrations": 0}).recipe
    corpus = divide_rows(read_source(recipe, tmp_path), recipe)
    prompts, answers = corpus.prompts("grpo"), corpus.right_answers()
    assert prompts.train and prompts.test and not {*prompts.train} & {*prompts.test}
    assert all(prompt in answers for prompt in (*prompts.train, *prompts.test)) and not len(corpus.examples)
