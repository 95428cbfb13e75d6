"""Sampling from the nucleus, against one that is found by going through the tokens one after another."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf.rollout.decoding import draw_tokens

FEW = settings(max_examples=100, deadline=None, derandomize=True)
HAND = [0.1, 0.2, 0.3, 0.4]
# Weights from which probabilities are made; in 64ths, so that sums of them are exact.
shares = st.lists(st.integers(1, 64), min_size=1, max_size=8)
logits = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=8)


def oracle(probabilities: list[float], top_p: float) -> dict[int, float]:
    """The fewest likeliest tokens that together have `top_p`, and their probabilities among themselves."""
    kept: dict[int, float] = {}
    for token in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
        if math.fsum(kept.values()) >= top_p:
            break
        kept[token] = probabilities[token]
    whole = math.fsum(kept.values())
    return {token: p / whole for token, p in kept.items()}


def drawn(row: list[float], top_p: float, temperature: float = 1.0, count: int = 512) -> dict[int, float]:
    """Tokens that numbers evenly spread over [0, 1) give, with the log-probabilities that come with them."""
    numbers = torch.arange(count) / count
    ids, logp = draw_tokens(torch.tensor(row).expand(count, -1), numbers, temperature, top_p)
    return dict(zip(ids.tolist(), logp.tolist(), strict=True))


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.05, {3: 1.0}),
        (0.39, {3: 1.0}),
        (0.41, {3: 4 / 7, 2: 3 / 7}),
        (0.69, {3: 4 / 7, 2: 3 / 7}),
        (0.71, {3: 4 / 9, 2: 3 / 9, 1: 2 / 9}),
        (0.95, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        (1.0, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
    ],
)
def test_the_likeliest_tokens_that_reach_top_p_are_drawn_in_proportion(top_p, expected):
    """Probabilities 0.1, 0.2, 0.3, 0.4, whose likeliest have 0.4, 0.7, 0.9 and 1 together."""
    row = [math.log(p) for p in HAND]
    nucleus = drawn(row, top_p)
    assert {token: math.exp(logp) for token, logp in nucleus.items()} == pytest.approx(expected, rel=1e-5)


def test_numbers_fall_into_the_intervals_of_what_is_left():
    """Of 0.1, 0.2, 0.3, 0.4 at 0.71 the tokens 1, 2, 3 are left, up to 2/9, 5/9 and 1, in the order of their ids."""
    row = torch.tensor([math.log(p) for p in HAND])
    numbers = torch.tensor([0.0, 0.22, 0.23, 0.55, 0.56, 0.999])
    ids, _ = draw_tokens(row.expand(6, -1), numbers, 1.0, 0.71)
    assert ids.tolist() == [1, 1, 2, 2, 3, 3]


def test_a_share_that_is_reached_exactly_is_reached():
    """In 64ths sums are exact: half of the probability is one token, three quarters are two."""
    row = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert set(drawn(row, 0.5)) == {0}
    assert set(drawn(row, 0.75)) == {0, 1}
    assert set(drawn(row, 0.76)) == {0, 1, 2}, "one of the two that are alike"


@FEW
@given(logits, st.floats(0.01, 0.999))
def test_against_going_through_the_tokens(row, top_p):
    probabilities = torch.tensor(row).double().softmax(-1).tolist()
    ordered = sorted(probabilities, reverse=True)
    sums = [math.fsum(ordered[:n]) for n in range(1, len(ordered) + 1)]
    assume(all(abs(whole - top_p) > 1e-5 for whole in sums))  # float32 may see the limit on either side of such a sum
    assume(all(abs(a - b) > 1e-6 or a == b for a, b in itertools.pairwise(ordered)))
    expected = oracle(probabilities, top_p)
    nucleus = drawn(row, top_p)
    allowed = sorted(expected.values(), reverse=True)
    least = probabilities[min(expected, key=lambda token: probabilities[token])]
    for token, logp in nucleus.items():
        assert probabilities[token] >= least * (1 - 1e-5), "less likely than all that are kept"
        assert math.exp(logp) == pytest.approx(probabilities[token] / math.fsum(ordered[: len(allowed)]), rel=1e-4)
    sure = {token for token, p in expected.items() if p > 1 / 256}
    alike = {token for token in expected if probabilities.count(probabilities[token]) > 1}
    assert sure - alike <= set(nucleus), "whatever has more than two numbers' width is drawn"
    assert len(nucleus) <= len(expected)


@FEW
@given(shares, st.integers(1, 63))
def test_the_number_of_tokens_with_ties(weights, limit):
    """Tokens alike at the edge: as many of them as are needed, no matter which."""
    probabilities = torch.tensor(weights, dtype=torch.float64)
    probabilities = probabilities / probabilities.sum()
    top_p = limit / 64
    sums = probabilities.sort(descending=True).values.cumsum(0)
    assume(((sums - top_p).abs() > 1e-5).all())
    nucleus = drawn(probabilities.log().float().tolist(), top_p, count=4096)
    assert len(nucleus) == len(oracle(probabilities.tolist(), top_p))
    assert math.fsum(math.exp(logp) for logp in nucleus.values()) == pytest.approx(1, abs=1e-5)


@FEW
@given(logits, st.sampled_from([0.3, 1.0, 2.5]), st.integers(0, 2**31))
def test_the_whole_distribution_is_as_without(row, temperature, seed):
    """At 1 the log-probabilities are those of a plain softmax, to the bit."""
    numbers = torch.rand(64, generator=torch.Generator().manual_seed(seed))
    rows = torch.tensor(row).expand(64, -1)
    ids, logp = draw_tokens(rows, numbers, temperature, 1.0)
    plain = (rows / temperature).log_softmax(-1)
    assert torch.equal(logp, plain.gather(1, ids[:, None])[:, 0])
    for at_one, expected in zip((ids, logp), draw_tokens(rows, numbers, temperature), strict=True):
        assert torch.equal(at_one, expected)


@FEW
@given(logits, st.floats(0.001, 0.999))
def test_less_than_the_likeliest_has_leaves_it_alone(row, share):
    probabilities = torch.tensor(row).double().softmax(-1)
    assume(probabilities.sort(descending=True).values[:2].diff().abs().gt(1e-5).all())
    nucleus = drawn(row, share * probabilities.max().item() * 0.999)
    assert set(nucleus) == {int(probabilities.argmax())}
    assert nucleus[int(probabilities.argmax())] == 0.0, "certain"


def test_tokens_that_are_all_alike():
    """1,000 of them: a tenth is a hundred tokens, each of a hundredth; one and no more for next to nothing."""
    row = [0.0] * 1000
    nucleus = drawn(row, 0.0995, count=4096)
    assert len(nucleus) == 100
    assert all(logp == pytest.approx(math.log(0.01), abs=1e-4) for logp in nucleus.values())
    assert len(drawn(row, 1e-6)) == 1


def test_temperature_comes_first():
    """Squared and renormalised, 0.1 to 0.4 are 1/30, 4/30, 9/30 and 16/30."""
    row = [math.log(p) for p in HAND]
    assert set(drawn(row, 0.5, temperature=0.5)) == {3}
    assert set(drawn(row, 0.5)) == {3, 2}
    kept = drawn(row, 0.54, temperature=0.5)
    assert {token: math.exp(logp) for token, logp in kept.items()} == pytest.approx({3: 16 / 25, 2: 9 / 25}, rel=1e-5)


def test_the_likeliest_token_is_greedy_s_choice_in_any_nucleus():
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    numbers = torch.zeros(20)
    for top_p in (0.01, 0.5, 1.0):
        ids, _ = draw_tokens(rows, numbers, 0.0, top_p)
        assert torch.equal(ids, rows.argmax(-1))


def test_impossible_tokens_stay_impossible():
    row = [0.0, -math.inf, 0.0, -math.inf]
    for top_p in (0.3, 0.7, 0.999):
        nucleus = drawn(row, top_p)
        assert set(nucleus) <= {0, 2}
        assert len(nucleus) == (1 if top_p < 0.5 else 2)


def test_rows_have_a_nucleus_of_their_own():
    rows = torch.tensor([[0.97, 0.01, 0.01, 0.01], [0.25] * 4, [0.01, 0.01, 0.01, 0.97]]).log()
    for number in (0.0, 0.3, 0.6, 0.9):
        ids, _ = draw_tokens(rows, torch.full((3,), number), 1.0, 0.9)
        assert ids[[0, 2]].tolist() == [0, 3]
        assert ids[1] == int(4 * number)


@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_a_real_vocabulary(vocab):
    """Flat but for a few tokens: float32 sums over all of it must not lose the nucleus."""
    row = torch.full((vocab,), -12.0)
    row[torch.tensor([7, 70, 700])] = torch.tensor([3.0, 2.0, 1.0])
    probabilities = row.double().softmax(-1)
    assert probabilities[7] + probabilities[70] < 0.95 < probabilities[[7, 70, 700]].sum()
    numbers = torch.arange(64) / 64
    ids, logp = draw_tokens(row.expand(64, -1), numbers, 1.0, 0.95)
    assert set(ids.tolist()) == {7, 70, 700}
    expected = (probabilities[ids] / probabilities[[7, 70, 700]].sum()).log()
    assert (logp - expected).abs().max() < 1e-5
