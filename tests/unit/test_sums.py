"""The world of sums: right answers, their share, the split, and the same bytes for the same arguments."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.corpus import Corpus
from rlhf.data.load import divide_rows
from rlhf.data.rows import Document, of_kind
from rlhf.data.source import read_source
from rlhf.data.worlds import sums
from rlhf.stages.online.rewards import find
from tests.helpers import small
from tests.lines import read_all_lines

SIZES: dict[str, Any] = {"documents": 400, "demonstrations": 50, "pairs": 50, "accuracy": 0.5, "largest": 9}


def test_the_right_answer_is_the_result_of_its_question(tmp_path):
    """Read back from the words alone."""
    known = sums.questions(9)
    assert len(known) == (100 + 55) * 4 * 6
    for question, right in random.Random(0).sample(list(known.items()), 300):
        a, b = map(int, re.findall(r"\d+", question))
        if "away from" in question:
            a, b = b, a
        assert right == (a - b if re.search("minus|away|less", question) else a + b) and right >= 0


@pytest.mark.parametrize("accuracy", [0.2, 0.9])
def test_the_share_of_right_responses(accuracy):
    rng = random.Random(1)
    reward = find("numeric_answer", "here")
    texts = [sums.response(rng, 7, accuracy, 9) for _ in range(2000)]
    rewards = reward({"prompts": [""] * 2000, "completions": texts, "answer": ["7"] * 2000})
    right = sum(number == 1 for number in rewards)
    assert right / 2000 == pytest.approx(accuracy, abs=0.04)


def test_files_repeat_and_do_not_depend_on_each_other(tmp_path):
    for name, changes in (("a", {}), ("b", {}), ("c", {"documents": 500}), ("d", {"seed": 1})):
        arguments: dict[str, Any] = {"seed": 0} | SIZES | changes
        sums.write(tmp_path / name, **arguments)
    a, b, c, d = (tmp_path / name for name in "abcd")
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in sums.FILES)
    assert (c / "documents.jsonl").read_bytes().startswith((a / "documents.jsonl").read_bytes())
    assert (c / "pairs.jsonl").read_bytes() == (a / "pairs.jsonl").read_bytes()
    assert (d / "documents.jsonl").read_bytes() != (a / "documents.jsonl").read_bytes()
    assert len(read_all_lines(a / "prompts.jsonl")) == len(sums.questions(9))


def test_rows_that_several_stages_need_at_once_are_made_once(tmp_path, monkeypatch):
    made: list[Path] = []
    write = sums.write

    def slowly(directory: Path, **options: Any) -> list[Path]:
        made.append(directory)
        (directory / "documents.jsonl").write_text("the beginning")
        time.sleep(0.2)
        return write(directory, **options)

    monkeypatch.setattr(sums, "write", slowly)
    recipe = small(data__source="sums", data__sums=SIZES).recipe
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: len(of_kind(read_source(recipe, tmp_path).rows, Document)), range(4)))
    assert rows == [400] * 4 and len(made) == 1


def test_no_question_is_on_both_sides(tmp_path):
    from rlhf.data import formats

    sums.write(tmp_path, seed=0, **SIZES)
    read = formats.read([tmp_path / name for name in sums.FILES])
    corpus: Corpus = divide_rows(read, small(data__source="sums", data__sums=SIZES).recipe)
    prompts = corpus.prompts("grpo")
    assert not {*prompts.train} & {*prompts.test}
    answers = corpus.right_answers()
    assert all(prompt in answers for prompt in (*prompts.train, *prompts.test))
    demonstrations = {row.prompt for row in corpus.demonstrations().train}
    assert not demonstrations & {*prompts.test}


def test_worked_answers_of_questions_are_imitated_and_compared_with(tmp_path):
    """Rows as GSM8K has them: demonstrations for SFT, and prompts with answers for rewards."""
    from rlhf.data import formats

    lines = [{"question": f"What is {n} plus 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(20)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus: Corpus = divide_rows(formats.read([file]), small(data__heldout_fraction=0.3).recipe)
    prompts, answers = corpus.prompts("grpo"), corpus.right_answers()
    assert len(corpus.demonstrations()) == len(answers) == 20 and prompts.test
    assert {answers[prompt] for prompt in (*prompts.train, *prompts.test)} == {line["answer"] for line in lines}
