"""What the base is asked before a recipe is written: rewards get all that they get in training."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhf.data.rows import Message
from rlhf.models import loading
from rlhf.new import probe
from rlhf.new.data import Asked
from rlhf.rollout import engine
from rlhf.stages.online.rewards import find

OF_MESSAGES = """
def short(messages, completions, completion_ids, answer):
    assert [m["content"] for of_one in messages for m in of_one] == prompts_of(answer)
    return [float(len(ids) <= 16) for ids in completion_ids]


def prompts_of(answer):
    return [f"What is {number}?" for number in answer]
"""


TOKENIZER: Any = SimpleNamespace(
    encode_prompts=lambda prompts, longest: ([[1] for _ in prompts], 0),
    prompt_text=lambda prompt: prompt[0].content,
    decode=lambda ids: "x" * len(ids),
    eos_id=0,
)
ASKED = [Asked((Message("user", f"What is {n}?"),), str(n)) for n in (1, 2)]


def test_a_reward_of_messages_is_given_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_messages.py").write_text(OF_MESSAGES)
    monkeypatch.setattr(loading, "load_base", lambda *_: None)
    responses = SimpleNamespace(response_ids=[[7] * 20, [7] * 4])
    monkeypatch.setattr(engine, "sample", lambda *_, **__: responses)
    functions = [find("my_messages:short", "--reward")]
    found = probe.ask(cast(Any, None), TOKENIZER, functions, ASKED, 8, 32)
    assert found is not None
    assert found.rewards == {16: 1.0, 32: 0.5} and found.tokens == 16


@pytest.mark.parametrize(
    ("seconds", "short", "rewards", "tokens"),
    [
        (1000.0, 4, {16: 1.0, 32: 1.0, 64: 1.0}, 16),
        (40.0, 4, {16: 1.0, 32: 1.0}, 16),  # which all answers reach by then
        (20.0, 60, {16: 0.0}, 64),  # and nothing shows that fewer are enough
        (13.0, 4, None, None),
    ],
)
def test_a_base_is_asked_no_longer_than_it_may_be(monkeypatch, seconds, short, rewards, tokens):
    """Each token of both answers takes a second, and a reward is for answers of `short` tokens or more."""
    clock = [0.0]

    def sample(base, prompts, tokenizer, sampling, done):
        for step in range(1, sampling.response_length):
            clock[0] += 1
            if done(step / sampling.response_length):
                break
        return SimpleNamespace(response_ids=[[7] * sampling.response_length] * 2)

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(loading, "load_base", lambda *_: None)
    monkeypatch.setattr(engine, "sample", sample)
    reward: Any = lambda texts, completions, *_: [float(len(text) >= short) for text in completions]  # noqa: E731
    found = probe.ask(cast(Any, None), TOKENIZER, [reward], ASKED, 8, 64, seconds)
    assert clock[0] == min(seconds + 1, 63)
    assert (found and found.rewards, found and found.tokens) == (rewards, tokens)
    assert found is None or ("had no time for responses of 64 tokens" in found.words) == (64 not in found.rewards)
