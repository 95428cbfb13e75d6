"""Losses against loops over tokens in Python floats."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.objectives.losses import (
    ppo_policy_loss,
    ppo_value_loss,
)

FEW = settings(max_examples=50, deadline=None, derandomize=True)
GARBAGE = [1e9, math.inf, -math.inf, math.nan]

number = st.floats(-3, 3, allow_subnormal=False)
# Slots of one row, flattened over the batch: three numbers and whether the token is real.
slots = st.lists(st.tuples(number, number, number, st.booleans()), min_size=1, max_size=10).filter(
    lambda batch: any(real for *_, real in batch)
)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def columns(rows):
    *numbers, mask = zip(*rows, strict=True)
    return [f64(column) for column in numbers], torch.tensor([mask])


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def oracle_policy(rows, clip):
    terms, bound, squares, ratios = [], [], [], []
    for logp, old, advantage, real in rows:
        if not real:
            continue
        ratio = math.exp(logp - old)
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        terms.append(-min(ratio * advantage, clipped * advantage))
        bound.append(clipped * advantage < ratio * advantage)
        squares.append(0.5 * (logp - old) ** 2)
        ratios.append(ratio)
    return mean(terms), {"clipfrac": mean(bound), "approxkl": mean(squares), "ratio": mean(ratios)}


def oracle_value(rows, clip):
    terms, bound = [], []
    for value, old, target, real in rows:
        if not real:
            continue
        free = (value - target) ** 2
        near = value if clip is None else min(max(value, old - clip), old + clip)
        terms.append(max(free, (near - target) ** 2))
        bound.append((near - target) ** 2 > free)
    return 0.5 * mean(terms), {"clipfrac": mean(bound)}


# --- the policy loss ---------------------------------------------------------------------------------------------


def test_policy_loss_by_hand():
    # Ratios 2, 2, 1/2, 1/2, 9/8 with advantages 1, -1, 1, -1, 3 and clip 1/4:
    #   2,   A = 1:  min(2, 5/4)      = 5/4, clipped
    #   2,   A = -1: min(-2, -5/4)    = -2
    #   1/2, A = 1:  min(1/2, 3/4)    = 1/2
    #   1/2, A = -1: min(-1/2, -3/4)  = -3/4, clipped
    #   9/8, A = 3:  inside the range = 27/8
    # The sum is 19/8 over 5 tokens. The sixth slot is padding.
    ratio = f64([2, 2, 0.5, 0.5, 1.125, 7])
    old = f64([-1, -2, -3, -4, -5, -6])
    advantages = f64([1, -1, 1, -1, 3, 9])
    mask = torch.tensor([[True] * 5 + [False]])
    loss, stats = ppo_policy_loss(old + ratio.log(), old, advantages, mask, clip=0.25)
    assert loss.item() == pytest.approx(-19 / 8 / 5, rel=1e-14)
    assert stats.clipfrac.item() == pytest.approx(2 / 5, rel=1e-6)
    assert stats.ratio.item() == pytest.approx((2 + 2 + 0.5 + 0.5 + 1.125) / 5, rel=1e-14)
    kl = (4 * math.log(2) ** 2 + math.log(1.125) ** 2) / 2 / 5
    assert stats.approxkl.item() == pytest.approx(kl, rel=1e-14)


def test_clipped_tokens_give_no_gradient():
    # The gradient of an unclipped token is -ratio A / n; the ratios are those of the test above.
    ratio, advantages = f64([2, 2, 0.5, 0.5]), f64([1, -1, 1, -1])
    logp = ratio.log().requires_grad_()
    loss, _ = ppo_policy_loss(logp, torch.zeros_like(logp), advantages, torch.ones(1, 4, dtype=torch.bool), clip=0.25)
    loss.backward()
    assert logp.grad.flatten().tolist() == pytest.approx([0, 2 / 4, -0.5 / 4, 0], abs=1e-15)


@FEW
@given(slots, st.floats(0.01, 0.9))
def test_policy_loss_against_a_loop(rows, clip):
    (logp, old, advantages), mask = columns(rows)
    loss, stats = ppo_policy_loss(logp, old, advantages, mask, clip)
    expected, expected_stats = oracle_policy(rows, clip)
    assert loss.item() == pytest.approx(expected, rel=1e-11, abs=1e-11)
    assert loss.shape == ()
    for name in ("approxkl", "ratio"):
        assert getattr(stats, name).item() == pytest.approx(expected_stats[name], rel=1e-12)
    # At a ratio on the very edge of the range, either answer is right.
    on_edge = any(abs(abs(math.exp(a - b) - 1) - clip) < 1e-12 or abs(c) < 1e-300 for a, b, c, _ in rows)
    assert on_edge or stats.clipfrac.item() == pytest.approx(expected_stats["clipfrac"], rel=1e-6)


@FEW
@given(slots)
def test_policy_loss_at_the_old_policy(rows):
    """Ratio 1: the loss is minus the mean advantage, and its gradient the policy gradient -A / n."""
    (logp, _, advantages), mask = columns(rows)
    logp.requires_grad_()
    loss, stats = ppo_policy_loss(logp, logp.detach(), advantages, mask, clip=0.2)
    real = [a for _, _, a, is_real in rows if is_real]
    assert loss.item() == pytest.approx(-mean(real), abs=1e-14)
    assert [x.item() for x in stats] == [0, 0, 1]
    loss.backward()
    torch.testing.assert_close(logp.grad[mask], -f64(*real) / len(real), rtol=1e-14, atol=0)


# --- the value loss ----------------------------------------------------------------------------------------------


def test_value_loss_by_hand():
    # Old value 0, clip 1. Value, return -> squared error, clipped squared error:
    #   3, 4 -> 1, (1 - 4)^2 = 9: the clipped one counts
    #   3, 1 -> 4, 0: the free one counts
    #   1/2, 2 -> 9/4 in both, inside the range
    #   -3, -5 -> 4, (-1 + 5)^2 = 16: the clipped one counts
    # The sum is 31.25 over 4 tokens, halved. The fifth slot is padding.
    values, returns = f64([3, 3, 0.5, -3, 8]), f64([4, 1, 2, -5, 1])
    mask = torch.tensor([[True] * 4 + [False]])
    loss, clipfrac = ppo_value_loss(values, torch.zeros_like(values), returns, mask, clip=1.0)
    assert loss.item() == 31.25 / 4 / 2
    assert clipfrac.item() == 0.5
    # Without clipping: 1 + 4 + 9/4 + 4.
    loss, clipfrac = ppo_value_loss(values, torch.zeros_like(values), returns, mask, clip=None)
    assert loss.item() == 11.25 / 4 / 2
    assert clipfrac.item() == 0


def test_clipped_values_give_no_gradient():
    values = f64([3, 3, 0.5, -3]).requires_grad_()
    returns = f64([4, 1, 2, -5])
    loss, _ = ppo_value_loss(values, f64([0, 0, 0, 0]), returns, torch.ones(1, 4, dtype=torch.bool), clip=1.0)
    loss.backward()
    # (V - R) / n where the free error counts.
    assert values.grad.flatten().tolist() == [0, 2 / 4, -1.5 / 4, 0]


@FEW
@given(slots, st.one_of(st.none(), st.floats(0.01, 2)))
def test_value_loss_against_a_loop(rows, clip):
    (values, old, returns), mask = columns(rows)
    loss, clipfrac = ppo_value_loss(values, old, returns, mask, clip)
    expected, expected_stats = oracle_value(rows, clip)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert loss.shape == () and loss.item() >= 0
    assert clipfrac.item() == pytest.approx(expected_stats["clipfrac"], rel=1e-6)


# --- both PPO losses ---------------------------------------------------------------------------------------------


def policy(logp, old_logp, advantages, mask):
    loss, stats = ppo_policy_loss(logp, old_logp, advantages, mask, clip=0.2)
    return loss, stats._asdict()


def value(values, old_values, returns, mask, clip: float | None = 0.2):
    loss, clipfrac = ppo_value_loss(values, old_values, returns, mask, clip)
    return loss, {"clipfrac": clipfrac}


LOSSES = {"policy": policy, "value": value, "value, unclipped": partial(value, clip=None)}
each_loss = pytest.mark.parametrize("f", LOSSES.values(), ids=LOSSES.keys())


def example(shape=(4, 6), dtype=torch.float64):
    """Inputs with tokens inside and outside the clipping range, and rows of 6, 4, 3 and 1 real tokens."""
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    return inputs, torch.arange(shape[1]) < torch.tensor([6, 4, 3, 1]).unsqueeze(1)


@each_loss
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("dirty", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_garbage_in_pads_changes_nothing(f, garbage, dirty):
    def run(inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        loss, stats = f(*inputs, mask)
        loss.backward()
        return [loss.detach(), *stats.values()], [x.grad for x in inputs]

    inputs, mask = example()
    inputs = [torch.where(mask, x, 0.0) for x in inputs]
    clean, clean_grads = run(inputs)
    out, grads = run([torch.where(mask, x, garbage) if i in dirty else x for i, x in enumerate(inputs)])
    assert all(torch.equal(a, b) for a, b in zip(clean, out, strict=True))
    for a, b in zip(clean_grads, grads, strict=True):
        if a is None:  # the unclipped value loss does not use the old values
            assert b is None
            continue
        assert torch.equal(a[mask], b[mask])
        assert (b[~mask] == 0).all()
    assert clean_grads[0][mask].abs().max() > 0


@each_loss
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (3, 1), (1, 3)], ids=str)
def test_micro_batches_add_up_to_the_minibatch(f, sizes):
    inputs, mask = example()
    whole = inputs[0].clone().requires_grad_()
    loss, stats = f(whole, *inputs[1:], mask)
    loss.backward()

    parts = inputs[0].clone().requires_grad_()
    total, stat_totals, start = 0.0, dict.fromkeys(stats, 0.0), 0
    for size in sizes:
        rows = slice(start, start + size)
        share = mask[rows].sum() / mask.sum().double()
        part, part_stats = f(parts[rows], inputs[1][rows], inputs[2][rows], mask[rows])
        (part * share).backward()
        total += (part * share).item()
        for name, x in part_stats.items():
            stat_totals[name] += (x * share).item()
        start += size
    assert total == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-15)
    for name, x in stats.items():
        tolerance = 1e-6 if name == "clipfrac" else 1e-12  # a share is a float32
        assert stat_totals[name] == pytest.approx(x.item(), rel=tolerance)


@each_loss
@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 3), (2, 5)])
def test_padding_side_and_amount_are_irrelevant(f, left, right):
    def pad(x, fill):
        return torch.nn.functional.pad(x, (left, right), value=fill)

    inputs, mask = example()
    loss, stats = f(*inputs, mask)
    wide, wide_stats = f(*(pad(x, 3.0) for x in inputs), pad(mask, False))
    assert wide.item() == pytest.approx(loss.item(), rel=1e-13)
    for name, x in stats.items():
        assert wide_stats[name].item() == pytest.approx(x.item(), rel=1e-13)


@each_loss
def test_gradcheck_of_the_ppo_losses(f):
    inputs, mask = example()
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *xs: f(*xs, mask)[0], inputs)


@each_loss
def test_stats_are_detached_scalars(f):
    inputs, mask = example()
    loss, stats = f(*(x.requires_grad_() for x in inputs), mask)
    assert loss.requires_grad and loss.shape == ()
    for x in stats.values():
        assert isinstance(x, torch.Tensor) and x.shape == () and not x.requires_grad


@each_loss
def test_bfloat16_inputs_are_computed_in_float32(f):
    inputs, mask = example(dtype=torch.bfloat16)
    loss, _ = f(*inputs, mask)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(f(*(x.double() for x in inputs), mask)[0].item(), rel=1e-5)


@each_loss
def test_errors_of_the_ppo_losses_and_inputs_unchanged(f):
    inputs, mask = example()
    kept = [x.clone() for x in inputs]
    f(*inputs, mask)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
    for i in range(3):
        with pytest.raises(ValueError, match=r"has shape \(4, 1\), mask has \(4, 6\)"):
            f(*(x[:, :1] if j == i else x for j, x in enumerate(inputs)), mask)
    with pytest.raises(ValueError, match="bool"):
        f(*inputs, mask.double())
    loss, stats = f(*inputs, torch.zeros_like(mask))
    assert [loss.item(), *(x.item() for x in stats.values())] == [0.0] * (1 + len(stats)), "without real tokens"
