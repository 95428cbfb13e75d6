"""KL estimators against their exact expectations over a small vocabulary."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.objectives.choices import KlEstimator
from rlhf.objectives.kl import adapt, estimate_kl

FEW = settings(max_examples=50, deadline=None, derandomize=True)

logprob = st.floats(-20, 0)
weights = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=6)


def test_estimators_of_one_token_worked_by_hand():
    # The policy gives 1/2 where the reference gives 1/4: ratio ref/pi = 1/2, its logarithm -log 2.
    logp, ref = torch.tensor([0.5], dtype=torch.float64).log(), torch.tensor([0.25], dtype=torch.float64).log()
    log2 = math.log(2)
    assert estimate_kl(logp, ref, "k1").item() == pytest.approx(log2, rel=1e-14)
    assert estimate_kl(logp, ref, "k2").item() == pytest.approx(log2**2 / 2, rel=1e-14)
    assert estimate_kl(logp, ref, "k3").item() == pytest.approx(0.5 - 1 + log2, rel=1e-14)
    # The other way round: ratio 2.
    assert estimate_kl(ref, logp, "k1").item() == pytest.approx(-log2, rel=1e-14)
    assert estimate_kl(ref, logp, "k2").item() == pytest.approx(log2**2 / 2, rel=1e-14)
    assert estimate_kl(ref, logp, "k3").item() == pytest.approx(2 - 1 - log2, rel=1e-14)


@FEW
@given(weights)
def test_k1_and_k3_are_unbiased(pairs):
    """Weighted by the policy's own probabilities, the mean over the vocabulary is KL(pi || ref)."""
    pi = [a / sum(a for a, _ in pairs) for a, _ in pairs]
    ref = [b / sum(b for _, b in pairs) for _, b in pairs]
    exact = math.fsum(p * math.log(p / q) for p, q in zip(pi, ref, strict=True))
    p, q = torch.tensor(pi, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
    for kind in ("k1", "k3"):
        assert (p * estimate_kl(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact, abs=1e-12)


def test_k2_is_close_for_close_policies_and_biased_for_others():
    # pi = (1/2, 1/2), ref = (1/2 + e, 1/2 - e): KL = -log(1 - 4 e^2) / 2.
    def bias(e):
        p, q = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.5 + e, 0.5 - e], dtype=torch.float64)
        exact = -math.log(1 - 4 * e * e) / 2
        return (p * estimate_kl(p.log(), q.log(), "k2")).sum().item() / exact - 1

    assert abs(bias(0.01)) < 1e-3
    assert abs(bias(0.4)) > 0.1


def test_expected_gradients_of_k2_and_k3_are_those_of_the_two_kls():
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.5, -0.4], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)

    def expected_gradient(kind):
        surrogate = (logp.detach().exp() * estimate_kl(logp, ref, kind)).sum()
        return torch.autograd.grad(surrogate, logits, retain_graph=True)[0]

    torch.testing.assert_close(expected_gradient("k2"), wanted, rtol=1e-12, atol=1e-14)
    assert expected_gradient("k1").abs().max() < 1e-14
    (other_direction,) = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(expected_gradient("k3"), other_direction, rtol=1e-12, atol=1e-14)
    assert (expected_gradient("k3") - wanted).abs().max() > 0.01


@FEW
@given(logprob, logprob)
def test_against_the_definitions(a, b):
    logp, ref = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    assert estimate_kl(logp, ref, "k1").item() == pytest.approx(a - b, abs=1e-15)
    assert estimate_kl(logp, ref, "k2").item() == pytest.approx(0.5 * (a - b) * (a - b), rel=1e-14)
    assert estimate_kl(logp, ref, "k3").item() == pytest.approx(math.exp(b - a) - 1 - (b - a), rel=1e-9, abs=1e-9)
    assert estimate_kl(logp, ref, "k2") >= 0
    assert estimate_kl(logp, ref, "k3") >= -1e-15


def test_k3_of_a_small_difference_keeps_its_digits_in_float32():
    d = 2.0**-12
    # exp(d) - 1 - d = d^2/2 + d^3/6 + ..., about 3e-8, but exp(d) in float32 is a multiple of 1.2e-7.
    out = estimate_kl(torch.tensor(0.0), torch.tensor(d), "k3").item()
    assert out == pytest.approx(d**2 / 2 + d**3 / 6, rel=2e-3)


@pytest.mark.parametrize("kind", get_args(KlEstimator))
def test_equal_policies_have_no_divergence(kind):
    logp = torch.tensor([-3.0, 0.0, -1e4])
    assert estimate_kl(logp, logp, kind).tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", get_args(KlEstimator))
def test_gradcheck(kind):
    logp = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: estimate_kl(a, b, kind), (logp, ref))


@pytest.mark.parametrize("kind", get_args(KlEstimator))
def test_bfloat16_is_computed_in_float32(kind):
    logp, ref = torch.tensor([-0.25, -9.0]).bfloat16(), torch.tensor([-0.251, -9.5]).bfloat16()
    out = estimate_kl(logp, ref, kind)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), estimate_kl(logp.double(), ref.double(), kind), rtol=1e-3, atol=1e-9)


def test_errors_and_inputs_unchanged():
    logp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -4.0]])
    for kind in get_args(KlEstimator):
        estimate_kl(logp, ref, kind)
    assert logp.tolist() == [[-1, -2]] and ref.tolist() == [[-3, -4]]
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 1\)"):
        estimate_kl(logp, ref[:, :1], "k1")


def test_the_controller_moves_the_coefficient_by_at_most_a_fifth_of_its_rate():
    assert adapt(0.1, measured=0.3, target=0.3) == pytest.approx(0.1)
    assert adapt(0.1, measured=0.33, target=0.3) == pytest.approx(0.1 * 1.01)
    assert adapt(0.1, measured=9.0, target=0.3) == pytest.approx(0.1 * 1.02)
    assert adapt(0.1, measured=-9.0, target=0.3) == pytest.approx(0.1 * 0.98)
