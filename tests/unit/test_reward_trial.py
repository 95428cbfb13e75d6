"""`rlhf reward`: rewards on real answers and on junk before training."""

import json
import re
from collections.abc import Sequence

import pytest

from rlhf.data.rows import Example, Message, PreferencePair, PromptOnly
from rlhf.stages.online import reward_trial
from tests.helpers import rlhf

REWARDS = """
import asyncio, time
def longer(completions): return [min(len(c), 50) / 50 for c in completions]
def holds(completions, answer): return [float(a in c) for c, a in zip(completions, answer)]
def right(completions, answer): return [float(c == a) for c, a in zip(completions, answer)]
def tagged(completions): return [float(c.startswith("<a>")) for c in completions]
async def unsure(completions): return [None if c == "" else 1.0 - (c[-1] == '>') / 2 for c in completions]
def silent(completions): return [None for _ in completions]
def tokens(completion_ids): return [float(len(ids)) for ids in completion_ids]
def raises(completions): return [1 / len(c) for c in completions]
def slow(completions): time.sleep(0.3 * (completions[0] == "")); return [1.0 - (c == "") for c in completions]
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARDS)
    sums = [{"prompt": f"What is {i} plus {i}?", "answer": 2 * i} for i in range(10, 30)]
    tags = [{"prompt": f"Say {i}.", "completion": f"<a>It is {i}.</a>"} for i in range(10, 30)]
    pairs = [{"prompt": f"Name {i}?", "chosen": f"Gladly, {i}.", "rejected": "No."} for i in range(10, 30)]
    files: dict[str, Sequence[object]] = {"sums": sums, "tags": tags, "pairs": pairs, "asked": [{"prompt": "Hi"}]}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda *arguments: rlhf(monkeypatch, capsys, "reward", *arguments)


@pytest.mark.parametrize(
    ("names", "data", "winning"),
    [
        (
            "mine:longer",
            "sums",
            "endless, repeated, prompt copied, another language, many numbers, answer to another prompt",
        ),
        ("mine:holds", "sums", "many numbers"),
        ("mine:right", "sums", None),
        ("numeric_answer", "sums", None),
        ("mine:tagged", "tags", "form without content, answer to another prompt"),
        (
            "length(most=60)",
            "tags",
            "empty, prompt copied, form without content, another language, answer to another prompt",
        ),
        (
            "mine:unsure",
            "tags",
            "endless, repeated, prompt copied, form without content, another language, many numbers, "
            "answer to another prompt",
        ),
        ("mine:right mine:longer", "sums", None),  # the sum decides: a wrong long answer gets less than a right one
        ("regex(pattern='^Gladly')", "pairs", "answer to another prompt"),
    ],
)
def test_junk_that_gets_as_much_as_real_answers_is_named(command, names, data, winning):
    code, out, err = command(*names.split(), "--data", f"{data}.jsonl", "--rows", "5")
    found = re.search(r"as much as real answers \([\d.-]+\): (.*?)\. A policy", " ".join(out.split()))
    assert (code, found and found[1]) == ((3, winning) if winning else (0, None)), err
    assert ("no junk gets as much as the real answers" in out) == (winning is None)


def test_the_sum_has_the_weights_of_the_recipe_and_the_numbers_those_of_the_function():
    tried = [reward_trial.Tried("a", [1.0, None]), reward_trial.Tried("b", [0.5, 2.0])]
    assert reward_trial.total(tried, {"a": 2.0, "b": -1.0}).numbers == [1.5, None], "no sum without a verdict"
    assert reward_trial.total(tried, {"a": 0.0, "b": -1.0}).numbers == [-0.5, -2.0]


def test_each_kind_of_junk_says_nothing_of_its_own_prompt():
    prompt = (Message("user", "How many legs has a dog?"),)
    rows: list[reward_trial.RowWithPrompt] = [
        PreferencePair(prompt, "<b>A dog has 4 legs.</b>", "Many.", "x:1"),
        Example((Message("user", "你好"),), "你好，朋友。", "x:2"),
        PromptOnly((Message("user", "2 + 2?"),), "x:3", "4"),
        PromptOnly((Message("user", "Hello"),), "x:4"),
    ]
    answers = reward_trial.answers_to(rows)
    of = {(answer.row, answer.kind): answer.text for answer in answers}
    real = {(0, "chosen"), (0, "rejected"), (1, "response"), (2, "right answer")}
    assert {(answer.row, answer.kind) for answer in answers if not answer.junk} == real
    assert of[0, "form without content"] == "<b>x x x 0 x.</b>" and of[2, "form without content"] == "0"
    assert of[0, "answer to another prompt"] == "你好，朋友。" and of[3, "answer to another prompt"] != ""
    assert of[0, "another language"] == reward_trial.CHINESE and of[1, "another language"].startswith("I do not")
    assert of[0, "prompt copied"] == "How many legs has a dog?" and of[0, "empty"] == ""
    assert len(of[0, "endless"].split()) == reward_trial.LONG and "4" not in of[0, "endless"]
    assert (3, "form without content") not in of  # nothing is known of its form
    kinds = [answer.kind for answer in answers]
    assert kinds == sorted(kinds, key=list(dict.fromkeys(kinds)).index)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mine:raises", "--data", "sums.jsonl"), "ZeroDivisionError: division by zero in mine.py:10: def raises"),
        (
            ("mine:right", "--data", "asked.jsonl"),
            'no row of the data has a right answer ({"prompt", "answer"}), which mine:right compares',
        ),
        (("mine:nothere", "--data", "sums.jsonl"), "mine has no function nothere"),
        (("mine:right",), "name REWARDS with --data FILE, or a recipe with --hw or --recipe"),
        (("--data", "sums.jsonl"), "name REWARDS with --data FILE, or a recipe"),
        (("model", "--data", "sums.jsonl"), "model is a recipe's reward model: name the recipe"),
        (("mine:tokens", "--data", "sums.jsonl"), "no tokenizer is at hand"),
    ],
)
def test_what_cannot_be_tried_is_one_line(command, arguments, said):
    code, _, err = command(*arguments)
    assert code in (1, 2) and said in err and "Traceback" not in err


def test_the_longest_call_and_what_has_no_verdict_are_said(command):
    code, out, err = command("mine:slow", "mine:silent", "--data", "sums.jsonl", "--rows", "3")
    assert (code, "it has a verdict on none of the data's answers" in out) == (0, True), err  # nor has the sum
    assert "no verdict" in out and "mine:slow: its longest call took 0.3" in out and "3 responses (empty)" in out
    code, out, err = command("mine:longer", "--data", "asked.jsonl")
    assert (code, "it has a verdict on none of the data's answers" in out) == (0, True), err
