"""Token log-probabilities and entropies against sums written out in Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.objectives.logprobs import linear_token_logprobs
from tests.helpers import gradient
from tests.oracle.dense import entropy, token_logprobs

FEW = settings(max_examples=50, deadline=None, derandomize=True)

rows = st.lists(st.floats(-30, 30), min_size=1, max_size=8)


def oracle_logprob(logits, i):
    return -math.log(math.fsum(math.exp(x - logits[i]) for x in logits))


def oracle_entropy(logits):
    return -math.fsum(math.exp(oracle_logprob(logits, i)) * oracle_logprob(logits, i) for i in range(len(logits)))


def of_logits(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of (N, V) logits. The output matrix is the identity: hidden states are logits."""
    logp, entropies, _ = linear_token_logprobs(logits, torch.eye(logits.shape[1]).to(logits), ids, entropy="gradient")
    assert entropies is not None
    return logp, entropies


def test_log_probabilities_and_entropy_of_two_rows_worked_by_hand():
    # exp(logits) are 1, 2, 5 and 1, 1, 2: probabilities 1/8, 2/8, 5/8 and 1/4, 1/4, 1/2.
    logits = torch.tensor([[1.0, 2, 5], [1, 1, 2]], dtype=torch.float64).log()
    logp, entropies = of_logits(logits, torch.tensor([2, 0]))
    assert logp.exp().tolist() == pytest.approx([5 / 8, 1 / 4], rel=1e-14)
    # Entropy of the second row: log(4)/4 + log(4)/4 + log(2)/2 = 1.5 log 2.
    assert entropies[1].item() == pytest.approx(1.5 * math.log(2), rel=1e-14)


@FEW
@given(rows)
def test_against_written_out_sums(logits):
    """The helper, with which other tests compare, is held to the same sums."""
    x = torch.tensor([logits] * len(logits), dtype=torch.float64)
    ids = torch.arange(len(logits))
    for logp, entropies in (of_logits(x, ids), (token_logprobs(x, ids), entropy(x))):
        exact = [oracle_logprob(logits, i) for i in range(len(logits))]
        assert logp.tolist() == pytest.approx(exact, rel=1e-12, abs=1e-12)
        assert logp.exp().sum().item() == pytest.approx(1, rel=1e-12)
        assert entropies.tolist() == pytest.approx([oracle_entropy(logits)] * len(logits), rel=1e-10, abs=1e-12)
        assert -1e-12 <= entropies.min().item() <= entropies.max().item() <= math.log(len(logits)) + 1e-12


@FEW
@given(rows, st.floats(-50, 50))
def test_a_constant_added_to_the_logits_is_irrelevant(logits, shift):
    x, first = torch.tensor([logits], dtype=torch.float64), torch.tensor([0])
    for shifted, plain in zip(of_logits(x + shift, first), of_logits(x, first), strict=True):
        torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-12)


def test_uniform_and_certain():
    first = torch.tensor([0])
    assert of_logits(torch.zeros(1, 1000, dtype=torch.float64), first)[1].item() == pytest.approx(math.log(1000))
    assert of_logits(torch.tensor([[500.0, 0.0, 0.0]]), first)[1].item() == 0


def test_large_logits_do_not_overflow():
    logits = torch.tensor([1e4, 0.0, -1e4]).expand(3, 3)
    assert of_logits(logits, torch.arange(3))[0].tolist() == [0, -1e4, -2e4]


def test_bfloat16_logits_are_computed_in_float32():
    torch.manual_seed(0)
    logits = (torch.randn(32, 500) * 5).bfloat16()
    ids = torch.randint(500, (32,))
    logp, entropies = of_logits(logits, ids)
    assert logp.dtype == entropies.dtype == torch.float32
    # A bfloat16 log-softmax would be off by up to 2^-4 at these sizes.
    exact = [oracle_logprob(row, i) for row, i in zip(logits.double().tolist(), ids.tolist(), strict=True)]
    assert logp.tolist() == pytest.approx(exact, abs=1e-5)
    # The written-out sum takes as long as the square of a row; one is enough.
    assert entropies[0].item() == pytest.approx(oracle_entropy(logits[0].double().tolist()), abs=1e-5)


def test_inputs_are_left_unchanged():
    hidden, weight, ids = case()
    kept = [x.clone() for x in (hidden, weight, ids)]
    linear_token_logprobs(hidden, weight, ids, 0.7, 3, "gradient", likeliest=True)
    assert all(map(torch.equal, (hidden, weight, ids), kept))


# -- from hidden states ------------------------------------------------------------------------------------------------


def case(dtype=torch.float64, n=7, v=11, h=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=draw, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(0, v, (n,), generator=draw)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_linear_is_the_two_steps_in_one_value_and_gradient(chunk, temperature):
    hidden, weight, ids = case()
    logits = hidden @ weight.T / temperature
    expected = [token_logprobs(logits, ids), entropy(logits)]
    factors = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (slope,) = torch.autograd.grad(sum((f * x).sum() for f, x in zip(factors, expected, strict=True)), hidden)
    results = linear_token_logprobs(hidden, weight, ids, temperature, chunk, "gradient")[:2]
    (ours,) = torch.autograd.grad(sum((f * x).sum() for f, x in zip(factors, results, strict=True)), hidden)
    for a, b in zip((*results, ours), (*expected, slope), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_linear_gradients_by_finite_differences():
    hidden, weight, ids = case()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp, value, _ = linear_token_logprobs(x, weight, ids, 0.7, 3, "gradient")
        assert value is not None
        return logp, value

    assert torch.autograd.gradcheck(both, (hidden,))
    assert torch.autograd.gradcheck(lambda x: linear_token_logprobs(x, weight, ids, 0.7, 3)[0], (hidden,))


def test_linear_entropy_as_a_value_has_no_gradient():
    hidden, weight, ids = case()
    logp, value, _ = linear_token_logprobs(hidden, weight, ids, entropy="value")
    assert logp.requires_grad
    assert value is not None and not value.requires_grad
    torch.testing.assert_close(value, entropy(hidden @ weight.T).detach())
    assert linear_token_logprobs(hidden, weight, ids)[1] is None
    with torch.no_grad():
        torch.testing.assert_close(linear_token_logprobs(hidden, weight, ids, entropy="value")[:2], (logp, value))


@pytest.mark.parametrize(
    "logits",
    [[0.0, 1.0, -200.0], [1e4, -1e4, 0.0], [3.0], [5.0, 5.0, 5.0]],
    ids=["underflow", "huge", "one token", "equal"],
)
def test_linear_at_extremes_is_the_written_out_sum(logits):
    """The output matrix is the identity, so that hidden states are logits; values, and slopes of both."""
    ids = torch.arange(len(logits))
    hidden = torch.tensor([logits] * len(logits)).requires_grad_()
    logp, value, _ = linear_token_logprobs(hidden, torch.eye(len(logits)), ids, entropy="gradient")
    assert value is not None
    expected = [oracle_logprob(logits, i) if abs(max(logits)) < 700 else logits[i] - max(logits) for i in ids.tolist()]
    assert logp.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    p = [math.exp(x) for x in expected]
    h = -sum(q * x for q, x in zip(p, expected, strict=True))
    assert value.tolist() == pytest.approx([h] * len(p), abs=1e-6)
    (slope,) = torch.autograd.grad(logp.sum() + value.sum(), hidden)
    for row, slope_of_row in enumerate(slope.tolist()):
        of_entropy = [-q * (x + h) for q, x in zip(p, expected, strict=True)]
        wanted = [float(i == row) - q + s for i, (q, s) in enumerate(zip(p, of_entropy, strict=True))]
        assert slope_of_row == pytest.approx(wanted, abs=1e-6)


def test_a_token_of_no_probability_adds_nothing_to_the_entropy():
    """Its logit is -inf; 0 * -inf would make NaN."""
    with torch.no_grad():
        hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [1.0], [-math.inf]])
        logp, entropy, _ = linear_token_logprobs(hidden, weight, torch.tensor([0]), entropy="value")
    p = torch.tensor([0.0, 1.0]).softmax(0)
    assert entropy is not None
    assert logp.item() == pytest.approx(p[0].log().item())
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item())


def test_linear_in_bfloat16_keeps_the_slope_of_a_confident_token():
    """1 - p is 1.2e-3 here: formed in bfloat16, whose numbers below 1 are 3.9e-3 apart, it would be 0."""
    hidden = torch.tensor([[6.75, 0.0]], dtype=torch.bfloat16).requires_grad_()
    logp, value, _ = linear_token_logprobs(
        hidden, torch.eye(2, dtype=torch.bfloat16), torch.tensor([0]), entropy="value"
    )
    p = 1 / (1 + math.exp(-6.75))
    assert logp.dtype == torch.float32 and logp.item() == pytest.approx(math.log(p), abs=1e-6)
    assert value is not None and value.item() == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)), abs=1e-5)
    (slope,) = torch.autograd.grad(logp.sum(), hidden)
    assert slope.flatten().tolist() == pytest.approx([1 - p, p - 1], rel=1e-2)


def test_linear_says_whether_no_token_is_likelier():
    hidden, weight, ids = case()
    ids[::2] = (hidden @ weight.T).argmax(1)[::2]
    likeliest = linear_token_logprobs(hidden, weight, ids, chunk=3, likeliest=True).likeliest
    assert likeliest is not None and torch.equal(likeliest, (hidden @ weight.T).argmax(1) == ids)
    assert 0 < likeliest.sum() < len(ids)
    assert linear_token_logprobs(hidden, weight, ids).likeliest is None


def test_linear_survives_a_confident_policy_in_bfloat16():
    """1 - p is about 6e-4 here: the difference of two rounded products would lose it."""
    hidden = torch.tensor([[8.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.bfloat16)
    logp, *_ = linear_token_logprobs(hidden, weight, torch.tensor([0]))
    assert logp.dtype == torch.float32
    logp.sum().backward()
    rest = 2 * math.exp(-8) / (1 + 2 * math.exp(-8))
    assert logp.item() == pytest.approx(math.log1p(-rest), rel=1e-3)
    assert gradient(hidden).dtype == torch.bfloat16
    assert gradient(hidden)[0, 0].item() == pytest.approx(rest, rel=1e-2)


def test_linear_never_holds_more_logits_than_a_chunk():
    """Watches every tensor that an operation returns, forward and backward."""
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    hidden, weight, ids = case(torch.float32, n=64, v=500, h=4)
    with Watch():
        logp, value, _ = linear_token_logprobs(hidden, weight, ids, chunk=8, entropy="gradient")
        assert value is not None
        (logp.sum() + value.sum()).backward()
    assert max(sizes) == 8 * 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(3, dtype=torch.int64)}, "do not fit"),
        ({"weight": torch.zeros(11, 4, dtype=torch.float64)}, "do not fit"),
        ({"hidden": torch.zeros(1, 7, 5, dtype=torch.float64)}, "do not fit"),
        ({"weight": torch.zeros(11, 5, dtype=torch.float64, requires_grad=True)}, "must be frozen"),
    ],
)
def test_linear_refuses_what_does_not_fit(change, message):
    hidden, weight, ids = case()
    with pytest.raises(ValueError, match=message):
        linear_token_logprobs(**{"hidden": hidden, "weight": weight, "ids": ids, **change})
