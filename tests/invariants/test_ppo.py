"""What must not change PPO's result, what must not change at all, and what must hold at its first update."""

import json
import math
import random
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.data.batch import Rollout
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.models import output_layer
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.objectives.masked import masked_mean
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from rlhf.run.directory import StageRun
from rlhf.stages.online.scores import ScoreNorm
from rlhf.stages.online.session import prompt_order
from rlhf.stages.online.train_state import read_state
from rlhf.stages.ppo import Batch, Learner, batch_metrics, make_batch, new_critic
from tests import kernels
from tests.helpers import not_none, noted, small
from tests.invariants.ppo_learner import CPU, NORM, PROMPTS, assert_close, new_learner, roles, updated
from tests.rollouts import made_up_rollout, mean_entropy


@pytest.fixture(scope="module")
def run(trained) -> StageRun:
    return StageRun(trained, small(), "ppo")


@pytest.fixture(scope="module")
def tokenizer(run) -> DialogueTokenizer:
    return load_tokenizer(run.base)


@pytest.fixture(scope="module")
def rollout(run, tokenizer) -> Rollout:
    return made_up_rollout(PROMPTS, tokenizer, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["head", "adapter"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_micro_batch_decides_memory_and_not_the_result(run, rollout, kind, size):
    """SGD-like Adam steps of 1.5e-3: a wrong denominator moves weights by that much, rounding by a thousandth of it."""
    whole, stats, *_ = updated(run, rollout, kind, per_device_train_batch_size=8)
    split, split_stats, *_ = updated(run, rollout, kind, per_device_train_batch_size=size)
    start = updated(run, rollout, kind, learning_rate=1e-12, value_learning_rate=1e-12)[0]
    assert (whole - start).abs().mean() > 1e-4
    assert_close(whole, split, largest=5e-5, mean=5e-7)
    assert stats.keys() == split_stats.keys()
    for name, value in stats.items():
        assert split_stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_the_rows_that_are_scored_together_decide_speed_and_not_the_result(run, rollout, monkeypatch, kind):
    sizes: list[int] = []
    hidden = SharedBase.hidden
    monkeypatch.setattr(SharedBase, "hidden", lambda self, ids: noted(sizes, len(ids), hidden(self, ids)))
    usual = make_batch(new_learner(run, kind, per_device_train_batch_size=2), rollout)
    assert set(sizes) == {2}
    passes = len(sizes) // 4
    sizes.clear()
    together = make_batch(new_learner(run, kind, per_device_train_batch_size=2, score_batch_size=8), rollout)
    assert sizes == [8] * passes
    for name in ("old_logp", "ref_logp", "values", "rewards", "advantages", "returns"):
        assert (getattr(usual, name) - getattr(together, name))[rollout.mask].abs().max() < 2e-5, name
    assert (usual.scores - together.scores).abs().max() < 2e-5


def test_padding_and_its_content_do_not_change_the_result(run, rollout, tokenizer):
    wider = torch.full((len(rollout.ids), rollout.ids.shape[1] + 5), 17)
    wider[:, : rollout.ids.shape[1]] = rollout.ids
    slots = torch.arange(wider.shape[1])
    wider[slots >= (rollout.prompt_length + rollout.response_length)[:, None]] = 17
    other = Rollout(wider, rollout.prompt_length, rollout.response_length, rollout.ended)
    a, *_ = updated(run, rollout)
    b, *_ = updated(run, other)
    assert_close(a, b, largest=5e-5, mean=5e-7)


def test_gradient_checkpointing_does_not_change_the_result(run, rollout):
    def checkpointing(shared: SharedBase) -> None:
        shared.base.activation_checkpointing_enable()
        shared.base.enable_input_require_grads()

    for kind in ("head", "adapter"):
        a, *_ = updated(run, rollout, kind)
        b, *_ = updated(run, rollout, kind, checkpointing, gradient_checkpointing=True)
        assert_close(a, b, largest=5e-5, mean=5e-7)


@pytest.mark.parametrize(("kind", "joined"), [("head", False), ("adapter", False), ("adapter", True)])
def test_the_lean_trunk_changes_rounding_only(run, rollout, kind, joined, monkeypatch):
    """Values of all roles, and weights after four optimizer steps: merged weights follow each step.

    `joined`: rows without padding, as on a card.
    """
    if joined:
        kernels.join_rows(monkeypatch)
    passes: dict[str, Any] = {"num_ppo_epochs": 2, "num_mini_batches": 2}
    a, stats, batch = updated(run, rollout, kind, **passes)
    b, lean_stats, lean_batch = updated(run, rollout, kind, lean=True, **passes)
    assert (a - updated(run, rollout, kind, learning_rate=1e-12, value_learning_rate=1e-12)[0]).abs().mean() > 1e-4
    for name in ("old_logp", "ref_logp", "values", "scores"):
        assert_close(getattr(batch, name), getattr(lean_batch, name), largest=2e-5, mean=2e-6)
    assert not torch.equal(batch.old_logp, lean_batch.old_logp), "another forward pass"
    assert_close(a, b, largest=5e-5, mean=1e-6)
    for name, value in stats.items():
        assert lean_stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_size_of_a_chunk_of_logits_does_not_change_the_result(run, rollout, monkeypatch, tokens):
    a, stats, *_ = updated(run, rollout, entropy_coef=0.1)
    monkeypatch.setattr(output_layer, "LOGITS", tokens * 400 + 1)
    b, chunked, *_ = updated(run, rollout, entropy_coef=0.1)
    assert_close(a, b, largest=5e-5, mean=5e-7)
    assert chunked == pytest.approx(stats, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(run, rollout, monkeypatch, kind):
    """Every tensor that any operation of a whole step returns, with 3 tokens to a chunk."""
    learner = new_learner(run, kind, entropy_coef=0.1)
    vocabulary = len(learner.shared.base.lm_head.weight)
    monkeypatch.setattr(output_layer, "LOGITS", 3 * vocabulary)
    seen: dict[tuple[int, ...], str] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor) and vocabulary in x.shape:
                    seen[tuple(x.shape)] = str(func)
            return out

    with Watch():
        learner.update(make_batch(learner, rollout))
    hidden = learner.shared.base.config.hidden_size
    matrix = {(vocabulary, hidden), (hidden, vocabulary)}  # the output matrix itself
    sizes = {shape: func for shape, func in seen.items() if shape not in matrix}
    assert sizes
    assert all(shape in {(1, vocabulary), (2, vocabulary), (3, vocabulary)} for shape in sizes), sizes


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_while_the_critic_warms_up_the_policy_stays(run, rollout, kind):
    learner = new_learner(run, kind, value_warmup_steps=1)
    policy, value = (
        [p.detach().clone() for p in group] for group in (learner.by_role["policy"], learner.by_role["value"])
    )
    stats = learner.update(make_batch(learner, rollout))
    assert all(torch.equal(a, b) for a, b in zip(policy, learner.by_role["policy"], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(value[:2], learner.by_role["value"][:2], strict=True))
    assert stats["policy/grad_norm"] == 0 < stats["val/grad_norm"]
    learner.advance(0.0)
    learner.update(make_batch(learner, rollout))
    assert not all(torch.equal(a, b) for a, b in zip(policy, learner.by_role["policy"], strict=True))


def test_the_kl_coefficient_follows_its_target(run, rollout):
    learner = new_learner(run, kl_target=0.1, kl_coef=0.2)
    batch = make_batch(learner, rollout)
    learner.update(batch)
    learner.advance(masked_mean(batch.kl, rollout.mask).item())
    assert learner.kl_coef == pytest.approx(0.2 * 0.98)  # the policy is the reference: KL 0, far below the target
    batch = make_batch(learner, rollout)
    batch.kl = torch.where(rollout.mask, 0.11, 0.0)  # nats of each token, a tenth above the target
    learner.advance(batch.kl_per_token)
    assert learner.kl_coef == pytest.approx(0.2 * 0.98 * (1 + 0.1 * 0.1))
    batch = make_batch(learner, rollout)
    assert batch_metrics(batch, learner)["objective/kl_coef"] == learner.kl_coef
    score = (batch.scores[0] - NORM[0]) / NORM[1]
    assert batch.rewards[0, 0] == pytest.approx((score - learner.kl_coef * batch.kl[0, 0]).item(), abs=1e-6)


def test_while_the_critic_warms_up_the_kl_coefficient_stays(run, rollout):
    learner = new_learner(run, kl_target=0.1, kl_coef=0.2, value_warmup_steps=1)
    for learns, expected in ((False, 0.2), (True, 0.2 * 0.98)):  # the policy is the reference: KL 0, below the target
        assert learner.policy_learns == learns
        batch = make_batch(learner, rollout)
        learner.advance(batch.kl_per_token)
        assert learner.kl_coef == pytest.approx(expected)


def test_a_gradient_that_is_not_finite_ends_the_stage(run):
    learner = new_learner(run)
    for parameter in learner.by_role["policy"]:
        parameter.grad = torch.full_like(parameter, math.nan)
    before = [parameter.detach().clone() for parameter in learner.by_role["policy"]]
    with pytest.raises(UserError, match=r"ppo: the gradient is not finite in step 1; lower ppo\.learning_rate"):
        learner.step_optimizer()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.by_role["policy"], strict=True))


def test_dropout_of_an_adapter_is_switched_off(run, rollout, tmp_path):
    """It would make the ratio of new to old probabilities noise."""
    sft = tmp_path / "sft"
    shutil.copytree(run.require("sft"), sft)
    config = sft / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_dropout": 0.5}))
    shared = SharedBase(
        load_base(run.base, CPU), {"policy": sft / "adapter", "reference": sft / "adapter"}, trainable=("policy",)
    )
    dropouts = [module for module in shared.peft.modules() if isinstance(module, torch.nn.Dropout)]
    assert dropouts and all(module.p == 0 for module in dropouts)


@pytest.mark.parametrize("kl_penalty", ["reward", "loss"])
def test_metrics_of_a_batch_row_by_row(run, rollout, kl_penalty):
    learner = new_learner(
        run, kl_penalty=kl_penalty, kl_estimator="k2", kl_coef=0.3, num_ppo_epochs=1, num_mini_batches=1
    )
    with torch.no_grad():
        for weight in learner.by_role["policy"]:
            weight.add_(0.05 * torch.randn_like(weight))
    batch = make_batch(learner, rollout)
    metrics = batch_metrics(batch, learner)
    lengths = rollout.response_length.tolist()
    logp, ref = (
        [row[:n].tolist() for row, n in zip(x, lengths, strict=True)] for x in (batch.old_logp, batch.ref_logp)
    )
    kl = [[(a - b) ** 2 / 2 for a, b in zip(*rows, strict=True)] for rows in zip(logp, ref, strict=True)]
    per_response, per_token = sum(map(sum, kl)) / len(kl), sum(map(sum, kl)) / sum(lengths)
    shaped = batch.shaped_scores.mean().item()
    in_reward = 0.3 * per_response if kl_penalty == "reward" else 0.0
    expected = {
        "objective/kl": per_response,
        "objective/kl_per_token": per_token,
        "objective/scores": batch.scores.mean().item(),
        "objective/scores_shaped": shaped,
        "objective/non_score_reward": -in_reward,
        "objective/rlhf_reward": shaped - in_reward,
        "objective/kl_coef": 0.3,
        "policy/entropy_estimate": -sum(map(sum, logp)) / sum(lengths),
        "response/length": sum(lengths) / len(lengths),
        "response/eos_rate": sum(rollout.ended.tolist()) / len(lengths),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    real = rollout.mask
    errors, returns = (batch.returns - batch.values)[real].double(), batch.returns[real].double()
    explained = 1 - errors.var(correction=0).item() / returns.var(correction=0).item()
    assert metrics["val/explained_variance"] == pytest.approx(explained, rel=1e-4)
    entropy = mean_entropy(learner.shared, rollout, learner.options.temperature)
    stats = learner.update(batch)  # its one minibatch is the batch, before the policy has moved
    assert stats["policy/entropy_avg"] == pytest.approx(entropy, rel=1e-4)
    squares = [error**2 for error in errors.tolist()]
    assert stats["loss/value_avg"] == pytest.approx(sum(squares) / len(squares) / 2, rel=1e-4)
    assert stats["lr"] == learner.options.learning_rate != learner.options.value_learning_rate
    logged = {"loss/kl_avg": per_token} if kl_penalty == "loss" else {}
    assert {name: value for name, value in stats.items() if "kl_avg" in name and "approx" not in name} == (
        pytest.approx(logged, rel=1e-4)
    )


TANGENT = ScoreNorm(mean=-2.0, sd=4.0)  # of the sigmoid at 0, as (s - mean) / sd


@pytest.mark.parametrize(("squashed", "norm"), [(False, NORM), (True, TANGENT)])
def test_a_critic_with_an_adapter_starts_as_the_normalised_reward_model(run, squashed, norm):
    shared = new_learner(run, "adapter", sigmoid_scores=squashed, normalize_scores=not squashed).shared
    score, value = shared.score_heads["reward"], not_none(shared.value_head)
    assert torch.allclose(value.weight, score.weight / norm.sd)
    assert value.bias.item() == pytest.approx(-norm.mean / norm.sd)


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_only_policy_and_value_move(run, rollout, kind):
    learner = new_learner(run, kind)
    shared = learner.shared
    before = {name: p.detach().clone() for name, p in shared.peft.named_parameters()}
    assert shared.value_head
    score = shared.score_heads["reward"].weight.clone()
    head = shared.value_head.weight.detach().clone()
    learner.update(make_batch(learner, rollout))
    trainable = {"policy", "value"} if kind == "adapter" else {"policy"}
    moved = {name for name, p in shared.peft.named_parameters() if not torch.equal(p, before[name])}
    expected = {name for name in before if any(f".{role}." in name for role in trainable)}
    assert moved == expected
    assert {n for n in before if ".reference." in n or ".reward." in n}
    assert torch.equal(shared.score_heads["reward"].weight, score)
    assert not torch.equal(shared.value_head.weight, head)


def test_there_is_one_base(run):
    """Parameters of all roles together: the base once, and four small adapters."""
    base = sum(p.numel() for p in load_base(run.base, CPU).parameters())
    shared = new_learner(run, "adapter").shared
    storages = {p.untyped_storage().data_ptr(): p.numel() for p in shared.peft.parameters()}
    adapters = [n for n, _ in shared.peft.named_parameters() if "lora_" in n]
    lora = sum(p.numel() for n, p in shared.peft.named_parameters() if "lora_" in n)
    assert sum(storages.values()) == base + lora
    assert len(adapters) == 4 * len([n for n in adapters if ".policy." in n])


def test_at_the_first_update_the_ratio_is_one_and_the_loss_minus_the_mean_advantage(run, rollout):
    _, stats, batch = updated(run, rollout, num_ppo_epochs=1, num_mini_batches=1, whiten_advantages=False)
    mean = masked_mean(batch.advantages, rollout.mask).item()
    assert abs(mean) > 0.01
    assert stats["val/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert stats["policy/approxkl_avg"] == pytest.approx(0.0, abs=1e-10)
    assert stats["policy/clipfrac_avg"] == 0
    assert stats["loss/policy_avg"] == pytest.approx(-mean, rel=1e-5)


def test_at_the_start_the_policy_is_the_reference(run, rollout):
    learner = new_learner(run)
    batch = make_batch(learner, rollout)
    assert torch.equal(batch.old_logp, batch.ref_logp)
    assert batch_metrics(batch, learner)["objective/kl"] == 0


def test_rewards_are_the_kl_penalty_and_the_normalised_score_at_the_last_token(run, rollout):
    learner = new_learner(run, missing_eos_penalty=2.0, kl_coef=0.3)
    batch = make_batch(learner, rollout)
    for row, length in enumerate(rollout.response_length.tolist()):
        score = (batch.scores[row].item() - NORM[0]) / NORM[1] - (2.0 if row == 1 else 0.0)
        expected = [-0.3 * k for k in batch.kl[row, :length].tolist()]
        expected[-1] += score
        assert batch.rewards[row, :length].tolist() == pytest.approx(expected, abs=1e-6)
        assert not batch.rewards[row, length:].any()


def test_roles_are_what_plain_peft_makes_of_the_saved_adapters(run, rollout, tokenizer):
    """The policy's log-probabilities and the reward model's scores, against models loaded without our code."""
    base = str(run.require("pretrain") / "model")
    batch = make_batch(new_learner(run), rollout)
    sft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run.require("sft") / "adapter").eval()
    rm = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=1), run.require("rm") / "adapter"
    ).eval()
    for row, (start, length) in enumerate(zip(rollout.prompt_length, rollout.response_length, strict=True)):
        ids = rollout.ids[row : row + 1, : start + length]
        with torch.no_grad():
            logp = sft(input_ids=ids).logits.log_softmax(-1)[0, start - 1 : -1]
            score = rm(input_ids=ids).logits.item()
        picked = logp.gather(1, ids[0, start:, None]).squeeze(1)
        assert batch.old_logp[row, :length].tolist() == pytest.approx(picked.tolist(), abs=2e-5)
        assert batch.scores[row].item() == pytest.approx(score, abs=2e-5)
        assert not batch.old_logp[row, length:].any()


def test_the_critic_with_its_own_adapter_starts_as_the_normalised_score(run, rollout):
    shared = new_learner(run, "adapter").shared
    assert shared.value_head
    scores = (shared.scores(rollout) - NORM[0]) / NORM[1]
    shared.roles.activate("value")
    with torch.no_grad():
        last = shared.hidden(rollout.ids)[torch.arange(len(scores)), rollout.last]
        assert shared.value_head(last).squeeze(1).tolist() == pytest.approx(scores.tolist(), abs=1e-5)


def test_adamw_is_that_of_the_recipe(run):
    asked: dict[str, Any] = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "weight_decay": 0.02}
    groups = new_learner(run, **asked).optimizer.param_groups
    assert len(groups) == 2
    for group in groups:
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-3, 0.02)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"])
def test_a_checkpoint_holds_everything_the_next_step_depends_on(run, rollout, tmp_path, optim):
    if optim != "adamw_torch_fused":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes comes with the gpu extra")
    learner = new_learner(run, "adapter", optim=optim, kl_target=0.1)
    learner.update(make_batch(learner, rollout))
    learner.advance(0.0)
    (tmp_path / "step-000001").mkdir()
    learner.save(run.base, tmp_path / "step-000001")
    drawn = random.random(), np.random.rand()
    learner.update(make_batch(learner, rollout))

    saved = read_state(tmp_path / "step-000001")
    shared, norm = roles(run), ScoreNorm(*saved["norm"])
    critic = new_critic(shared, run.require("rm"), learner.options, norm)
    again = Learner(shared, learner.options, norm, critic)
    again.restore(saved)
    assert again.schedule.state_dict() == learner.schedule.state_dict()
    assert (again.step, again.score_norm, again.kl_coef) == (1, NORM, learner.options.kl_coef * 0.98)
    assert drawn == (random.random(), np.random.rand())
    again.update(make_batch(again, rollout))
    for a, b in zip(
        (*learner.by_role["policy"], *learner.by_role["value"]),
        (*again.by_role["policy"], *again.by_role["value"]),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("warmup", "expected"), [(0, [0.4, 0.3, 0.2, 0.1]), (2, [0.25, 0.5, 1 / 3, 1 / 6])])
def test_rates_rise_and_fall_by_the_schedule(run, rollout, warmup, expected):
    """Of four steps at a rate of 0.5; without warm-up the first is one step below the full rate."""
    schedule = {"steps": 4, "lr_scheduler_type": "linear", "warmup_steps": warmup}
    learner = new_learner(run, learning_rate=0.5, value_learning_rate=0.05, **schedule)
    rates = []
    for _ in range(4):
        rates.append([group["lr"] for group in learner.optimizer.param_groups])
        learner.advance(None)
    assert [policy for policy, _ in rates] == pytest.approx(expected)
    assert [10 * value for _, value in rates] == pytest.approx(expected)


def test_every_prompt_is_used_once_per_epoch_and_the_order_is_a_function_of_seed_and_step():
    steps = [prompt_order(10, step, 4, seed=3) for step in range(5)]  # two epochs
    flat = [i for step in steps for i in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert steps == [prompt_order(10, step, 4, seed=3) for step in range(5)]
    assert steps[0] != prompt_order(10, 0, 4, seed=4)


def sampled(run, tokenizer, prompts, **changes) -> Rollout:
    shared = roles(run)
    shared.roles.activate("policy")
    torch.manual_seed(5)
    settings = {"max_prompt_length": 64, "response_length": 8, "temperature": 1.0, "batch_size": 4} | changes
    return sample(shared.base, prompts, tokenizer, Sampling(**settings))


def test_responses_belong_to_their_prompts_and_stop_at_eos(run, tokenizer):
    rollout = sampled(run, tokenizer, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        length = int(rollout.response_length[row])
        assert rollout.ids[row, : len(prompt)].tolist() == prompt
        response = rollout.tokens[row][rollout.mask[row]].tolist()
        assert 1 <= length == len(response) <= 8
        assert tokenizer.eos_id not in response[:-1]
        assert rollout.ended[row] == (response[-1] == tokenizer.eos_id)


@pytest.mark.parametrize("temperature", [0.2, 0.1])  # the barely trained model is almost uniform at 1
def test_samples_follow_the_distribution_that_training_assumes(run, tokenizer, temperature):
    """The first token of 4000 samples against softmax(logits / temperature), with prompts of unequal length."""
    shared = roles(run)
    shared.roles.activate("policy")
    prompts = [PROMPTS[2], PROMPTS[3]] * 2000
    rollout = sampled(run, tokenizer, prompts, response_length=1, temperature=temperature, batch_size=1000)
    for which in (0, 1):
        with torch.no_grad():
            logits = shared.base(input_ids=torch.tensor([prompts[which]])).logits[0, -1]
        expected = (logits / temperature).softmax(-1)
        counts = torch.bincount(rollout.tokens[which::2, 0], minlength=len(expected)).float() / 2000
        likely = expected > 0.005
        error = ((expected * (1 - expected) / 2000).sqrt() * 4.5)[likely]
        assert likely.sum() > 1
        assert ((counts - expected)[likely].abs() < error).all()


def test_rows_of_a_rollout_keep_their_tokens(rollout):
    for index in rollout.by_length(3):
        part = rollout.rows(index)
        for row, original in enumerate(index.tolist()):
            assert (
                part.tokens[row][part.mask[row]].tolist() == rollout.tokens[original][rollout.mask[original]].tolist()
            )
    assert sorted(i for index in rollout.by_length(3) for i in index.tolist()) == list(range(8))


def test_unused_slots_of_a_batch_are_zero(run, rollout):
    batch: Batch = make_batch(new_learner(run), rollout)
    tensors = (batch.old_logp, batch.ref_logp, batch.values, batch.kl, batch.rewards, batch.advantages, batch.returns)
    for tensor in tensors:
        assert not tensor[~rollout.mask].any()
