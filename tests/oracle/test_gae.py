"""Advantages against the double sum over t and l, in Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.objectives.rewards import gae

FEW = settings(max_examples=50, deadline=None, derandomize=True)
GARBAGE = [1e9, math.inf, -math.inf, math.nan]

number = st.floats(-10, 10, allow_subnormal=False)
# Each row lists (reward, value) of its real tokens; rows differ in length and may be empty.
batches = st.lists(st.lists(st.tuples(number, number), max_size=6), min_size=1, max_size=4)
share = st.floats(0, 1)


def padded(rows, extra=0, fill=0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded rewards, values and mask, (B, longest row + extra)."""
    width = max(len(row) for row in rows) + extra
    full = [list(row) + [(fill, fill)] * (width - len(row)) for row in rows]
    rewards = torch.tensor([[r for r, _ in row] for row in full], dtype=torch.float64).reshape(len(rows), width)
    values = torch.tensor([[v for _, v in row] for row in full], dtype=torch.float64).reshape(len(rows), width)
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows]).reshape(len(rows), width).bool()
    return rewards, values, mask


def oracle(row, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, with V = 0 after the last token."""
    n = len(row)
    value = [v for _, v in row] + [0.0]
    delta = [row[t][0] + gamma * value[t + 1] - value[t] for t in range(n)]
    return [math.fsum((gamma * lam) ** l * delta[t + l] for l in range(n - t)) for t in range(n)]  # noqa: E741


def test_advantages_and_returns_of_two_rows_worked_by_hand():
    rewards = torch.tensor([[1.0, 2, 3, 50], [2, 60, 70, 80]], dtype=torch.float64)
    values = torch.tensor([[4.0, 5, 6, 90], [0.5, 20, 30, 40]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.25)
    # First row: delta = 1 + 5/2 - 4 = -1/2,  2 + 6/2 - 5 = 0,  3 + 0 - 6 = -3;  gamma lam = 1/8.
    # A_2 = -3,  A_1 = 0 - 3/8 = -0.375,  A_0 = -0.5 - 0.375/8 = -0.546875.  Second row: 2 + 0 - 0.5 = 1.5.
    assert advantages.tolist() == [[-0.546875, -0.375, -3, 0], [1.5, 0, 0, 0]]
    # Returns are A + V: 4 - 0.546875, 5 - 0.375, 6 - 3; 0.5 + 1.5.
    assert returns.tolist() == [[3.453125, 4.625, 3, 0], [2, 0, 0, 0]]


@FEW
@given(batches, share, share, st.integers(0, 3))
def test_against_the_double_sum(rows, gamma, lam, extra):
    rewards, values, mask = padded(rows, extra, fill=math.nan)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    assert advantages.shape == returns.shape == mask.shape
    for b, row in enumerate(rows):
        expected = oracle(row, gamma, lam)
        pads = [0.0] * (mask.shape[1] - len(row))
        assert advantages[b].tolist() == pytest.approx(expected + pads, rel=1e-10, abs=1e-10)
        targets = [a + v for a, (_, v) in zip(expected, row, strict=True)]
        assert returns[b].tolist() == pytest.approx(targets + pads, rel=1e-10, abs=1e-10)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@FEW
@given(batches)
def test_without_discount_it_is_the_reward_to_go_minus_the_value(rows):
    advantages, returns = gae(*padded(rows), gamma=1.0, lam=1.0)
    for b, row in enumerate(rows):
        for t, (_, value) in enumerate(row):
            to_go = math.fsum(r for r, _ in row[t:])
            assert returns[b, t].item() == pytest.approx(to_go, abs=1e-10)
            assert advantages[b, t].item() == pytest.approx(to_go - value, abs=1e-10)


@FEW
@given(batches, share)
def test_lambda_zero_is_one_step_temporal_difference(rows, gamma):
    advantages, _ = gae(*padded(rows), gamma=gamma, lam=0.0)
    for b, row in enumerate(rows):
        for t, (reward, value) in enumerate(row):
            after = row[t + 1][1] if t + 1 < len(row) else 0.0
            assert advantages[b, t].item() == pytest.approx(reward + gamma * after - value, abs=1e-12)


@FEW
@given(batches, share, st.integers(1, 4))
def test_amount_of_padding_is_irrelevant(rows, share, extra):
    narrow, wide = gae(*padded(rows), 0.9, share), gae(*padded(rows, extra, fill=5.0), 0.9, share)
    width = narrow[0].shape[1]
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b[:, :width])


REWARDS = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, 0.0]], dtype=torch.float64)
VALUES = torch.tensor([[0.3, 0.7, -0.2], [1.1, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("dirty", ["rewards", "values", "both"])
def test_garbage_in_pads_changes_nothing(dirty, garbage):
    def run(rewards, values):
        rewards, values = rewards.clone().requires_grad_(), values.clone().requires_grad_()
        advantages, returns = gae(rewards, values, MASK, 0.9, 0.8)
        weight = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
        (weight * advantages + weight.flip(1) * returns).sum().backward()
        return advantages.detach(), returns.detach(), rewards.grad, values.grad

    spoilt = torch.where(MASK, REWARDS, garbage), torch.where(MASK, VALUES, garbage)
    inputs = (spoilt[0] if dirty != "values" else REWARDS, spoilt[1] if dirty != "rewards" else VALUES)
    clean, out = run(REWARDS, VALUES), run(*inputs)
    for a, b in zip(clean, out, strict=True):
        assert torch.equal(a, b)
        assert (b[~MASK] == 0).all() and b[MASK].abs().min() > 0


def test_gradcheck():
    inputs = (REWARDS.clone().requires_grad_(), VALUES.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda r, v: gae(r, v, MASK, 0.9, 0.8), inputs)


def test_bfloat16_is_computed_in_float32():
    # 256 + 1 is no bfloat16: summed there, the reward-to-go of 300 ones would stop at 256.
    rewards, mask = torch.ones(1, 300, dtype=torch.bfloat16), torch.ones(1, 300, dtype=torch.bool)
    advantages, returns = gae(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)
    assert advantages.dtype == returns.dtype == torch.float32
    assert returns[0, 0].item() == 300
    # The wider of the two types decides.
    assert gae(REWARDS.float(), VALUES, MASK, 1.0, 1.0)[0].dtype == torch.float64
    assert gae(REWARDS, VALUES.float(), MASK, 1.0, 1.0)[0].dtype == torch.float64


def test_new_tensors_are_made_where_the_inputs_are():
    with torch.device("meta"):
        advantages, returns = gae(REWARDS, VALUES, MASK, 0.9, 0.8)
    assert advantages.device == returns.device == REWARDS.device


def test_rows_and_batches_without_tokens():
    none = torch.zeros_like(MASK)
    assert all(not out.any() for out in gae(REWARDS, VALUES, none, 0.9, 0.8))
    assert all(out.shape == (2, 0) for out in gae(REWARDS[:, :0], VALUES[:, :0], MASK[:, :0], 0.9, 0.8))


def test_errors_and_inputs_unchanged():
    kept = REWARDS.clone(), VALUES.clone(), MASK.clone()
    gae(REWARDS, VALUES, MASK, 0.9, 0.8)
    assert all(torch.equal(a, b) for a, b in zip((REWARDS, VALUES, MASK), kept, strict=True))
    with pytest.raises(ValueError, match=r"values has shape \(2, 2\)"):
        gae(REWARDS, VALUES[:, :2], MASK, 0.9, 0.8)
    with pytest.raises(ValueError, match=r"rewards has shape \(1, 3\)"):
        gae(REWARDS[:1], VALUES, MASK, 0.9, 0.8)
    with pytest.raises(ValueError, match="bool"):
        gae(REWARDS, VALUES, MASK.float(), 0.9, 0.8)
    for row in ([False, True, True], [True, False, True]):  # padded on the left, a hole
        with pytest.raises(ValueError, match="prefix"):
            gae(REWARDS, VALUES, torch.tensor([row, [True, True, True]]), 0.9, 0.8)
