"""`rlhf sample` and `rlhf chat`: answers as an evaluation samples and scores them."""

import io
import json
import sys

import pytest

from rlhf.cli.chat import talk
from rlhf.data.transcripts import parse_hh
from rlhf.rollout import speaker as chat
from tests.helpers import rlhf, small
from tests.lines import read_intact_lines


@pytest.fixture(scope="module")
def run(chain):
    return chain / "cpu-tiny/v1"


def test_the_answers_are_those_of_the_evaluation(run, monkeypatch, capsys, tmp_path):
    rows = read_intact_lines(run / "evaluate/samples.jsonl")
    file = tmp_path / "prompts.jsonl"
    prompts = [
        [{"role": turn.role, "content": turn.content} for turn in parse_hh(row["prompt"]) if turn.content.strip()]
        for row in rows
    ]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = ("--to", tmp_path / "answers.jsonl")
    code, _, err = rlhf(monkeypatch, capsys, "sample", run, "--prompts", file, *options)
    assert code == 0, err
    policies = ("base", "sft", "ppo", "dpo")
    expected = [[row[policy]["response"] for policy in policies] for row in rows]
    answers = read_intact_lines(tmp_path / "answers.jsonl")
    assert [[row[policy]["response"] for policy in policies] for row in answers] == expected
    assert all(a["ppo"]["score"] == b["ppo"]["score"] for a, b in zip(answers, rows, strict=True))


@pytest.mark.parametrize(
    ("content", "options", "named"),
    [
        ("\n \n", (), "p.txt"),
        ("one", ("--stages", "dop"), "dop"),
        ("one", ("--to", "p.txt"), "p.txt"),
        ("one", ("--n", "0"), "--n"),
    ],
)
def test_what_cannot_be_sampled_is_refused(run, monkeypatch, capsys, tmp_path, content, options, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text(content)
    code, _, err = rlhf(monkeypatch, capsys, "sample", run, "--prompts", "p.txt", *options)
    assert code and named in err and len(err.splitlines()) == 1


def test_chat_gives_the_likeliest_answer_of_a_sample(run, monkeypatch, capsys, tmp_path):
    (tmp_path / "p.txt").write_text("hello there\n")
    likeliest = ("--temperature", "0")
    options = ("--stages", "ppo", "--to", tmp_path / "a.jsonl", *likeliest)
    code, _, err = rlhf(monkeypatch, capsys, "sample", run, "--prompts", tmp_path / "p.txt", *options)
    assert code == 0, err
    (row,) = read_intact_lines(tmp_path / "a.jsonl")
    for stage in ("ppo", "merge"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello there\n"))
        code, out, err = rlhf(monkeypatch, capsys, "chat", run / stage, *likeliest)
        assert (code, out.strip()) == (0, row["ppo"]["response"].strip()), err


def test_without_a_stage_the_first_policy_of_the_recipe_answers():
    assert chat.stage_of(None, small().recipe) == "ppo"
    assert chat.stage_of(None, small(rm=None, ppo=None, merge__stage="dpo").recipe) == "dpo"
    assert chat.stage_of(None, small(rm=None, ppo=None, dpo=None, merge=None).recipe) == "sft"


def test_a_conversation_is_remembered_until_it_is_not(capsys):
    asked: list[list[str]] = []

    class Parrot(chat.Speaker):
        def __init__(self):
            pass

        def answer(self, messages, temperature, tokens, show):
            asked.append([m.content for m in messages])
            for piece in ("as ", "you say"):
                show(piece)
            return "as you say"

    talk(Parrot(), ["one\n", "\n", "two\n", "/new\n", "three\n", "/quit\n", "four\n"], 1.0, 8)
    assert asked == [["one"], ["one", "as you say", "two"], ["three"]]
    assert "as you say\n" in capsys.readouterr().out
