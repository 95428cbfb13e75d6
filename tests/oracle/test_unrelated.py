"""The noise of repeated answers against simulated policies, and what is called a loss."""

import random
from statistics import fmean, pvariance, variance

import pytest

from rlhf.evaluation.unrelated import ANSWERS_EACH, changes, changes_in, metrics_of, verdict
from rlhf.recipe.stages import PolicyLabel
from rlhf.stats import Z95


def answered(rng, chances):
    """The verdicts of three repeats of prompts that are solved with these chances."""
    return [[float(rng.random() < chance) for _ in range(ANSWERS_EACH)] for chance in chances]


def test_the_noise_is_that_of_answering_the_same_prompts_again():
    rng = random.Random(0)
    chances = [rng.random() for _ in range(60)]
    found = [
        changes({"sums": answered(rng, chances)}, {"sums": answered(rng, [c / 2 for c in chances])})[0]
        for _ in range(2000)
    ]
    assert Z95**2 * pvariance([c.change for c in found]) == pytest.approx(fmean(c.noise**2 for c in found), rel=0.08)
    assert fmean(c.change for c in found) == pytest.approx(-fmean(chances) / 2, abs=0.005)


@pytest.mark.parametrize(("kept", "low", "high"), [(1.0, 0.01, 0.045), (0.5, 0.99, 1.0)])
def test_a_loss_is_called_where_there_is_one_and_seldom_elsewhere(kept, low, high):
    rng = random.Random(1)
    chances = [rng.random() for _ in range(100)]
    losses = [
        changes({"t": answered(rng, chances)}, {"t": answered(rng, [kept * c for c in chances])})[0].is_loss
        for _ in range(1000)
    ]
    assert low <= fmean(losses) <= high


def test_the_noise_by_hand():
    before, after = [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    ((_, change, noise),) = changes({"t": before}, {"t": after})
    assert change == pytest.approx(4 / 6 - 2 / 6)
    assert noise == pytest.approx(Z95 * (2 * variance([1, 1, 0]) / 3 / 4) ** 0.5)


def test_answers_without_a_verdict_are_in_no_figure_of_a_task():
    """Of three prompts the second has no verdict before, and the third one verdict after."""
    before, after = [[1.0, 1.0, 0.0], [], [0.0, 1.0]], [[1.0, 0.0, 0.0], [1.0] * 3, [1.0]]
    assert changes({"t": before}, {"t": after}) == changes({"t": before[:1]}, {"t": after[:1]})
    assert changes({"t": before[1:]}, {"t": after[1:]}) == []
    metrics = metrics_of("base", "sft", {"sft": {"t": before}, "base": {"t": before}})
    assert metrics == {"unrelated_t": pytest.approx((2 / 3 + 1 / 2) / 2), "unrelated_t_no_verdict": 1 - 5 / 9}


def test_what_is_written_is_read_and_said():
    rewards: dict[PolicyLabel, dict[str, list[list[float]]]] = {
        "sft": {"a_b": [[1.0] * 3] * 9, "noise": [[0.0, 1.0, 1.0]] * 9},
        "ppo": {"a_b": [[0.0] * 3] * 9, "noise": [[1.0, 0.0, 0.0]] * 9},
    }
    rewards["base"] = rewards["sft"]
    assert metrics_of("base", "sft", rewards).keys() == {"unrelated_a_b", "unrelated_noise"}
    metrics = {f"ppo/{key}": value for key, value in metrics_of("ppo", "sft", rewards).items()}
    found = changes_in(metrics | {"dpo/change_of_unrelated_a_b": 0.0, "dpo/noise_of_unrelated_a_b": 0.0}, "ppo")
    assert found == [("a_b", -1.0, 0.0), ("noise", pytest.approx(-1 / 3), pytest.approx(0.3080, abs=1e-3))]
    assert verdict(found) == "loss beyond noise: a_b -1 (noise 0), noise -0.3333 (noise 0.308)"
    assert verdict([found[1]._replace(change=-0.307)]) == verdict([]) == "no loss beyond noise"
