"""How a step of RLOO and GRPO is wired: responses, prompts, scores, replacements; and how a run adapts its beta."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlhf.data.batch import Rollout
from rlhf.data.corpus import Prompt, Split
from rlhf.data.rows import Message
from rlhf.errors import UserError
from rlhf.evaluation.policies import PolicySamples
from rlhf.models.loading import load_tokenizer
from rlhf.objectives.kl import adapt
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun
from rlhf.stages.groups import Learner, score_responses
from rlhf.stages.online import role_passes
from rlhf.stages.online.prompts import OnlinePrompts
from rlhf.stages.online.reward_sum import RewardSum
from rlhf.stages.online.session import Session, sampling_settings
from tests.helpers import beside, grouped, run_stages, small
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


def session_of(learner: Learner, tokenizer: Any) -> Session:
    """The parts of a session that scoring uses; `sample` makes up responses instead of sampling them."""
    options = learner.options
    prompts = OnlinePrompts(Split(PROMPTS, PROMPTS), tokenizer, options, seed=0)
    sampled: list[list[int]] = []

    def sample(indices: list[int]) -> Rollout:
        sampled.append(indices)
        generator = torch.Generator().manual_seed(len(sampled))
        copies = [prompts.ids[i] for i in indices for _ in range(options.num_generations)]
        return made_up_rollout((copies * 2)[:8], tokenizer, generator).rows(torch.arange(len(copies)))

    parts = {"tokenizer": tokenizer, "shared": learner.shared, "prompts": prompts, "sample": sample, "sampled": sampled}
    parts |= {"reward_sum": RewardSum("rloo", options, ANSWERS, tokenizer), "phase": lambda name: nullcontext()}
    return cast(Session, SimpleNamespace(**parts))


def test_responses_are_scored_row_by_row(run, tokenizer):
    """Of two prompts with four responses each, one of them cut off."""
    changes: dict[str, Any] = {"reward_funcs": ["model", "tests.own_rewards:answer_and_length"]}
    changes |= {"reward_weights": [0.5, 2.0], "missing_eos_penalty": PENALTY}
    learner = new_learner(run, "rloo", **changes)
    learner.shared.add_reward(run.parents.require("rm") / "adapter")
    session = session_of(learner, tokenizer)
    indices = [7, 2]
    rollout = session.sample(indices)
    scored = score_responses(session, learner, rollout, indices)

    model = role_passes.reward_scores(learner.shared, rollout, 8).tolist()
    norm = learner.state.score_norm
    assert norm.sd != 1 and norm.mean != 0
    for row, length in enumerate(LENGTHS):
        text = tokenizer.decode(rollout.tokens[row, :length].tolist())
        function = [7, 2][row // 4] + len(text) / 1000
        assert scored.by_name["model"][row].item() == pytest.approx(model[row], rel=1e-5)
        assert scored.by_name["tests.own_rewards.answer_and_length"][row].item() == pytest.approx(function, rel=1e-6)
        assert scored.scores[row].item() == pytest.approx(0.5 * model[row] + 2 * function, rel=1e-5)
        shaped = 0.5 * (model[row] - norm.mean) / norm.sd + 2 * function
        shaped -= PENALTY if row == 1 else 0  # the second response has no EOS
        assert scored.shaped_scores[row].item() == pytest.approx(shaped, rel=1e-5, abs=1e-6), row


@pytest.mark.parametrize(("scores", "said"), [([1.0, torch.nan], "grpo: 50 % of the answers of sft"), ([1.0, 2.0], "")])
def test_the_share_without_a_verdict_is_said(capsys, scores, said):
    samples = replace(PolicySamples.unjudged(["a", "b"]), scores=torch.tensor(scores))
    Session.say_no_verdict(cast(Session, SimpleNamespace(run=SimpleNamespace(stage="grpo"))), "sft", samples)
    err = capsys.readouterr().err
    assert err.startswith(said) and bool(err) == bool(said)


def test_a_start_of_which_nothing_is_judged_is_refused():
    """Such as functions of two tasks in one sum, each without a verdict on the other's answers."""
    samples = replace(PolicySamples.unjudged(["a", "b"]), scores=torch.full((2,), torch.nan))
    samples = replace(samples, rewards={"sums": torch.tensor([1.0, torch.nan]), "code": torch.tensor([torch.nan, 0.0])})
    parts = {"evaluate": lambda role: samples, "run": SimpleNamespace(stage="grpo")}
    parts |= {"recipe": SimpleNamespace(start="sft")}
    with pytest.raises(
        UserError,
        match=r"^grpo: none of 2 held-out answers of sft has .*reward \(with a verdict: sums 1, code 1 of 2\);",
    ):
        Session.measure_reference(cast(Session, SimpleNamespace(**parts)))


@pytest.mark.parametrize("copies", [1, 4])
def test_responses_are_sampled_in_the_order_of_their_prompts(run, tokenizer, copies):
    learner = new_learner(run, "rloo", num_generations=max(copies, 2))
    prompts = OnlinePrompts(Split(PROMPTS, PROMPTS), tokenizer, learner.options, seed=0)
    options = SimpleNamespace(samples_per_prompt=copies)
    parts = {"prompts": prompts, "options": options, "sampling": sampling_settings(learner.options), "client": None}
    parts |= {"shared": learner.shared, "tokenizer": tokenizer, "phase": lambda name: nullcontext()}
    indices = [7, 2, 5]
    rollout = Session.sample(cast(Session, SimpleNamespace(**parts)), indices)
    found = [ids[:n].tolist() for ids, n in zip(rollout.ids, rollout.prompt_length, strict=True)]
    assert found == [prompts.ids[i] for i in indices for _ in range(copies)]


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
