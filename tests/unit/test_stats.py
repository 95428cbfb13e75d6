"""Statistics of comparisons and scores, against textbook values and worlds whose truth is known."""

import math
import random
from collections.abc import Sequence
from statistics import stdev

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhf import stats
from tests.helpers import not_none


@pytest.mark.parametrize(
    ("draw", "mean", "bounds"),
    [
        (lambda rng: float(rng.random() < 0.1), 0.1, (0.0, 1.0)),
        (lambda rng: rng.random() ** 8, 1 / 9, (0.0, 1.0)),
        (lambda rng: float(rng.random() < 0.9) - (rng.random() < 0.1), 0.8, (-1.0, 1.0)),
    ],
)
def test_an_interval_of_shares_stays_within_their_bounds_and_holds_the_mean(draw, mean, bounds):
    """Rare right answers, small fractions, and differences of right answers, 30 prompts at a time."""
    rng, held = random.Random(0), []
    for _ in range(2000):
        estimate = stats.mean_interval([draw(rng) for _ in range(30)], None, bounds)
        if estimate is not None:
            assert bounds[0] <= estimate.low <= estimate.value <= estimate.high <= bounds[1]
            held.append(estimate.low <= mean <= estimate.high)
    assert sum(held) / len(held) > 0.92
    normal = stats.mean_interval([0.0] * 29 + [1.0])
    assert not_none(normal).low < 0 < not_none(stats.paired_difference([0.0] * 30, [0.0] * 29 + [1.0])).value
    assert not_none(stats.paired_difference([0.0] * 30, [0.0] * 29 + [3.0])).low < 0, "no share"


def test_with_bounds_the_interval_of_right_answers_is_that_of_their_share():
    values = [1.0, 0.0, 1.0, 1.0, 0.0]
    assert not_none(stats.mean_interval(values, None, (0, 1))) == pytest.approx(stats.wilson(3, 5))
    doubled = [value for value in values for _ in range(2)]
    clusters = [i // 2 for i in range(10)]
    of_shares = stats.clustered_share(doubled, clusters)
    assert not_none(stats.mean_interval(doubled, clusters, (0, 1))) == pytest.approx(of_shares)


def test_wilson_interval_of_a_textbook_share():
    assert stats.wilson(5, 10) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-4)
    assert stats.wilson(0, 10) == pytest.approx((0, 0, 0.2775), abs=1e-4)
    with pytest.raises(ValueError):
        stats.wilson(0, 0)


def test_a_share_with_clusters_by_hand():
    """Four prompts with two pairs each; residuals of the prompts ¾, ¾, −¼ and −1¼ from a share of 5/8."""
    outcomes, clusters = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [c for c in "abcd" for _ in range(2)]
    variance = 4 / 3 * (9 + 9 + 1 + 25) / 16 / 64
    effective = (5 / 8) * (3 / 8) * (8 / 7) / variance
    assert effective == pytest.approx(4.675, abs=1e-3)
    expected = stats.wilson(5 / 8 * effective, effective)
    assert stats.clustered_share(outcomes, clusters) == pytest.approx(expected)
    assert stats.clustered_share(outcomes, clusters[::-1]) == pytest.approx(expected), "names do not matter"


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=30), st.integers(1, 5))
def test_a_share_of_clusters_of_one_and_of_copies(outcomes, copies):
    """A cluster for each outcome gives Wilson's interval; copies of an outcome in its cluster add no certainty."""
    single = stats.clustered_share(outcomes, range(len(outcomes)))
    assert single == pytest.approx(stats.wilson(sum(outcomes), len(outcomes)))
    clusters = [i for i in range(len(outcomes)) for _ in range(copies)]
    copied = stats.clustered_share([outcomes[i] for i in clusters], clusters)
    assert copied.value == pytest.approx(single.value)
    assert 0 <= copied.low <= copied.value <= copied.high <= 1
    if not {0.5} & {*outcomes}:  # outcomes of 0.5 vary less than Wilson's interval assumes
        assert copied.high - copied.low >= single.high - single.low - 1e-9


def test_a_share_of_certainty_or_of_one_cluster_keeps_its_doubt():
    assert stats.clustered_share([1.0] * 8, "aabbccdd") == pytest.approx(stats.wilson(4, 4))
    assert stats.clustered_share([0.0] * 8, "aaaabbbb") == pytest.approx(stats.wilson(0, 2))
    assert stats.clustered_share([1.0, 0.0, 1.0, 1.0], "aaaa") == pytest.approx(stats.wilson(0.75, 1))
    with pytest.raises(ValueError, match="a share of nothing"):
        stats.clustered_share([], [])


def test_the_interval_of_a_share_with_clusters_holds_the_truth_as_often_as_it_says():
    """200 worlds of 125 prompts with eight pairs each; Wilson's interval of 1,000 pairs holds the truth too seldom."""
    rng = random.Random(11)
    held = independent = 0
    for _ in range(200):
        outcomes: list[float] = []
        for _ in range(125):
            chance = rng.choice([0.4, 0.8, 0.99])  # the truth is their mean, 0.73
            outcomes += [float(rng.random() < chance) for _ in range(8)]
        one = stats.clustered_share(outcomes, [i // 8 for i in range(1000)])
        other = stats.wilson(sum(outcomes), 1000)
        held += one.low < 0.73 < one.high
        independent += other.low < 0.73 < other.high
    assert 0.91 < held / 200 < 0.99 and independent / 200 < 0.88


def test_the_interval_of_a_mean_with_and_without_clusters_by_hand():
    value, low, high = not_none(stats.mean_interval([1.0, 2.0, 0.0, 5.0]))
    half = stats.Z95 * math.sqrt(14 / 3) / 2
    assert (value, low, high) == pytest.approx((2, 2 - half, 2 + half))
    value, low, high = not_none(stats.mean_interval([1.0, 2.0, 0.0, 5.0], "aabc"))  # residuals −1, −2 and 3
    assert high - value == pytest.approx(stats.Z95 * math.sqrt(3 / 2 * (1 + 4 + 9) / 16))
    for values, clusters in (([1.0], "a"), ([], ""), ([1.0, 2.0], "aa"), ([2.0, 2.0], "ab"), ([1.0, 3.0] * 2, "aabb")):
        assert stats.mean_interval(values, clusters) is None, (values, clusters)


def test_a_gain_in_standard_deviations_by_hand():
    """Before 0, 0 and 3 (sd √3), after 2, 1 and 6: the gain is 2/√3, and √3 times its terms are 8/3, 5/3 and 8/3."""
    half = stats.Z95 * (1 / 3) / math.sqrt(3)
    gain = 2 / math.sqrt(3)
    assert stats.gain_in_sd([0.0, 0.0, 3.0], [2.0, 1.0, 6.0]) == pytest.approx((gain, gain - half, gain + half))
    assert stats.gain_in_sd([1.0, 1.0], [1.0, 2.0]) is None and stats.gain_in_sd([0.0], [1.0]) is None
    assert stats.gain_in_sd([0.0, 1.0], [2.0, 3.0], "aa") is None


def test_the_interval_of_a_gain_holds_the_truth_as_often_as_it_says():
    """300 worlds of 150 prompts with two answers each; without the error of the sd it holds the truth too seldom."""
    rng = random.Random(7)
    held = fixed = 0
    prompts = [i // 2 for i in range(300)]
    for _ in range(300):
        common = [rng.gauss(0, 0.6) for _ in range(150)]
        before = [common[p] + rng.gauss(0, 0.8) for p in prompts]
        after = [1.5 + common[p] + rng.gauss(0, 0.8) for p in prompts]
        one = not_none(stats.gain_in_sd(before, after, prompts))
        sd = stdev(before)
        other = not_none(stats.mean_interval([(y - x) / sd for x, y in zip(before, after, strict=True)], prompts))
        held += one.low < 1.5 < one.high
        fixed += other.low < 1.5 < other.high
    assert 0.91 < held / 300 < 0.99 and fixed / 300 < 0.88


def world(seed: int, a: float, b: float, rows: int = 4000) -> tuple[list[float], list[float]]:
    """Outcomes that a true preference `a` and a liking `b` for length decide, where one side writes more."""
    rng = random.Random(seed)
    length_differences = [rng.gauss(10, 20) for _ in range(rows)]
    mean = sum(length_differences) / rows
    scale = math.sqrt(sum((d - mean) ** 2 for d in length_differences) / rows)
    chance = [1 / (1 + math.exp(-(a + b * math.tanh(d / scale)))) for d in length_differences]
    return [float(rng.random() < p) for p in chance], length_differences


def win_rate(outcomes: Sequence[float], length_differences: Sequence[float]) -> stats.Estimate:
    """The length-controlled win rate of at least one comparison."""
    estimate = stats.length_controlled_win_rate(outcomes, length_differences)
    assert estimate is not None
    return estimate


@pytest.mark.parametrize(("a", "b"), [(0.0, 0.0), (0.0, 2.0), (0.5, 2.0), (-0.7, 1.0)])
def test_length_control_finds_the_preference_behind_the_length(a, b):
    outcomes, length_differences = world(3, a, b)
    estimate = win_rate(outcomes, length_differences)
    assert estimate.low < 1 / (1 + math.exp(-a)) < estimate.high
    assert estimate.high - estimate.low < 0.05
    if b >= 2:  # the plain win rate does not
        assert sum(outcomes) / len(outcomes) > estimate.high


def test_without_a_length_difference_it_is_the_win_rate():
    outcomes = [1.0] * 60 + [0.5] * 20 + [0.0] * 20
    estimate = win_rate(outcomes, [0.0] * 100)
    assert estimate.value == pytest.approx(0.7, abs=1e-3)
    without_ties = win_rate([1.0] * 70 + [0.0] * 30, [0.0] * 100)
    assert without_ties == pytest.approx(stats.wilson(70, 100), abs=0.006)
    assert estimate.high - estimate.low < 0.95 * (without_ties.high - without_ties.low), "ties are no coin flips"


@pytest.mark.parametrize("ties", [0.0, 0.5, 0.8])
def test_the_interval_holds_the_truth_as_often_as_it_says(ties):
    """200 worlds of 200 comparisons each; an interval that took ties for coin flips would hold it nearly always."""
    rng = random.Random(5)
    held, widths = 0, []
    for _ in range(200):
        length_differences = [rng.gauss(0, 20) for _ in range(200)]
        outcomes = [0.5 if rng.random() < ties else float(rng.random() < 0.7) for _ in length_differences]
        estimate = win_rate(outcomes, length_differences)
        held += estimate.low < 0.5 * ties + 0.7 * (1 - ties) < estimate.high
        widths.append(estimate.high - estimate.low)
    assert held / 200 > 0.91
    expected = 2 * 1.96 * math.sqrt((1 - ties) * 0.25 / 200)  # at most, of the mean of such outcomes
    assert sum(widths) / 200 < 1.1 * expected


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(-500, 500)), min_size=1, max_size=40))
def test_length_control_is_symmetric(rows):
    outcomes, length_differences = [y for y, _ in rows], [d for _, d in rows]
    assume(set(outcomes) != {0.5})
    one = stats.length_controlled_win_rate(outcomes, length_differences)
    other = stats.length_controlled_win_rate([1 - y for y in outcomes], [-d for d in length_differences])
    assert (one is None) == (other is None)
    if one and other:
        assert 0 < one.low <= one.value <= one.high < 1
        assert one.value + other.value == pytest.approx(1)


def test_distinct_counts_n_grams_over_all_texts():
    assert stats.distinct(["a b a b", "a b"], 1) == pytest.approx(2 / 6)
    assert stats.distinct(["a b a b", "a b"], 2) == pytest.approx(2 / 4)
    assert stats.distinct(["a", ""], 2) == 0
