"""Best-of-n and pass@k against every subset of the samples, and against what their formulas leave out."""

import itertools
import math
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.evaluation.best_of_n import beside_best_of_n, best_at_kl, best_by_score, judged_whole, pass_at_k, sizes
from rlhf.evaluation.policies import PolicySamples, of_several_samples
from rlhf.stats import best_of, kl_of_best_of, wilson

NAN = math.nan


def over_subsets(scores, values, n):
    """The mean over every subset of n answers of the mean value of those with its highest score."""
    best = []
    for subset in itertools.combinations(range(len(scores)), n):
        highest = max(scores[i] for i in subset)
        best.append(fmean(values[i] for i in subset if scores[i] == highest))
    return fmean(best)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), min_size=1, max_size=8), st.data())
def test_the_best_of_n_is_the_mean_over_every_subset_also_with_ties(answers, data):
    scores, values = [score / 4 for score, _ in answers], [float(value) for _, value in answers]
    n = data.draw(st.integers(1, len(answers)))
    assert best_of(scores, values, n) == pytest.approx(over_subsets(scores, values, n), abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(verdicts, data):
    k = data.draw(st.integers(1, len(verdicts)))
    numbers = [float(right) for right in verdicts]
    share = fmean(any(subset) for subset in itertools.combinations(verdicts, k))
    published = 1 - math.prod(1 - k / i for i in range(len(verdicts) - sum(verdicts) + 1, len(verdicts) + 1))
    assert best_of(numbers, numbers, k) == pytest.approx(share, abs=1e-12)
    assert published == pytest.approx(share, abs=1e-12)  # as the authors' code computes it


@pytest.mark.parametrize("n", [0, 3])
def test_more_answers_than_there_are_have_no_best(n):
    with pytest.raises(ValueError, match=f"the best of {n} among 2"):
        best_of([1.0, 2.0], [1.0, 2.0], n)


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_the_kl_of_the_best_of_n_is_that_of_its_density(n):
    """The score's quantile u is uniform; that of the best of n has the density n·uⁿ⁻¹."""
    middles = [(i + 0.5) / 200_000 for i in range(200_000)]
    divergence = fmean(n * u ** (n - 1) * math.log(n * u ** (n - 1)) for u in middles)
    assert kl_of_best_of(n) == pytest.approx(divergence, abs=1e-4)


JUDGEMENTS = {"score": [[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]], "true_reward": [[0.0, -1.0, 4.0], [2.0, 4.0, 9.0]]}


def test_at_equal_kl_the_best_of_n_lies_between_two_whole_n():
    halfway = (kl_of_best_of(2) + kl_of_best_of(3)) / 2
    two, three = best_by_score(JUDGEMENTS, 2), best_by_score(JUDGEMENTS, 3)
    assert three == {"score": [3.0, 5.0], "true_reward": [-1.0, 3.0]}  # the two that tie share
    expected = {judge: [(a + b) / 2 for a, b in zip(two[judge], three[judge], strict=True)] for judge in two}
    assert best_at_kl(JUDGEMENTS, halfway) == {judge: pytest.approx(values) for judge, values in expected.items()}
    means = {judge: pytest.approx([fmean(row) for row in rows]) for judge, rows in JUDGEMENTS.items()}
    assert best_at_kl(JUDGEMENTS, 0.0) == means
    beyond = kl_of_best_of(3) + 1e-9
    for judgements, kl in ((JUDGEMENTS, beyond), (JUDGEMENTS, NAN), ({}, 0.1), ({"score": [[1.0], [2.0]]}, 0.0)):
        assert best_at_kl(judgements, kl) == {}


def test_a_policy_is_held_against_the_best_of_n_prompt_by_prompt():
    assert beside_best_of_n(JUDGEMENTS, JUDGEMENTS, 0.0)["score_over_best_of_n"] == pytest.approx([0.0, 0.0])
    better = {judge: [[x + 1 for x in row] for row in rows] for judge, rows in JUDGEMENTS.items()}
    metrics = beside_best_of_n(JUDGEMENTS, better, kl_of_best_of(3))
    assert metrics["score_best_of_n"] == [3.0, 5.0]
    assert metrics["true_reward_over_best_of_n"] == pytest.approx([2.0 + 1.0, 6.0 - 3.0])


def test_a_prompt_with_an_answer_that_is_not_judged_has_no_best_of_n():
    unjudged = {
        judge: [*rows, [NAN, *rows[0][1:]] if judge == "score" else rows[0]] for judge, rows in JUDGEMENTS.items()
    }
    whole = {judge: [*rows, rows[0]] for judge, rows in JUDGEMENTS.items()}
    assert judged_whole([unjudged, whole]) == judged_whole([whole, unjudged]) == [JUDGEMENTS] * 2
    assert judged_whole([{}, {}]) == [{}, {}]


def test_pass_at_k_needs_verdicts_and_as_many_as_k():
    assert sizes(1) == [] and sizes(16) == [2, 4, 8, 16] and sizes(7) == [2, 4]
    assert pass_at_k([[1.0, 0.0, 0.0, NAN], [0.0, 0.0, 0.0, 0.0], [1.0, NAN, NAN, NAN]]) == {
        "pass_at_2": [pytest.approx(2 / 3), 0.0],
        "pass_at_4": [0.0],
    }
    assert pass_at_k([[0.5, 1.0]]) == pass_at_k([]) == {}


def test_the_metrics_of_an_evaluation_with_several_samples():
    def samples(kl, scores, rewards):
        return PolicySamples(
            texts=[""] * 4,
            lengths=torch.tensor([1, 3, 2, 2]),
            ended=torch.ones(4, dtype=torch.bool),
            kl=kl,
            scores=torch.tensor(scores),
            true_rewards=None,
            samples_per_prompt=2,
            rewards={"exact_answer": torch.tensor(rewards), "length": torch.tensor([0.0, -0.5, 0.0, 0.0])},
        )

    before = samples(0.0, [1.0, 2.0, 3.0, 5.0], [0.0, 1.0, 0.0, 0.0])
    after = samples(kl_of_best_of(2) / 2, [4.0, 4.0, 4.0, 6.0], [1.0, 1.0, 0.0, 1.0])
    metrics = of_several_samples(before, after)
    assert metrics["kl_per_response"] == pytest.approx(kl_of_best_of(2))  # two tokens each
    assert metrics["score_best_of_n"] == pytest.approx((2 + 5) / 2)
    assert metrics["score_over_best_of_n"] == pytest.approx(((4 - 2) + (5 - 5)) / 2)
    assert metrics["reward_exact_answer_pass_at_2"] == 1.0
    assert metrics["score_over_best_of_n_low"] < metrics["score_over_best_of_n"] < metrics["score_over_best_of_n_high"]
    assert not any("length" in name for name in metrics)
    assert of_several_samples(before, before) == {
        "reward_exact_answer_pass_at_2": 0.5,
        "reward_exact_answer_pass_at_2_low": wilson(1, 2).low,
        "reward_exact_answer_pass_at_2_high": wilson(1, 2).high,
    }
