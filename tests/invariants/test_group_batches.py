"""What must not change the result of RLOO and GRPO, and what a step of them measures and keeps."""

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.data.batch import Rollout
from rlhf.models.lean.layouts import SharedPrompts
from rlhf.models.loading import load_tokenizer
from rlhf.models.roles import Roles
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from rlhf.run.directory import StageRun
from rlhf.stages.groups import Batch, Learner, batch_metrics, make_batch
from rlhf.stages.online.scores import ScoreNorm, Scores
from rlhf.stages.online.train_state import read_state
from tests import kernels
from tests.helpers import beside, grouped, noted, run_stages
from tests.invariants.group_learner import REWARDS, assert_same, new_learner
from tests.rollouts import grouped_rollout, mean_entropy


@pytest.fixture(scope="module")
def run(trained) -> StageRun:
    return StageRun(trained, grouped("grpo"), "grpo")


@pytest.fixture(scope="module")
def tokenizer(run):
    return load_tokenizer(run.base)


@pytest.fixture(scope="module")
def rollout(tokenizer) -> Rollout:
    """Two prompts with four made-up responses each, of many lengths; one is cut off without EOS."""
    return grouped_rollout(tokenizer, torch.Generator().manual_seed(3))


def scored(rollout: Rollout, rewards: list[float] = REWARDS) -> tuple[Rollout, Scores]:
    numbers = torch.tensor(rewards)
    return rollout, Scores({"model": numbers}, raw=numbers, shaped=numbers)


def updated(learner: Learner, responses: tuple[Rollout, Scores]) -> tuple[Tensor, dict[str, float], Batch]:
    batch = make_batch(learner, *responses)
    torch.manual_seed(1)
    stats = learner.update(batch)
    return torch.cat([p.detach().flatten() for p in learner.by_role["policy"]]), stats, batch


@pytest.mark.parametrize(("stage", "joined"), [("rloo", False), ("grpo", False), ("grpo", True)])
def test_the_lean_trunk_changes_rounding_only(run, rollout, stage, joined, monkeypatch):
    """Also where it computes the prompt of each group once, in micro-batches that cut a group.

    `joined`: rows without padding, as on a card.
    """
    if joined:
        kernels.join_rows(monkeypatch)
    a, stats, _ = updated(new_learner(run, stage), scored(rollout))
    prompt_numbers = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    for responses, size in ((rollout, 4), (replace(rollout, prompt_numbers=prompt_numbers), 3)):
        learner = new_learner(run, stage, lean=True, per_device_train_batch_size=size)
        b, lean_stats, _ = updated(learner, scored(responses))
        assert_same(a, b)
        assert not torch.equal(a, b), "another forward pass"
        for name, value in stats.items():
            assert lean_stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_step_of_the_stage_computes_each_prompt_once(trained, tmp_path, monkeypatch):
    """Of two prompts with four responses each, in one micro-batch; scores of policy and reference, and the update."""
    prompts: list[int] = []
    make = SharedPrompts.__init__

    def noting(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        prompts.append(self.prompts)

    monkeypatch.setattr(SharedPrompts, "__init__", noting)
    group = {"steps": 1, "num_mini_batches": 1, "per_device_train_batch_size": 8}
    beside(trained, tmp_path, "pretrain", "sft", "rm")
    run_stages(grouped("grpo", group, hardware__trunk="lean"), tmp_path, "grpo")
    assert prompts == [2, 2, 2]


VARIANTS = [
    ("rloo", {}),
    ("rloo", {"normalize_advantages": True, "kl_penalty": "loss", "kl_estimator": "k2"}),
    ("grpo", {"loss_type": "grpo", "mask_truncated_completions": True}),
    ("grpo", {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.1}),
    ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    ("grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
]


@pytest.mark.parametrize(("stage", "changes"), VARIANTS)
def test_the_micro_batch_decides_memory_and_not_the_result(run, rollout, stage, changes):
    start = torch.cat([p.detach().flatten() for p in new_learner(run, stage).by_role["policy"]])
    whole, stats, _ = updated(new_learner(run, stage, per_device_train_batch_size=8, **changes), scored(rollout))
    split, split_stats, _ = updated(new_learner(run, stage, per_device_train_batch_size=1, **changes), scored(rollout))
    assert (whole - start).abs().mean() > 1e-4
    assert_same(whole, split)
    for name, value in stats.items():
        assert split_stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_the_order_of_prompts_and_of_their_responses_does_not_change_the_result(run, rollout, stage):
    order = torch.tensor([6, 4, 7, 5, 1, 3, 0, 2])
    other = scored(rollout.rows(order), [REWARDS[i] for i in order.tolist()])
    a, stats, _ = updated(new_learner(run, stage, num_mini_batches=1), scored(rollout))
    b, others, _ = updated(new_learner(run, stage, num_mini_batches=1), other)
    assert_same(a, b)
    assert stats == pytest.approx(others, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_padding_and_its_content_do_not_change_the_result(run, rollout, stage):
    wider = torch.full((len(rollout.ids), rollout.ids.shape[1] + 5), 17)
    wider[:, : rollout.ids.shape[1]] = rollout.ids
    wider[torch.arange(wider.shape[1]) > rollout.last[:, None]] = 17
    other = Rollout(wider, rollout.prompt_length, rollout.response_length, rollout.ended)
    plain, *_ = updated(new_learner(run, stage), scored(rollout))
    padded, *_ = updated(new_learner(run, stage), scored(other))
    assert_same(plain, padded)


def test_checkpointing_activations_does_not_change_the_result(run, rollout):
    learner = new_learner(run, "grpo", gradient_checkpointing=True)
    learner.shared.base.activation_checkpointing_enable()
    learner.shared.base.enable_input_require_grads()
    assert_same(updated(new_learner(run, "grpo"), scored(rollout))[0], updated(learner, scored(rollout))[0])


def test_truncated_responses_teach_nothing_where_the_recipe_says_so(run, rollout):
    """Only the second response has an advantage. It has no EOS, so that its tokens give no gradient."""
    for masked in (True, False):
        trained = new_learner(run, "grpo", mask_truncated_completions=masked, beta=0.0)
        batch = make_batch(trained, *scored(rollout))
        batch.advantages = torch.tensor([0.0, 1.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        assert (trained.update(batch)["policy/grad_norm"] == 0) is masked


def test_without_beta_the_reference_is_not_run(run, rollout, monkeypatch):
    learner = new_learner(run, "grpo", beta=0.0)
    roles: list[str] = []
    activate = Roles.activate
    monkeypatch.setattr(Roles, "activate", lambda self, role: noted(roles, role, activate(self, role)))
    _, scores = scored(rollout)
    batch = make_batch(learner, rollout, scores)
    metrics = batch_metrics(batch, scores, learner) | learner.update(batch)
    assert set(roles) == {"policy"} and batch.kl is None
    assert "objective/kl_per_token" not in metrics and "loss/kl_avg" not in metrics


@pytest.mark.parametrize("masked", [False, True])
def test_the_move_of_the_policy_is_that_of_a_loop(run, rollout, masked):
    """Half the mean square of the change of a token's log-probability, over the tokens that count in the loss."""
    learner = new_learner(run, "grpo", num_iterations=1, num_mini_batches=1, mask_truncated_completions=masked)
    batch = make_batch(learner, *scored(rollout))
    with torch.no_grad():
        for weight in learner.by_role["policy"]:
            weight.add_(0.02 * torch.randn(weight.shape))
    moved = make_batch(learner, *scored(rollout))
    rows = zip(moved.old_logp.tolist(), batch.old_logp.tolist(), rollout.response_length, rollout.ended, strict=True)
    counted = [(new[:n], old[:n]) for new, old, n, ended in rows if ended or not masked]
    squares = [(a - b) ** 2 for pair in counted for a, b in zip(*pair, strict=True)]
    assert learner.update(batch)["policy/approxkl_avg"] == pytest.approx(sum(squares) / 2 / len(squares), rel=1e-3)


def test_a_minibatch_of_truncated_responses_alone_moves_nothing(run, rollout):
    learner = new_learner(run, "grpo", mask_truncated_completions=True, beta=0.0, entropy_coef=0.1)
    before = [p.detach().clone() for p in learner.by_role["policy"]]
    _, stats, _ = updated(learner, scored(replace(rollout, ended=torch.zeros_like(rollout.ended))))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.by_role["policy"], strict=True))
    assert stats["update/optimizer_steps"] == 0, "a step would follow the optimizer's momentum"


def test_only_the_policy_moves(run, rollout):
    learner = new_learner(run, "rloo")
    before = {name: p.detach().clone() for name, p in learner.shared.peft.named_parameters()}
    learner.update(make_batch(learner, *scored(rollout)))
    moved = {name for name, p in learner.shared.peft.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".policy." in name}


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_a_checkpoint_holds_everything_the_next_step_depends_on(run, rollout, tmp_path, stage):
    learner = new_learner(run, stage, kl_target=0.1)
    learner.update(make_batch(learner, *scored(rollout)))
    learner.advance(0.0)
    folder = tmp_path / "step-000001"
    folder.mkdir()
    learner.save(run.base, folder)
    drawn = random.random(), np.random.rand()
    learner.update(make_batch(learner, *scored(rollout)))

    fresh = new_learner(run, stage)
    saved = read_state(folder)
    again = Learner(stage, fresh.shared, learner.options, ScoreNorm(*saved["norm"]))
    again.restore(saved)
    assert (again.step, again.score_norm) == (1, ScoreNorm(0.1, 0.7))
    assert drawn == (random.random(), np.random.rand())
    again.update(make_batch(again, *scored(rollout)))
    assert all(torch.equal(a, b) for a, b in zip(learner.by_role["policy"], again.by_role["policy"], strict=True))


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [4, 8, 12])
def test_responses_that_share_a_prefill_are_those_of_repeated_prompts(run, tokenizer, batch_size):
    """Three prompts, four responses to each: the tokens of twelve prompts, for a third of the prefill."""
    learner = new_learner(run, "grpo")
    prompts = [[1, 7, 8, 9], [1, 5], [1, 40, 41, 42, 43, 44]]
    settings = Sampling(64, 12, 1.0, batch_size)
    learner.shared.roles.activate("policy")
    torch.manual_seed(5)
    plain = sample(learner.shared.base, [p for p in prompts for _ in range(4)], tokenizer, settings)
    torch.manual_seed(5)
    shared = sample(learner.shared.base, prompts, tokenizer, replace(settings, samples_per_prompt=4))
    assert torch.equal(plain.ids, shared.ids) and torch.equal(plain.response_length, shared.response_length)
    assert plain.logprobs is not None and shared.logprobs is not None
    assert (plain.logprobs - shared.logprobs)[plain.mask].abs().max() < 1e-5
    assert len({tuple(row) for row in shared.ids[:4].tolist()}) > 1, "the responses to a prompt differ"


def test_a_prompt_is_computed_once_for_all_its_responses(run, tokenizer, monkeypatch):
    learner = new_learner(run, "grpo")
    rows = []
    decoder = learner.shared.base.get_decoder()
    handle = decoder.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    sample(learner.shared.base, [[1, 7, 8, 9]] * 2, tokenizer, Sampling(64, 3, 1.0, 8, samples_per_prompt=4))
    handle.remove()
    assert rows[0] == (2, 4) and all(shape == (8, 1) for shape in rows[1:2])


@pytest.mark.parametrize(("stage", "kl_penalty"), [("rloo", "reward"), ("grpo", "loss")])
def test_metrics_of_a_batch_row_by_row(run, rollout, stage, kl_penalty):
    """Two groups of four; the rewards of one of them are equal."""
    changes = {"kl_penalty": kl_penalty, "kl_estimator": "k3", "beta": 0.3, "entropy_coef": 0.1, "num_mini_batches": 1}
    learner = new_learner(run, stage, **changes)
    rewards = [0.3, -1.2, 2.0, 0.1, 0.5, 0.5, 0.5, 0.5]
    raw = torch.tensor([10 * number for number in rewards])
    scores = scored(rollout, rewards)[1]._replace(by_name={"a": raw, "b": raw + 1}, raw=raw + 2)
    batch = make_batch(learner, rollout, scores)
    found = batch_metrics(batch, scores, learner)
    assert batch.kl is not None
    lengths = rollout.response_length.tolist()
    kl = [row[:n].sum().item() for row, n in zip(batch.kl, lengths, strict=True)]
    in_reward = 0.3 * sum(kl) / 8 if kl_penalty == "reward" else 0.0
    mean = sum(rewards) / 8
    expected = {
        "objective/scores": 10 * mean + 2,
        "objective/scores_shaped": mean,
        "objective/rlhf_reward": mean - in_reward,
        "objective/non_score_reward": -in_reward,
        "objective/kl": sum(kl) / 8,
        "objective/kl_per_token": sum(kl) / sum(lengths),
        "objective/kl_coef": 0.3,
        "rewards/a": 10 * mean,
        "rewards/b": 10 * mean + 1,
        "groups/reward_sd": statistics.stdev(rewards[:4]) / 2,
        "groups/no_signal": 0.5,
        "response/length": sum(lengths) / 8,
        "response/eos_rate": 7 / 8,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    entropy = mean_entropy(learner.shared, rollout, learner.options.temperature)
    stats = learner.update(batch)  # its one minibatch is the batch, before the policy has moved
    assert stats["policy/entropy_avg"] == pytest.approx(entropy, rel=1e-4)
    logged = {"loss/kl_avg": sum(kl) / sum(lengths)} if kl_penalty == "loss" else {}  # a mean over all tokens: `dapo`
    assert {name: stats[name] for name in stats if name == "loss/kl_avg"} == pytest.approx(logged, rel=1e-4)
    assert stats["val/ratio"] == pytest.approx(1, rel=1e-4) and stats["lr"] == learner.options.learning_rate


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_the_ratio_is_that_of_a_policy_that_has_moved(run, rollout, stage):
    """Every token was a tenth of a nat less likely when it was sampled; RLOO's ratio is that of the response."""
    learner = new_learner(run, stage, num_iterations=2, num_mini_batches=1, learning_rate=1e-12)
    batch = make_batch(learner, rollout, scored(rollout, REWARDS)[1])
    moved = learner.update(replace(batch, old_logp=batch.old_logp - 0.1 * rollout.mask))
    lengths = rollout.response_length.tolist()
    ratios = [math.exp(0.1 * (n if stage == "rloo" else 1)) for n in lengths]
    expected = sum(n * ratio for n, ratio in zip(lengths, ratios, strict=True)) / sum(lengths)
    assert moved["val/ratio"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_a_batch_with_few_verdicts_or_none_has_no_nan(run, rollout, stage):
    """A response without a verdict has advantage 0, and its scores are in no mean; without any there is no mean."""
    learner = new_learner(run, stage, normalize_advantages=True)
    for judged in (torch.tensor([True, False, True, False] + [False] * 4), torch.zeros(8, dtype=torch.bool)):
        raw = torch.tensor(REWARDS).masked_fill(~judged, math.nan)
        scores = Scores({"judge": raw}, raw=raw, shaped=raw)
        batch = make_batch(learner, rollout, scores)
        assert batch.advantages.ne(0).tolist() == judged.tolist()
        found = batch_metrics(batch, scores, learner)
        assert found["groups/no_verdict"] == 1 - judged.float().mean()
        given = [x for x, known in zip(REWARDS, judged, strict=True) if known]
        expected = [sum(given) / len(given)] if given else []
        means = [[found[key]] if key in found else [] for key in ("rewards/judge", "objective/scores")]
        assert means == [pytest.approx(expected)] * 2
        assert all(math.isfinite(value) for value in (found | learner.update(batch)).values())
