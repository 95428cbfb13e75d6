"""`rlhf chat`: the trained model's own answers, as one conversation, and nothing that a terminal would obey."""

import io
import sys
from typing import Any

import pytest
import torch

from rlhf.cli.chat import HELP, greeting, talk
from rlhf.data.rows import Message
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import as_yaml
from rlhf.rollout import speaker as chat
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from rlhf.run.directory import StageRun
from rlhf.terminal import harmless
from tests.helpers import RECIPE, SMALL, beside, rlhf, run_stages, small


@pytest.fixture(scope="module")
def done(trained, tmp_path_factory):
    out = beside(trained, tmp_path_factory.mktemp("chat"), "pretrain", "sft")
    run_stages(small(merge__stage="sft"), out, "merge")
    return out


class Silent(chat.Speaker):
    """A speaker without a model."""

    def __init__(self):
        pass


def said(done, monkeypatch, capsys, text: str, *options: str) -> tuple[int, str, str]:
    changes = [part for key, value in SMALL.items() for part in ("--set", f"{key}={as_yaml(value)}")]
    changes += ["--set", "merge.stage=sft", "--out", str(done), *options]
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return rlhf(monkeypatch, capsys, "chat", "--recipe", RECIPE, *changes)


@pytest.mark.parametrize("stage", ["sft", "merge"])
def test_the_likeliest_answer_is_the_one_that_evaluation_would_sample(done, monkeypatch, capsys, stage):
    loaded = small(merge__stage="sft")
    run = StageRun(done, loaded, "evaluate")
    tokenizer = load_tokenizer(run.base)
    shared = SharedBase(load_base(run.base, torch.device("cpu")), {"reference": run.run_directory / "sft"})
    shared.roles.activate("reference")
    ids, _ = tokenizer.encode_prompts([(Message("user", "hello there"),)], 64)
    rollout = sample(shared.base, ids, tokenizer, Sampling(64, 9, temperature=0.0, batch_size=1))
    expected = tokenizer.decode(rollout.tokens[0][rollout.mask[0]].tolist())
    code, out, err = said(
        done, monkeypatch, capsys, "hello there\n", "--stage", stage, "--temperature", "0", "--tokens", "9"
    )
    assert code == 0, err
    assert out.strip() == expected.strip()


def test_a_run_directory_says_all_that_the_options_said(done, monkeypatch, capsys):
    sampling = ("--temperature", "0", "--tokens", "9")
    code, expected, _ = said(done, monkeypatch, capsys, "hello there\n", "--stage", "sft", *sampling)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello there\n"))
    run = done / "cpu-tiny/v1/sft"
    assert rlhf(monkeypatch, capsys, "chat", run, *sampling)[:2] == (code, expected) and code == 0


def test_sampling_settings_that_come_with_a_base_do_not_count(done, monkeypatch, capsys):
    def with_penalty(*arguments: Any, **options: Any) -> Any:
        base = load_base(*arguments, **options)
        base.generation_config.repetition_penalty = 50.0
        return base

    line = ("--stage", "sft", "--temperature", "0", "--tokens", "12")
    _, plain, _ = said(done, monkeypatch, capsys, "hello there\n", *line)
    monkeypatch.setattr("rlhf.models.loading.load_base", with_penalty)
    assert said(done, monkeypatch, capsys, "hello there\n", *line)[1] == plain


def test_without_a_stage_the_first_policy_of_the_recipe_answers():
    assert chat.first_policy(small().recipe) == "ppo"
    assert chat.first_policy(small(rm=None, ppo=None, merge__stage="dpo").recipe) == "dpo"
    assert chat.first_policy(small(rm=None, ppo=None, dpo=None, merge=None).recipe) == "sft"


@pytest.mark.parametrize(
    ("temperature", "code"), [("0", 0), ("0.005", 2), ("-1", 2), ("101", 2), ("nan", 2), ("0.01", 0)]
)
def test_a_temperature_is_0_or_within_bounds(done, monkeypatch, capsys, temperature, code):
    outcome = said(done, monkeypatch, capsys, "", "--stage", "sft", "--temperature", temperature)
    assert outcome[0] == code
    assert code == 0 or "0, or from 0.01 to 100" in outcome[2] or "not a finite number" in outcome[2]


def test_a_conversation_is_remembered_until_it_is_not(done, monkeypatch):
    asked: list[list[str]] = []

    class Parrot(Silent):
        def answer(self, messages, temperature, tokens):
            asked.append([m.content for m in messages])
            yield from ("as ", "you say")

    talk(Parrot(), ["one\n", "\n", "two\n", "/new\n", "three\n", "/quit\n", "four\n"], 1.0, 8)
    assert asked == [["one"], ["one", "as you say", "two"], ["three"]]


def test_commands_are_answered_and_not_sent_to_the_model(capsys):
    class Nobody(Silent):
        def answer(self, messages, temperature, tokens):
            raise AssertionError("asked")

    talk(Nobody(), ["/help\n", "/temperature 0\n", "/new\n"], 1.0, 8)
    assert capsys.readouterr().out == f"{HELP}\nthere is no /temperature: {HELP}\n"


def test_the_space_before_an_answer_is_not_shown(capsys):
    class Spaced(Silent):
        def answer(self, messages, temperature, tokens):
            yield from (" ", " Yes", " and no")

    talk(Spaced(), ["one\n"], 1.0, 8)
    assert capsys.readouterr().out == "Yes and no\n"


def test_the_greeting_names_who_answers():
    assert greeting(small(), "ppo", 0.7).startswith("ppo of cpu-tiny v1, temperature 0.7; /new forgets")


def test_a_stage_that_is_not_done_is_named(done, monkeypatch, capsys):
    code, out, err = said(done, monkeypatch, capsys, "hello\n", "--stage", "ppo")
    assert code == 1 and out == ""
    assert err.startswith("error: ppo has not been run (") and "first `rlhf run ppo --with-parents" in err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcode 😀\n\ttab", "plain ünïcode 😀\n\ttab"),
        ("\x1b]0;title\x07\x1b[31mred", "]0;title[31mred"),
        ("a\x00b\x08c\x7fd\x9be", "abcde"),
        ("left \u202eright", "left right"),
    ],
)
def test_control_characters_do_not_reach_the_terminal(text, shown):
    assert harmless(text) == shown
