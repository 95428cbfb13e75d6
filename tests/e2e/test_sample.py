"""`rlhf sample`: answers to prompts of one's own, as an evaluation samples and scores them; and pairs made of them."""

import json
import time
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import pytest

from rlhf.data import formats
from rlhf.evaluation import own_prompts
from rlhf.rating import store
from tests.e2e.judges import parts, stubs
from tests.helpers import RECIPE, beside, rlhf, run_stages, small
from tests.lines import read_intact_lines


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    out = beside(trained, tmp_path_factory.mktemp("sample"), "pretrain", "sft", "rm")
    run_stages(small(evaluate__num_samples=2, evaluate__max_samples=4, ppo__steps=2), out, "ppo", "evaluate")
    return out / RECIPE.parent.name / RECIPE.name


@pytest.fixture(scope="module")
def heldout(run, tmp_path_factory):
    """What the evaluation has sampled, and its prompts as a file."""
    rows = read_intact_lines(run / "evaluate/samples.jsonl")
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts = dict.fromkeys(row["prompt"] for row in rows)
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return rows, file


def test_the_answers_are_those_of_the_evaluation(run, heldout, monkeypatch, capsys, tmp_path):
    rows, file = heldout
    options = ("--n", 2, "--to", tmp_path / "answers.jsonl", "--page", tmp_path / "page.html")
    code, out, err = rlhf(monkeypatch, capsys, "sample", run, "--prompts", file, *options)
    assert code == 0, err
    ours = read_intact_lines(tmp_path / "answers.jsonl")
    for row in rows:
        for policy in ("base", "sft", "ppo"):
            row[policy].pop("true_reward")
    assert ours == rows
    assert out.count("Person:") == len(rows) / 2
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="sample"') == len(rows) / 2 and page.count(f"{rows[-1]['ppo']['score']:.3f}") >= 1


def test_prompts_are_lines_of_a_text_or_rows_of_data(run, monkeypatch, capsys, tmp_path):
    """Each once; one that repeats another is counted, and so is one that is cut."""
    text, data = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text(f"Hi, you; there?\n\n  two {'words ' * 300}\nHi, you; there?\n")
    data.write_text('{"prompt": "Hi, you; there?", "chosen": "a", "rejected": "b"}\n')
    assert own_prompts.read(text).prompts[:1] == own_prompts.read(data).prompts
    code, out, err = rlhf(monkeypatch, capsys, "sample", run, "--prompts", text, "--stages", "sft,base", "--tokens", 2)
    assert (code, out.count("Person:")) == (0, 2) and "ppo" not in out and out.index("base") < out.index("sft")
    cut = "1 prompt cut to the last 192 tokens (evaluate.max_prompt_length)"
    assert err == f"{text}: 1 repeated prompt left out\n{cut}\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("\n \n", (), "p.txt: no prompts; write one on each line"),
        ("one", ("--stages", "ppo dop"), "'dop' is none of base, sft, ppo"),
        ("one", ("--stages", "dpo"), "dpo has not been run"),
        ("one", ("--page", "p.txt"), "p.txt is the same file as p.txt, which is read"),
        ("one", ("--page", "x.jsonl", "--to", "x.jsonl"), "--to and --page name the same file"),
        ("one", ("--n", "0"), "0 is not in the range"),
    ],
)
def test_what_cannot_be_sampled_is_refused(run, monkeypatch, capsys, tmp_path, content, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text(content)
    code, _, err = rlhf(monkeypatch, capsys, "sample", run, "--prompts", "p.txt", *options)
    assert code and message in err and len(err.splitlines()) == 1


ANSWERS = {"good": 2.0, "fair": 1.0, "bad": -1.0, "": 9.0}  # with their scores; an empty answer is none


def answered(file: Path, answers: Mapping[str, float | None] = ANSWERS, **line: object) -> None:
    """Write the answers to two prompts, one on each line; the second prompt has only one."""
    rows = [("one", text, score) for text, score in answers.items()] + [("one", "good", 0.0), ("two", "fair", 1.0)]
    content = [
        {"step": 0, "sample": n, "prompt": f"\n\nHuman: {p}\n\nAssistant:", "sft": {"response": a, "score": s}} | line
        for n, (p, a, s) in enumerate(rows)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in content))


@pytest.mark.parametrize("how", ["best_worst", "all"])
def test_pairs_follow_the_scores(monkeypatch, capsys, tmp_path, how):
    answered(tmp_path / "a.jsonl")
    to = tmp_path / "pairs.jsonl"
    code, out, err = rlhf(monkeypatch, capsys, "data", "pairs", tmp_path / "a.jsonl", "--rated", how, "--to", to)
    assert code == 0, err
    rows = [(row["chosen"], row["rejected"], row["margin"]) for row in read_intact_lines(to)]
    assert rows == [
        (a, b, ANSWERS[a] - ANSWERS[b])
        for a, b in permutations(list(ANSWERS)[:3], 2)
        if ANSWERS[a] > ANSWERS[b] and (how == "all" or (a, b) == ("good", "bad"))
    ]
    assert "1 prompt with fewer than two different answers" in out
    assert [pair.margin for pair in formats.read([to]).pairs] == [
        margin for *_, margin in rows
    ]  # as training reads them


def test_a_judge_ranks_by_its_wins_and_is_asked_once(monkeypatch, capsys, tmp_path):
    """Of an endpoint that prefers the first answer shown every pair is a tie; nothing is left to pair then."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    answered(tmp_path / "a.jsonl", dict.fromkeys(ANSWERS))
    to, ranks = tmp_path / "pairs.jsonl", ["good", "fair", "bad", "4", "5"]

    def honest(question: str, times: int) -> str:
        _, first, second = parts(question)
        return "A" if ranks.index(first) < ranks.index(second) else "B"

    with stubs() as start:
        server = start(honest)
        options = ("--url", server.url, "--model", "m", "--to", to)
        for _ in range(2):
            code, out, err = rlhf(monkeypatch, capsys, "data", "pairs", tmp_path / "a.jsonl", *options)
            assert code == 0 and "1 pair of the best and the worst by judge:m" in out, err
            (row,) = read_intact_lines(to)
            assert (row["chosen"], row["rejected"], row["margin"]) == ("good", "bad", 1.0)
            assert len(server.about_pairs()) == 6
        assert len(store.current_ratings(tmp_path / "pairs.jsonl.ratings")) == 3
        biased = start(lambda question, times: "A")
        options = ("--url", biased.url, "--model", "other", "--to", to)
        code, _, err = rlhf(monkeypatch, capsys, "data", "pairs", tmp_path / "a.jsonl", *options)
        assert code == 1 and "no pairs: 1 prompt with rated answers: 0 pairs" in err and "1 tie left out" in err


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"sft": "text without a score"}, (), "no answer has a score"),
        ({}, ("--policy", "ppo"), "no answers of 'ppo'; it has those of sft"),
        ({}, ("--url", "http://127.0.0.1:1/v1"), "--url and --model name a judge together"),
        ({"prompt": "<s>[INST] One? [/INST]"}, (), "cannot be read back"),
    ],
)
def test_answers_that_cannot_be_ranked_are_refused(monkeypatch, capsys, tmp_path, line, options, message):
    answered(tmp_path / "a.jsonl", **line)
    words = ("data", "pairs", tmp_path / "a.jsonl", "--to", tmp_path / "pairs.jsonl", *options)
    code, _, err = rlhf(monkeypatch, capsys, *words)
    assert code and message in err and len(err.splitlines()) == 1 and not (tmp_path / "pairs.jsonl").exists()
