"""How a step of RLOO and GRPO is wired: responses, prompts, scores, replacements; and how a run adapts its beta."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlhf.data.corpus import Prompt
from rlhf.data.rows import Message
from rlhf.errors import UserError
from rlhf.evaluation.policies import PolicySamples
from rlhf.models.loading import load_tokenizer
from rlhf.objectives.kl import adapt
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun
from rlhf.stages.online.reward_sum import RewardSum
from rlhf.stages.online.scores import reward_scores, score
from rlhf.stages.online.session import Session, require_verdicts
from tests.helpers import beside, corpus_of, grouped, run_stages, small
from tests.invariants.group_learner import new_learner
from tests.lines import read_intact_lines
from tests.rollouts import LENGTHS, made_up_rollout

PROMPTS: list[Prompt] = [(Message("user", f"Question {n}?"),) for n in range(10)]
ANSWERS = {prompt: str(n) for n, prompt in enumerate(PROMPTS)}
PENALTY = 0.7


@pytest.fixture(scope="module")
def run(trained) -> StageRun:
    return StageRun(trained, grouped("rloo"), "rloo")


@pytest.fixture(scope="module")
def tokenizer(run):
    return load_tokenizer(run.base)


def test_responses_are_scored_row_by_row(run, tokenizer):
    """Of two prompts with four responses each, one of them cut off."""
    changes: dict[str, Any] = {"reward_funcs": ["model", "tests.own_rewards:answer_and_length"]}
    changes |= {"reward_weights": [0.5, 2.0], "missing_eos_penalty": PENALTY}
    learner = new_learner(run, "rloo", **changes)
    learner.shared.add_reward(run.require("rm") / "adapter")
    ids, _ = tokenizer.encode_prompts([PROMPTS[7]] * 4 + [PROMPTS[2]] * 4, learner.options.max_prompt_length)
    rollout = made_up_rollout(ids, tokenizer, torch.Generator().manual_seed(1))
    parts = {"train": PROMPTS, "prompts_of": lambda step: [7, 2], "options": learner.options, "tokenizer": tokenizer}
    parts["rewards"] = RewardSum("rloo", [learner.options], corpus_of(ANSWERS), tokenizer)
    functions = Session.function_rewards(cast(Session, SimpleNamespace(**parts)), 0, rollout)
    norm = learner.score_norm
    scored = score(learner.shared, rollout, learner.options, norm, functions)

    model = reward_scores(learner.shared, rollout, 8).tolist()
    assert norm.sd != 1 and norm.mean != 0
    for row, length in enumerate(LENGTHS):
        text = tokenizer.decode(rollout.tokens[row, :length].tolist())
        function = [7, 2][row // 4] + len(text) / 1000
        assert scored.by_name["model"][row].item() == pytest.approx(model[row], rel=1e-5)
        assert scored.by_name["tests.own_rewards.answer_and_length"][row].item() == pytest.approx(function, rel=1e-6)
        assert scored.raw[row].item() == pytest.approx(0.5 * model[row] + 2 * function, rel=1e-5)
        shaped = 0.5 * (model[row] - norm.mean) / norm.sd + 2 * function
        shaped -= PENALTY if row == 1 else 0  # the second response has no EOS
        assert scored.shaped[row].item() == pytest.approx(shaped, rel=1e-5, abs=1e-6), row


def test_a_start_of_which_nothing_is_judged_is_refused():
    """Such as functions of two tasks in one sum, each without a verdict on the other's answers."""
    judged = {
        "score": torch.full((2,), torch.nan),
        "reward_sums": torch.tensor([1.0, torch.nan]),
        "reward_code": torch.tensor([torch.nan, 0.0]),
    }
    samples = replace(PolicySamples.unjudged(["a", "b"]), judged=judged)
    with pytest.raises(UserError, match=r"^grpo\.reward_funcs: "):
        require_verdicts("grpo", samples)


@pytest.mark.parametrize("copies", [1, 4])
def test_responses_are_sampled_in_the_order_of_their_prompts(run, tokenizer, copies):
    learner = new_learner(run, "rloo", num_generations=max(copies, 2))
    ids, _ = tokenizer.encode_prompts(PROMPTS, learner.options.max_prompt_length)
    indices = [7, 2, 5]
    sizes = {"max_prompt_length": 64, "response_length": 12, "temperature": 1.0, "rollout_batch_size": 8}
    options = SimpleNamespace(samples_per_prompt=copies, **sizes)
    parts = {"ids": ids, "options": options, "client": None, "prompts_of": lambda step: indices}
    parts |= {"shared": learner.shared, "tokenizer": tokenizer, "phase": lambda name: nullcontext()}
    rollout = Session.sample(cast(Session, SimpleNamespace(**parts)), 0)
    found = [row[:n].tolist() for row, n in zip(rollout.ids, rollout.prompt_length, strict=True)]
    assert found == [ids[i] for i in indices for _ in range(copies)]


@pytest.mark.parametrize("stage", ["ppo", "rloo", "grpo"])
def test_the_kl_coefficient_of_a_run_follows_its_target(trained, tmp_path, stage):
    changes: dict[str, Any] = {"kl_target": 1e-4, "steps": 3, "save_steps": 3, "eval_steps": 3, "logging_steps": 1}
    if stage == "ppo":
        loaded = small(**{f"ppo__{key}": value for key, value in changes.items()}, ppo__value_warmup_steps=0)
    else:
        loaded = grouped(stage, changes)
    run_stages(loaded, beside(trained, tmp_path, "pretrain", "sft", "rm"), stage)
    rows = read_intact_lines(tmp_path / "cpu-tiny/v1" / stage / "metrics.jsonl")
    options = loaded.recipe.online()[stage]
    for row, later in itertools.pairwise(rows):
        wanted = adapt(row["objective/kl_coef"], row["objective/kl_per_token"], 1e-4)
        assert later["objective/kl_coef"] == pytest.approx(wanted)
    coefficients = [row["objective/kl_coef"] for row in rows]
    assert coefficients[0] == options.kl_coef and len(set(coefficients)) == 3


def test_a_run_adapts_its_kl_coefficient_only_once_the_policy_learns(trained, tmp_path):
    changes: dict[str, Any] = {"kl_target": 1e-4, "steps": 3, "save_steps": 3, "eval_steps": 3, "logging_steps": 1}
    loaded = small(**{f"ppo__{key}": value for key, value in changes.items()}, ppo__value_warmup_steps=2)
    run_stages(loaded, beside(trained, tmp_path, "pretrain", "sft", "rm"), "ppo")
    rows = read_intact_lines(tmp_path / "cpu-tiny/v1/ppo/metrics.jsonl")
    assert [row["objective/kl_coef"] for row in rows] == [loaded.recipe.options(Ppo).kl_coef] * 3
