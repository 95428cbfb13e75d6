"""Masked statistics against numpy on the selected tokens alone."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.objectives import masked

FEW = settings(max_examples=50, deadline=None, derandomize=True)
GARBAGE = [1e9, math.inf, -math.inf, math.nan]

numbers = st.floats(-100, 100, allow_subnormal=False)
# Slots of one batch as (value, is it real): holes and padding on either side included.
slots = st.lists(st.tuples(numbers, st.booleans()), min_size=2, max_size=12).filter(lambda s: sum(m for _, m in s) >= 2)


def tensors(pairs):
    x, mask = zip(*pairs, strict=True)
    return torch.tensor(x, dtype=torch.float64), torch.tensor(mask)


# Real tokens 1, 3, 5: mean 3, squared deviations 4 + 0 + 4 = 8, variance 8/2 = 4 or 8/3, standard deviation 2.
X = torch.tensor([[1.0, 3.0, 70.0], [80.0, 5.0, 90.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [False, True, False]])


def test_mean_variance_and_whitening_of_three_real_tokens_worked_by_hand():
    assert masked.masked_mean(X, MASK).item() == 3
    assert masked.masked_var(X, MASK).item() == 4
    assert masked.masked_var(X, MASK, unbiased=False).item() == pytest.approx(8 / 3, rel=1e-15)
    shifted = torch.tensor([[-1.0, 0, 0], [0, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(masked.whiten(X, MASK), shifted, rtol=1e-8, atol=0)


def test_mean_along_a_dimension():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    # Row sums 1 + 3 over 2 tokens; a row without real tokens gives 0. Columns: 1, 3, and none.
    assert masked.masked_mean(X, mask, dim=1).tolist() == [2, 0]
    assert masked.masked_mean(X, mask, dim=-1).tolist() == [2, 0]
    assert masked.masked_mean(X, mask, dim=0).tolist() == [1, 3, 0]
    assert masked.masked_mean(X, MASK, dim=0).tolist() == [1, 4, 0]
    assert masked.masked_mean(X, mask, dim=(0, 1)).item() == 2
    assert masked.masked_mean(X, torch.zeros_like(mask), dim=1).tolist() == [0, 0]


def test_explained_variance_by_hand():
    returns = X
    values = torch.tensor([[2.0, 3.0, -70.0], [0.0, 4.0, 1.0]], dtype=torch.float64)
    # R - V = -1, 0, 1 has variance 2/3, R has 8/3: 1 - 1/4.
    assert masked.explained_variance(values, returns, MASK).item() == pytest.approx(0.75, rel=1e-14)
    assert masked.explained_variance(values + 5, returns, MASK).item() == pytest.approx(0.75, rel=1e-14)
    # Swapped, the reference is Var[V] = 2/3: 1 - (2/3) / (2/3).
    assert masked.explained_variance(returns, values, MASK).item() == pytest.approx(0.0, abs=1e-14)
    assert masked.explained_variance(returns, returns, MASK).item() == 1
    assert masked.explained_variance(torch.full_like(X, 9), returns, MASK).item() == pytest.approx(0, abs=1e-14)
    # R - (-R) = 2R has four times the variance: 1 - 4.
    assert masked.explained_variance(-returns, returns, MASK).item() == pytest.approx(-3, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 3, 7, 11])
def test_explained_variance_of_equal_returns_is_nan(count, dtype):
    # 0.1 is no binary fraction: the mean of several may differ from it, and the variance be tiny instead of 0.
    mask = torch.arange(12) < count
    returns = torch.where(mask, 0.1, torch.arange(12.0)).to(dtype)
    values = torch.linspace(0, 1, 12, dtype=dtype)
    assert masked.explained_variance(values, returns, mask).isnan()


@FEW
@given(slots)
def test_against_numpy(pairs):
    x, mask = tensors(pairs)
    real = np.array([v for v, m in pairs if m])
    close: dict[str, Any] = {"rel": 1e-12, "abs": 1e-12}
    assert masked.masked_mean(x, mask).item() == pytest.approx(real.mean(), **close)
    assert masked.masked_var(x, mask).item() == pytest.approx(real.var(ddof=1), **close)
    assert masked.masked_var(x, mask, unbiased=False).item() == pytest.approx(real.var(), **close)


@FEW
@given(slots)
def test_whitened_mean_and_deviation(pairs):
    x, mask = tensors(pairs)
    real = x.numpy()[mask.numpy()]
    if real.std(ddof=1) < 1e-2:
        return
    white = masked.whiten(x, mask).numpy()
    assert (white[~mask.numpy()] == 0).all()
    white = white[mask.numpy()]
    # The 1e-8 under the root takes at most 1e-8 / (2 * 1e-4) off the deviation.
    assert white.std(ddof=1) == pytest.approx(1, rel=1e-4)
    assert white.mean() == pytest.approx(0, abs=1e-9)
    assert white == pytest.approx((real - real.mean()) / math.sqrt(real.var(ddof=1) + 1e-8), rel=1e-9, abs=1e-9)


@FEW
@given(slots, st.integers(0, 5), st.integers(0, 5))
def test_padding_side_and_amount_are_irrelevant(pairs, left, right):
    x, mask = tensors(pairs)
    wide, wide_mask = tensors([(7.0, False)] * left + pairs + [(-7.0, False)] * right)
    for f in (masked.masked_mean, masked.masked_var):
        torch.testing.assert_close(f(wide, wide_mask), f(x, mask), rtol=1e-12, atol=1e-12)
    inner = masked.whiten(wide, wide_mask)[left : left + len(pairs)]
    torch.testing.assert_close(inner, masked.whiten(x, mask), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("count", [2, 3, 1000])
@pytest.mark.parametrize("size", [0.1, 700.0, 1e6])
def test_tokens_that_differ_by_rounding_whiten_to_zero(size, count):
    """Equal ones, whose mean may be rounded, and neighbouring numbers; one per cent more is a signal."""
    mask = torch.ones(1, count, dtype=torch.bool)
    equal = torch.full((1, count), size)
    rounded = torch.where(torch.arange(count) % 2 == 0, equal, equal * (1 + 2 * torch.finfo().eps))
    for x in (equal, rounded):
        assert not masked.whiten(x, mask).any()
        apart = x - size  # as an advantage is the difference of large numbers
        assert not masked.whiten(apart, mask, size=torch.tensor(size)).any()
    signal = torch.where(torch.arange(count) % 2 == 0, size, 1.01 * size)[None]
    for x, of in ((signal, None), (signal - size, torch.tensor(size))):
        assert masked.whiten(x, mask, size=of).std().item() == pytest.approx(1, rel=0.05)


FUNCTIONS = {
    "mean": masked.masked_mean,
    "row mean": lambda x, mask: masked.masked_mean(x, mask, dim=1),
    "var": masked.masked_var,
    "biased var": lambda x, mask: masked.masked_var(x, mask, unbiased=False),
    "whiten": masked.whiten,
    "zero_pads": masked.zero_pads,
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_garbage_in_pads_changes_nothing(f, garbage):
    def run(x):
        x = x.clone().requires_grad_()
        out = f(x, MASK)
        # Unequal weights, so that no gradient is 0 by symmetry.
        (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape)).sum().backward()
        return out.detach(), x.grad

    clean, clean_grad = run(torch.where(MASK, X, 0.0))
    dirty = torch.where(MASK, X, garbage)
    kept = dirty.clone()
    out, grad = run(dirty)
    assert torch.equal(out, clean)
    assert torch.equal(grad[MASK], clean_grad[MASK]) and clean_grad[MASK].abs().max() > 0
    assert (grad[~MASK] == 0).all()
    assert torch.equal(dirty.nan_to_num(), kept.nan_to_num())


def test_a_real_nan_is_not_hidden():
    x = X.clone()
    x[0, 1] = math.nan
    assert masked.masked_mean(x, MASK).isnan() and masked.masked_var(x, MASK).isnan()
    assert masked.masked_mean(x, MASK, dim=1).isnan().tolist() == [True, False]
    assert masked.whiten(x, MASK)[MASK].isnan().all()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_pads_of_explained_variance(garbage):
    values = torch.tensor([[2.0, 3.0, 0.0], [0.0, 4.0, 0.0]], dtype=torch.float64)
    clean = masked.explained_variance(values, X, MASK)
    for v, r in [(torch.where(MASK, values, garbage), X), (values, torch.where(MASK, X, garbage))]:
        assert torch.equal(masked.explained_variance(v, r, MASK), clean)


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_gradcheck(f):
    assert torch.autograd.gradcheck(lambda x: f(x, MASK), (X.clone().requires_grad_(),))


def test_explained_variance_is_detached():
    assert not masked.explained_variance(X.clone().requires_grad_(), X * 2, MASK).requires_grad


def test_reductions_of_bfloat16_are_float32():
    # In bfloat16 a running sum stops growing at 256, where the next number is 258.
    x = torch.ones(4096, dtype=torch.bfloat16)
    x[::2] = 1.0078125  # the bfloat16 after 1
    mask = torch.ones(4096, dtype=torch.bool)
    assert masked.masked_mean(x, mask).item() == 1.00390625
    assert masked.masked_mean(x, mask).dtype == torch.float32
    assert masked.masked_var(x, mask).item() == pytest.approx(0.00390625**2 * 4096 / 4095, rel=1e-6)
    assert masked.whiten(x, mask).dtype == torch.float32
    assert masked.masked_mean(x.double(), mask).dtype == torch.float64
    assert masked.masked_mean(mask, mask).item() == 1  # a bool input is a share


def test_a_mask_that_does_not_fit_is_refused_and_one_that_leaves_too_little_leaves_no_spread():
    with pytest.raises(ValueError, match=r"bool.*int64"):
        masked.masked_mean(X, MASK.long())
    for f in (masked.masked_mean, masked.masked_var, masked.whiten):
        with pytest.raises(ValueError, match=r"x has shape \(2, 3\), mask has \(1, 3\)"):
            f(X, MASK[:1])
        with pytest.raises(ValueError, match=r"\(2, 3\), mask has \(3, 2\)"):
            f(X, MASK.reshape(3, 2))
    none = torch.zeros_like(MASK)
    assert masked.masked_mean(X, none).item() == 0
    one = torch.tensor([[True, False, False], [False, False, False]])
    for too_few in (none, one):
        assert masked.masked_var(X, too_few).item() == masked.masked_var(X, too_few, unbiased=False).item() == 0
        assert not masked.whiten(X, too_few).any(), "a number alone has no spread"
    with pytest.raises(ValueError, match="returns has shape"):
        masked.explained_variance(X, X[:, :2], MASK)
    assert masked.explained_variance(X, X, none).isnan()
