"""What the base is asked before a recipe is written: rewards get all that they get in training."""

from types import SimpleNamespace
from typing import Any, cast

from rlhf.data.rows import Message
from rlhf.models import loading
from rlhf.new import probe
from rlhf.new.data import Asked
from rlhf.process.guest.host import ended_afterwards
from rlhf.rollout import engine
from rlhf.stages.online import reward_functions

OF_MESSAGES = """
def short(messages, completions, completion_ids, answer):
    assert [m["content"] for of_one in messages for m in of_one] == prompts_of(answer)
    return [float(len(ids) <= 16) for ids in completion_ids]


def prompts_of(answer):
    return [f"What is {number}?" for number in answer]
"""


def test_a_reward_of_messages_is_given_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_messages.py").write_text(OF_MESSAGES)
    monkeypatch.setattr(loading, "load_base", lambda *_: None)
    responses = SimpleNamespace(response_ids=[[7] * 20, [7] * 4])
    monkeypatch.setattr(engine, "sample", lambda *_, **__: responses)
    tokenizer = SimpleNamespace(
        encode_prompts=lambda prompts, longest: ([[1] for _ in prompts], 0),
        prompt_text=lambda prompt: prompt[0].content,
        decode=lambda ids: "x" * len(ids),
        eos_id=0,
    )
    asked = [Asked((Message("user", f"What is {n}?"),), str(n)) for n in (1, 2)]
    with ended_afterwards():
        functions = [reward_functions.find("my_messages:short", "--reward")]
        found = probe.ask(cast(Any, None), cast(Any, tokenizer), functions, asked, 8, 32)
    assert found.rewards == {16: 1.0, 32: 0.5} and found.tokens == 16
