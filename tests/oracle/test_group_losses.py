"""Advantages within groups and their losses, against hand-worked arrays, loops in Python floats, and TRL's trainers."""

import math
import statistics
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.objectives import kl as kls
from rlhf.objectives.choices import Level, LossType
from rlhf.objectives.groups import (
    ADVANTAGES,
    LossTerms,
    group_sd,
    has_signal,
    policy_loss,
    standardize,
    token_weights,
)
from rlhf.objectives.importance import log_ratios, pool_log_ratios

FEW = settings(max_examples=50, deadline=None, derandomize=True)
GARBAGE = [1e9, math.inf, -math.inf, math.nan]
number = st.floats(-3, 3, allow_subnormal=False)


def pooled(logp, old_logp, mask, level):
    return pool_log_ratios(log_ratios(logp, old_logp, mask), mask, level)


def compared(kind, rewards, judged=None):
    return ADVANTAGES[kind](rewards, all_of(rewards) if judged is None else judged)


def all_of(rewards):
    return torch.ones_like(rewards, dtype=torch.bool)


def loss_of(loss_type, logp, log_ratio, advantages, weights, mask, low, high):
    return policy_loss(loss_type, LossTerms(logp, log_ratio, advantages, weights, mask, low, high))


def clipped_loss(log_ratio, *others):
    return loss_of("grpo", log_ratio, log_ratio, *others)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


groups = st.integers(2, 5).flatmap(lambda k: st.lists(st.lists(number, min_size=k, max_size=k), min_size=1, max_size=4))


@pytest.fixture
def batch():
    """Three responses of 4, 1 and 2 tokens; what stands in the pads must not matter."""
    mask = torch.tensor([[True] * 4, [True, False, False, False], [True, True, False, False]])
    generator = torch.Generator().manual_seed(0)
    logp, old, ref = -torch.rand(3, 3, 4, generator=generator, dtype=torch.float64) * 2
    for garbage, x in zip(GARBAGE, (logp, old, ref), strict=False):
        x[~mask] = garbage
    return logp, old, ref, f64(1.5, -0.7, 0.2), mask


def test_advantages_worked_by_hand():
    rewards = f64([1.0, 2.0, 6.0], [0.0, 0.0, 3.0])
    assert compared("leave_one_out", rewards).tolist() == [[-3.0, -1.5, 4.5], [-1.5, -1.5, 3.0]]
    assert compared("none", rewards).tolist() == [[-2.0, -1.0, 3.0], [-1.0, -1.0, 2.0]]
    sd = math.sqrt(7)  # (4 + 1 + 9) / 2
    advantages = compared("group", rewards[:1])
    assert advantages.tolist()[0] == pytest.approx([-2 / (sd + 1e-4), -1 / (sd + 1e-4), 3 / (sd + 1e-4)])


def test_two_responses_get_opposite_advantages():
    """RLOO with k = 2 is the difference of the two rewards; GRPO is its sign, but for the 1e-4, over sqrt(2)."""
    rewards = f64([3.0, 1.0])
    assert compared("leave_one_out", rewards).tolist() == [[2.0, -2.0]]
    assert compared("group", rewards).tolist()[0] == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4)


@FEW
@given(groups)
def test_advantages_are_those_of_loops(rows):
    k = len(rows[0])
    flat = [r for row in rows for r in row]
    rewards = f64(*rows)
    loo = [[r - (sum(row) - r) / (k - 1) for r in row] for row in rows]
    assert torch.allclose(compared("leave_one_out", rewards), f64(*loo), atol=1e-12)
    assert torch.allclose(compared("leave_one_out", rewards), compared("none", rewards) * k / (k - 1), atol=1e-12)
    for scale in ("group", "batch"):
        sds = [statistics.stdev(row if scale == "group" else flat) for row in rows]
        expected = [[(r - sum(row) / k) / (sd + 1e-4) for r in row] for row, sd in zip(rows, sds, strict=True)]
        assert torch.allclose(compared(scale, rewards), f64(*expected), atol=1e-9)
    white = [(r - statistics.fmean(flat)) / (statistics.stdev(flat) + 1e-4) for r in flat]
    assert torch.allclose(standardize(rewards, all_of(rewards)).flatten(), f64(*white), atol=1e-9)
    assert has_signal(rewards, all_of(rewards)).tolist() == [len(set(row)) > 1 for row in rows]


@pytest.mark.parametrize(("reward", "k"), [(0.3, 4), (0.1, 8), (17.7, 7), (100.1, 8)])
def test_equal_rewards_teach_nothing(reward, k):
    """Also where their mean is rounded, and a division by 1e-4 would make that 0.07."""
    rewards = torch.full((2, k), reward)
    for advantages in (compared("leave_one_out", rewards), *(compared(s, rewards) for s in ("group", "batch", "none"))):
        assert not advantages.any()
    assert not has_signal(rewards, all_of(rewards)).any()


def test_a_reward_that_is_nan_is_not_hidden():
    rewards = torch.tensor([[1.0, math.nan, 2.0], [0.5, 0.5, 0.5]])
    for advantages in (compared("leave_one_out", rewards), compared("group", rewards), compared("none", rewards)):
        assert advantages[0].isnan().all() and not advantages[1].any()
    assert has_signal(rewards, all_of(rewards)).tolist() == [True, False]


def test_responses_without_a_verdict_worked_by_hand():
    """Of [1, -, 3, 8], [-, -, 5, -] and [-, -, -, -]; the rewards without a verdict are arbitrary."""
    rewards = f64([1.0, 99.0, 3.0, 8.0], [7.0, -7.0, 5.0, math.nan], [1.0, 2.0, 3.0, math.inf])
    judged = torch.tensor([[True, False, True, True], [False, False, True, False], [False] * 4])
    zeros = [[0.0] * 4] * 2
    assert compared("leave_one_out", rewards, judged).tolist() == [[-4.5, 0.0, -1.5, 6.0], *zeros]
    assert compared("none", rewards, judged).tolist() == [[-3.0, 0.0, -1.0, 4.0], *zeros]
    sd = math.sqrt(13)  # (9 + 1 + 16) / 2
    assert group_sd(rewards, judged).tolist() == pytest.approx([sd, 0, 0])
    grpo = compared("group", rewards, judged)
    assert grpo[0].tolist() == pytest.approx([-3 / (sd + 1e-4), 0, -1 / (sd + 1e-4), 4 / (sd + 1e-4)])
    assert grpo[1:].tolist() == zeros
    batch_sd = statistics.stdev([1, 3, 8, 5])
    assert compared("batch", rewards, judged)[0, 0].item() == pytest.approx(-3 / (batch_sd + 1e-4))
    assert has_signal(rewards, judged).tolist() == [True, False, False]
    none = torch.zeros_like(judged)
    for advantages in (
        compared("leave_one_out", rewards, none),
        compared("batch", rewards, none),
        standardize(rewards, none),
    ):
        assert advantages.tolist() == [[0.0] * 4] * 3


@pytest.mark.parametrize("normalize", [False, True])
def test_responses_without_a_verdict_as_trl_treats_them(normalize):
    """TRL 1.16 marks them NaN: the formulas of its two trainers."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(6, 4, generator=generator, dtype=torch.float64)
    judged = torch.rand(6, 4, generator=generator) < 0.6
    judged[0], judged[1] = False, torch.tensor([True, False, False, False])
    nan = rewards.masked_fill(~judged, math.nan)
    centered = nan - nan.nanmean(1, keepdim=True)
    for scale in ("group", "batch", "none"):
        sd = trl_nanstd(nan, dim=1).unsqueeze(1) if scale == "group" else trl_nanstd(nan)
        theirs = centered if scale == "none" else centered / (sd + 1e-4)
        assert torch.allclose(compared(scale, rewards, judged), theirs.nan_to_num(nan=0.0), atol=1e-9)
    counts = judged.sum(1, keepdim=True)
    loo = nan - (nan.nansum(1, keepdim=True) - nan) / (counts - 1)
    ours = compared("leave_one_out", rewards, judged)
    if normalize:
        loo = (loo - loo.nanmean()) / (trl_nanstd(loo) + 1e-4)
        ours = standardize(ours, judged & (counts > 1))
    assert torch.allclose(ours, loo.nan_to_num(nan=0.0), atol=1e-9)


def trl_nanstd(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    utils = pytest.importorskip("trl.trainer.utils", reason="TRL comes with the peer extra")
    result: torch.Tensor = utils.nanstd(x) if dim is None else utils.nanstd(x, dim=dim)
    return result


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_that_would_overflow_has_no_gradient(advantage):
    """Of 100 tokens that each moved by 0.9 nats, exp(90) for the whole response."""
    logp = torch.full((1, 100), -1.0, requires_grad=True)
    mask = torch.ones(1, 100, dtype=torch.bool)
    log_ratio = pooled(logp, logp.detach() - 0.9, mask, "sequence_sum")
    loss, clipped = clipped_loss(log_ratio, torch.tensor([advantage]), mask / 100, mask, 0.2, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-1.2 * advantage) and logp.grad is not None and not logp.grad.any()
    assert clipped.sum() == (100 if advantage else 0)


def test_a_clipped_token_worked_by_hand():
    """Ratios 1.5, 0.5 and 1.1 with clip 0.2 and 0.3: the first is held at 1.3 if A > 0, the second at 0.8 if A < 0."""
    ratio = torch.tensor([[1.5, 0.5, 1.1]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights = token_weights(mask, "dapo", 1, torch.tensor(3), 3)
    up, clipped = clipped_loss(ratio.log(), f64(2.0), weights, mask, 0.2, 0.3)
    assert up.item() == pytest.approx(-(2.6 + 1.0 + 2.2) / 3)
    assert clipped.sum() == 1
    down, clipped = clipped_loss(ratio.log(), f64(-2.0), weights, mask, 0.2, 0.3)
    assert down.item() == pytest.approx((3.0 + 1.6 + 2.2) / 3)
    assert clipped.sum() == 1


def test_cispo_worked_by_hand():
    """Every token has a gradient, also the one whose ratio, 4, is cut to 2; a pad has none."""
    logp = f64([-1.0, -2.0, -0.5], [-3.0, math.nan, math.inf]).requires_grad_()
    mask = torch.tensor([[True] * 3, [True, False, False]])
    ratio, weights = f64([0.5, 4.0, 1.0], [1.0, 9.0, math.nan]), token_weights(mask, "cispo", 2, torch.tensor(4), 10)
    loss, clipped = loss_of("cispo", logp, ratio.log(), f64(1.0, -2.0), weights, mask, 0.0, 2.0)
    loss.backward()
    assert loss.item() == pytest.approx(-(0.5 * -1 + 2 * -2 + 1 * -0.5 + 1 * -2 * -3) / 4)
    assert logp.grad.tolist() == [[-0.125, -0.5, -0.25], [0.5, 0.0, 0.0]]
    assert clipped.sum() == 1


def test_gmpo_worked_by_hand():
    """Ratios 1/4, 4 and 1 have the geometric mean 1; with A above 0 the 4 is cut to 2, below 0 the 1/4 to 1/2."""
    log_ratio = f64([0.25, 4.0, 1.0], [0.25, 4.0, 1.0], [1.0, math.nan, math.inf]).log().requires_grad_()
    mask = torch.tensor([[True] * 3, [True] * 3, [True, False, False]])
    weights = token_weights(mask, "gmpo", 3, torch.tensor(7), 10)
    loss, clipped = loss_of("gmpo", log_ratio, log_ratio, f64(1.0, -3.0, 2.0), weights, mask, math.log(2), math.log(2))
    loss.backward()
    up, down = 0.5 ** (1 / 3), -3 * 2 ** (1 / 3)
    assert loss.item() == pytest.approx(-(up + down + 2) / 3)
    assert log_ratio.grad.tolist() == [
        pytest.approx([-up / 9, 0.0, -up / 9]),
        pytest.approx([0.0, -down / 9, -down / 9]),
        pytest.approx([-2 / 3, 0.0, 0.0]),
    ]
    assert clipped.sum() == 2


def loops(batch, level, loss_type, low=0.2, high=0.28, max_length=10):
    """The loss of each family, term by term."""
    logp, old, _, advantages, mask = batch
    lengths = mask.sum(1).tolist()
    tokens, total = sum(lengths), 0.0
    for i, n in enumerate(lengths):
        d = [(logp[i, t] - old[i, t]).item() for t in range(n)]
        per_row = {"sequence": sum(d) / n, "sequence_sum": sum(d)}
        a = advantages[i].item()
        cut = [min(x, high) if a > 0 else max(x, -low) for x in d]
        for t in range(n):
            ratio = math.exp(d[t] if level == "token" else per_row[level])
            term = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            if loss_type == "cispo":
                term = -min(ratio, high) * a * logp[i, t].item()
            if loss_type == "gmpo":
                term = -(math.prod(map(math.exp, cut)) ** (1 / n)) * a
            divisor = {"dapo": tokens, "cispo": tokens, "dr_grpo": len(lengths) * max_length}
            total += term / divisor.get(loss_type, len(lengths) * n)
    return total


@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_losses_are_those_of_loops_and_parts_add_up(batch, level, loss_type):
    logp, old, _, advantages, mask = batch
    if loss_type == "gmpo" and level != "token":
        pytest.skip("it takes the tokens' own ratios")

    def part(rows):
        weights = token_weights(mask[rows], loss_type, len(mask), mask.sum(), 10)
        ratios = pooled(logp[rows], old[rows], mask[rows], level)
        return loss_of(loss_type, logp[rows], ratios, advantages[rows], weights, mask[rows], 0.2, 0.28)[0].item()

    expected = loops(batch, level, loss_type)
    assert part(slice(None)) == pytest.approx(expected, rel=1e-6)
    assert part(slice(0, 1)) + part(slice(1, 3)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("level", get_args(Level))
def test_pads_get_no_gradient(batch, level):
    logp, old, _, advantages, mask = batch
    logp = logp.clone().requires_grad_()
    weights = token_weights(mask, "grpo", 3, mask.sum(), 10)
    clipped_loss(pooled(logp, old, mask, level), advantages, weights, mask, 9.0, 9.0)[0].backward()
    assert logp.grad[~mask].abs().max() == 0
    assert logp.grad.isfinite().all() and (logp.grad[mask] != 0).all()


def test_at_the_old_policy_the_gradient_is_that_of_reinforce(batch):
    """At ratio 1 the gradient is -A times that of log pi; GSPO divides it by the length of the response."""
    logp, _, _, advantages, mask = batch
    lengths = mask.sum(1, keepdim=True)
    scales: dict[Level, torch.Tensor] = {
        "token": 1 / lengths,
        "sequence": 1 / lengths,
        "sequence_sum": torch.ones(3, 1),
    }
    for level, scale in scales.items():
        new = logp.clone().requires_grad_()
        weights = token_weights(mask, "grpo", 3, mask.sum(), 10)
        clipped_loss(pooled(new, logp, mask, level), advantages, weights, mask, 0.2, 0.2)[0].backward()
        expected = (-advantages[:, None] / 3 * scale).expand(mask.shape).where(mask, 0.0)
        assert torch.allclose(new.grad, expected, atol=1e-6), level


def test_wrong_shapes_are_refused(batch):
    logp, _, _, advantages, mask = batch
    with pytest.raises(ValueError, match="advantages has shape"):
        clipped_loss(logp, advantages[:2], logp, mask, 0.2, 0.2)
    with pytest.raises(ValueError, match="log_ratio has shape"):
        loss_of("cispo", logp, logp[:1], advantages, logp, mask, 0.2, 0.2)
    with pytest.raises(ValueError, match="mask must be bool"):
        token_weights(mask.float(), "grpo", 3, mask.sum(), 10)


# -- beside TRL --------------------------------------------------------------------------------------------------------


def trl_inputs(batch):
    logp, old, ref, advantages, mask = (x if x.dtype is torch.bool else x.nan_to_num(0, 0, 0) for x in batch)
    keys = {"prompt_ids": torch.zeros(3, 2), "prompt_mask": torch.ones(3, 2), "completion_ids": torch.zeros(3, 4)}
    keys |= {"completion_mask": mask.long(), "advantages": advantages, "ref_per_token_logps": ref * mask}
    return logp * mask, keys | {"old_per_token_logps": old * mask, "num_items_in_batch": mask.sum()}


def trl_trainer(logp, mask, **options):
    """As much of a trainer as its loss looks at; the model's log-probabilities are given."""
    accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    accelerator.gather_for_metrics = accelerator.gather
    args = SimpleNamespace(delta=None, use_bias_correction_kl=options.pop("bias", False), steps_per_generation=1)
    plain: dict[str, Any] = {
        "top_entropy_quantile": 1.0,
        "vllm_importance_sampling_correction": True,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "beta": 0.0,
    }
    plain |= {"epsilon_low": 0.2, "epsilon_high": 0.28, "max_completion_length": 10, "aux_loss_enabled": False}
    plain |= {"_entropy_bonus_enabled": False, "current_gradient_accumulation_steps": 1, "accelerator": accelerator}
    metrics: dict[str, defaultdict[str, list[float]]] = {"train": defaultdict(list)}
    given = SimpleNamespace(args=args, model=SimpleNamespace(training=True), _metrics=metrics, **(plain | options))
    given._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros(mask.shape), None)
    return given


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", get_args(LossType))
@pytest.mark.parametrize(("beta", "bias"), [(0.0, False), (0.3, False), (0.3, True)])
def test_losses_are_those_of_trl_s_grpo_trainer(batch, level, loss_type, beta, bias):
    """And GMPO's of its own trainer, which has no other level and no correction of the KL."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    if loss_type == "gmpo":
        if level != "token" or bias:
            pytest.skip("TRL's GMPO has none")
        trainer = pytest.importorskip("trl.experimental.gmpo").GMPOTrainer
    theirs, inputs = trl_inputs(batch)
    theirs = theirs.detach().requires_grad_()
    logp, old, ref, advantages, mask = batch
    options = {"importance_sampling_level": level, "loss_type": loss_type, "beta": beta, "bias": bias}
    high = options["epsilon_high"] = 1.1 if loss_type == "cispo" else 0.28
    expected = trainer._compute_loss(trl_trainer(theirs, mask, **options), SimpleNamespace(training=True), inputs)
    expected.backward()

    ours = logp.detach().clone().requires_grad_()
    weights = token_weights(mask, loss_type, 3, mask.sum(), 10)
    ratios = pooled(ours, old, mask, level)
    loss, _ = loss_of(loss_type, ours, ratios, advantages, weights, mask, 0.2, high)
    kl = kls.estimate_kl(ours.where(mask, 0.0), ref.where(mask, 0.0), "k3") * (ratios.exp() if bias else 1.0)
    loss = loss + beta * (weights * kl).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)


def test_the_loss_is_that_of_trl_s_rloo_trainer(batch):
    trl = pytest.importorskip("trl.trainer.rloo_trainer")
    theirs, inputs = trl_inputs(batch)
    theirs = theirs.detach().requires_grad_()
    logp, old, _, advantages, mask = batch
    inputs["old_logps"] = inputs["old_per_token_logps"].sum(1)
    given = trl_trainer(theirs, mask)
    expected = trl.RLOOTrainer._compute_loss(given, SimpleNamespace(training=True), inputs)
    expected.backward()
    ours = logp.detach().clone().requires_grad_()
    ratios = pooled(ours, old, mask, "sequence_sum")
    loss, _ = clipped_loss(ratios, advantages, token_weights(mask, "grpo", 3, mask.sum(), 10), mask, 0.2, 0.28)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)
