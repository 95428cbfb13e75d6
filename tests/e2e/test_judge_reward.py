"""The reward `judge`, against endpoints whose marks are known."""

import json
import time
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.stages.online.judge_reward import EASY, JudgeReward, mark
from tests.e2e.judges import Reply, Stub, parts, stubs
from tests.helpers import beside, grouped, run_stages
from tests.lines import read_intact_lines


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def stub():
    with stubs() as start:
        yield start


def priced(text: str) -> Reply:
    """A reply with the tokens of question and reply, as endpoints report them."""
    usage = {"prompt_tokens": 100, "completion_tokens": 2}
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage})


def kind(question: str, times: int) -> Reply:
    """The number of words of the answer, up to 9."""
    if question == EASY:
        return "1"
    return priced(str(min(len(parts(question)[1].split()), 9)))


def judge(url: str, **options: Any) -> JudgeReward:
    return JudgeReward(rubric="Long is good.", url=url, model="m", **options)


def about(server: Stub) -> list[str]:
    return [question for question in server.asked if question != EASY]


def test_marks_are_asked_for_once_also_by_a_resumed_run(stub, tmp_path):
    server = stub(kind)
    first = judge(server.url)
    first.begin(tmp_path, "cpu")
    assert first(["p", "p", "q", "q"], ["a b", "a b", "a b c", " "]) == [0.2, 0.2, 0.3, 0.0]
    assert len(about(server)) == 2, "two are the same, and an empty response is not worth a question"
    lines = read_intact_lines(tmp_path / "judged.jsonl")
    assert [(line["tokens_in"], line["tokens_out"]) for line in lines] == [(100, 2)] * 2
    other = judge(server.url, most=9)  # another judge, in the same file
    other.begin(tmp_path, "cpu")
    assert other(["p"], ["a b"]) == [pytest.approx(2 / 9)]
    with open(tmp_path / "judged.jsonl", "a") as file:
        file.write('{"judge": "cut off by a cr')
    again = judge(server.url)
    again.begin(tmp_path, "cpu")
    assert again(["p", "q"], ["a b", "a b c d"]) == [0.2, 0.4]
    assert len(about(server)) == 4 == len(read_intact_lines(tmp_path / "judged.jsonl"))
    third = judge(server.url)
    third.begin(tmp_path, "cpu")
    assert third(["q"], ["a b c d"]) == [0.4] and len(about(server)) == 4


def test_what_gives_no_mark_has_no_verdict(stub):
    def mind(question: str, times: int) -> Reply:
        answer = "" if question == EASY else parts(question)[1]
        replies: dict[str, Reply] = {"refused": (400, "{}"), "away": (503, "{}"), "chatty": "I like it.", "": "1"}
        return replies.get(answer, "7")

    server = stub(mind)
    function = judge(server.url)
    assert function(["p"] * 4, ["refused", "away", "chatty", "fine"]) == [None, None, None, 0.7]
    with pytest.raises(UserError, match=r"503"):
        function(["p"], ["away"])


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("7", 7),
        ("It is to the point.\n**Mark: 8**", 8),
        ("<think>3 or 4?</think>\n4.5", 4.5),
        ("11", None),
        ("between 3 and 4", None),
        ("-3", None),
        ("<think>so far 3", None),
        ("", None),
    ],
)
def test_the_mark_of_a_reply(reply, expected):
    assert mark(reply, 10) == expected


def test_grpo_learns_from_a_judge_and_its_questions_are_counted(stub, trained, tmp_path):
    server = stub(kind)
    name = f"judge(rubric='Long is good.', url='{server.url}', model='m')"
    group = {"reward_funcs": [name], "normalize_scores": False, "steps": 2, "save_steps": 2, "eval_steps": 2}
    out = beside(trained, tmp_path, "pretrain", "sft")
    summary = run_stages(grouped("grpo", group), out, "grpo")
    assert len(read_intact_lines(out / "cpu-tiny/v1/grpo/judged.jsonl")) == len(about(server)) > 8
    assert summary["metrics"]["reward_judge"] > 0
