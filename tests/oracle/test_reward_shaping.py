"""Shaped rewards against a loop over tokens in Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.objectives.rewards import shape_rewards, shape_scores

FEW = settings(max_examples=50, deadline=None, derandomize=True)
GARBAGE = [1e9, math.inf, -math.inf, math.nan]

number = st.floats(-10, 10, allow_subnormal=False)


@st.composite
def batches(draw):
    """Rows of (kl, is it real) with at least one real token each, anywhere, and a score per row."""
    width = draw(st.integers(1, 6))
    row = st.lists(st.tuples(number, st.booleans()), min_size=width, max_size=width)
    rows = draw(st.lists(row.filter(lambda slots: any(real for _, real in slots)), min_size=1, max_size=4))
    return rows, draw(st.lists(number, min_size=len(rows), max_size=len(rows)))


def oracle(row, score, kl_coef):
    out = [-kl_coef * kl if real else 0.0 for kl, real in row]
    for t in reversed(range(len(row))):
        if row[t][1]:
            out[t] += score
            return out
    raise AssertionError("no real token")


KL = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [3.0, 5.0, 7.0]], dtype=torch.float64)
SCORES = torch.tensor([10.0, -20.0, 40.0], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])


def test_the_divergence_is_charged_at_each_token_and_the_score_joins_the_last():
    # Half of the divergence is charged: -1/2, -1 and -4, -8, -16 and -3/2; the scores join the last real token.
    expected = [[-0.5, -1 + 10, 0], [-4, -8, -16 - 20], [-1.5 + 40, 0, 0]]
    assert shape_rewards(KL, SCORES, MASK, kl_coef=0.5).tolist() == expected


def test_padding_on_the_left_and_holes():
    mask = torch.tensor([[False, True, True], [True, False, True], [False, True, False]])
    expected = [[0, -1, -2 + 10], [-4, 0, -16 - 20], [0, -2.5 + 40, 0]]
    assert shape_rewards(KL, SCORES, mask, kl_coef=0.5).tolist() == expected


@FEW
@given(batches(), st.floats(0, 2))
def test_against_a_loop(batch, kl_coef):
    rows, scores = batch
    kl = torch.tensor([[k for k, _ in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[real for _, real in row] for row in rows])
    out = shape_rewards(kl, torch.tensor(scores, dtype=torch.float64), mask, kl_coef)
    for b, row in enumerate(rows):
        assert out[b].tolist() == pytest.approx(oracle(row, scores[b], kl_coef), rel=1e-14, abs=1e-14)
        # A response is paid its score once, less the charge for its whole divergence.
        total = scores[b] - kl_coef * math.fsum(k for k, real in row if real)
        assert out[b].sum().item() == pytest.approx(total, abs=1e-12)


@FEW
@given(st.integers(0, 4), st.integers(0, 4))
def test_padding_side_and_amount_are_irrelevant(left, right):
    def pad(x, fill):
        return torch.nn.functional.pad(x, (left, right), value=fill)

    out = shape_rewards(pad(KL, 9.0), SCORES, pad(MASK, False), 0.5)
    assert torch.equal(out, pad(shape_rewards(KL, SCORES, MASK, 0.5), 0.0))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_pads_changes_nothing(garbage):
    def run(kl):
        kl, scores = kl.clone().requires_grad_(), SCORES.clone().requires_grad_()
        out = shape_rewards(kl, scores, MASK, 0.5)
        (out * torch.arange(1.0, 10.0).reshape(3, 3)).sum().backward()
        return out.detach(), kl.grad, scores.grad

    clean, out = run(KL), run(torch.where(MASK, KL, garbage))
    for a, b in zip(clean, out, strict=True):
        assert torch.equal(a, b)
    assert (out[0][~MASK] == 0).all() and (out[1][~MASK] == 0).all()
    assert out[1][MASK].abs().min() > 0 and out[2].tolist() == [2, 6, 7]  # the weights at the last real tokens


def test_gradcheck():
    inputs = (KL.clone().requires_grad_(), SCORES.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda kl, scores: shape_rewards(kl, scores, MASK, 0.5), inputs)


def test_bfloat16_is_computed_in_float32():
    # 256 - 0.5 is no bfloat16.
    out = shape_rewards(torch.ones(1, 1).bfloat16(), torch.tensor([256.0]).bfloat16(), torch.tensor([[True]]), 0.5)
    assert out.dtype == torch.float32 and out.item() == 255.5


def test_new_tensors_are_made_where_the_inputs_are():
    with torch.device("meta"):
        out = shape_rewards(KL, SCORES, MASK, 0.5)
    assert out.device == KL.device


def test_errors_and_inputs_unchanged():
    kept = KL.clone(), SCORES.clone(), MASK.clone()
    shape_rewards(KL, SCORES, MASK, 0.5)
    assert all(torch.equal(a, b) for a, b in zip((KL, SCORES, MASK), kept, strict=True))
    with pytest.raises(ValueError, match=r"kl has shape \(3, 2\)"):
        shape_rewards(KL[:, :2], SCORES, MASK, 0.5)
    for scores in (SCORES[:2], SCORES.unsqueeze(1), SCORES[0]):
        with pytest.raises(ValueError, match="shaped_scores has shape"):
            shape_rewards(KL, scores, MASK, 0.5)
    with pytest.raises(ValueError, match="bool"):
        shape_rewards(KL, SCORES, MASK.int(), 0.5)
    with pytest.raises(ValueError, match="no real token"):
        shape_rewards(KL, SCORES, MASK & torch.tensor([[True], [False], [True]]), 0.5)
    with pytest.raises(ValueError, match="no real token"):
        shape_rewards(KL[:, :0], SCORES, MASK[:, :0], 0.5)


RAW = torch.tensor([1.0, -3.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0, -3.0, 0.5]),
        ({"mean": 0.5, "sd": 2.0}, [0.25, -1.75, 0.0]),
        ({"sigmoid": True}, [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(3)), 1 / (1 + math.exp(-0.5))]),
    ],
)
def test_scores_are_normalised_and_squashed(options, expected):
    assert shape_scores(RAW, **options).tolist() == pytest.approx(expected, rel=1e-12)
