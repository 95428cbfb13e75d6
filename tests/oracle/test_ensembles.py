"""The score of an ensemble of reward models, against loops over Python's floats and what holds for any scores."""

import random
from statistics import fmean, pstdev

import pytest
import torch

from rlhf.objectives.choices import COMBINES
from rlhf.objectives.ensembles import Ensemble, combine, disagreement

rng = random.Random(3)
SCORES = [[rng.gauss(m, 1 + m) for _ in range(7)] for m in range(4)]  # of four members, each on a scale of its own
TENSOR = torch.tensor(SCORES, dtype=torch.float64)
ENSEMBLE = Ensemble(tuple(fmean(row) for row in SCORES), tuple(pstdev(row) for row in SCORES))


def by_hand(of_one: list[float], how: str, coef: float) -> float:
    mean = sum(of_one) / len(of_one)
    if how == "min":
        return sorted(of_one)[0]
    return mean - (coef * sum((s - mean) ** 2 for s in of_one) / len(of_one) if how == "mean_minus_var" else 0.0)


@pytest.mark.parametrize("how", COMBINES)
def test_each_text_gets_the_combination_of_its_standardised_scores_on_the_members_scale(how):
    members = [[(s - fmean(row)) / pstdev(row) for s in row] for row in SCORES]
    combined = [by_hand(list(of_one), how, 0.7) for of_one in zip(*members, strict=True)]
    assert combine(torch.tensor(members), how, 0.7).tolist() == pytest.approx(combined, abs=1e-6)
    centre, unit = fmean(ENSEMBLE.means), fmean(ENSEMBLE.sds)
    ensemble = ENSEMBLE._replace(combine=how, variance_coef=0.7)
    assert ensemble.score(TENSOR).tolist() == pytest.approx([centre + unit * s for s in combined])
    pairs = TENSOR[:, :6].view(4, 2, 3)  # any shape of texts
    assert torch.equal(ensemble.score(pairs), ensemble.score(TENSOR)[:6].view(2, 3))
    apart = disagreement(ensemble.standardise(TENSOR)).tolist()
    assert apart == pytest.approx([pstdev(of_one) for of_one in zip(*members, strict=True)])


@pytest.mark.parametrize("how", COMBINES)
def test_one_member_is_itself_and_the_order_of_members_does_not_count(how):
    for member, mean, sd in zip(TENSOR, ENSEMBLE.means, ENSEMBLE.sds, strict=True):
        alone = Ensemble((mean,), (sd,), how, 0.7)
        torch.testing.assert_close(alone.score(member[None]), member)
    assert torch.equal(combine(TENSOR[:1], how, 0.7), TENSOR[0]) and not disagreement(TENSOR[:1]).any()
    torch.testing.assert_close(combine(TENSOR[[2, 0, 3, 1]], how, 0.7), combine(TENSOR, how, 0.7))


def test_the_least_is_below_the_mean_and_disagreement_only_lowers():
    mean, least, weighted = (combine(TENSOR, how, 0.7) for how in COMBINES)
    assert (least < mean).all() and (weighted < mean).all()
    torch.testing.assert_close(mean - weighted, 0.7 * disagreement(TENSOR) ** 2)
    agreeing = TENSOR[:1].expand(3, -1)
    for how in COMBINES:
        torch.testing.assert_close(combine(agreeing, how, 0.7), TENSOR[0])
    assert torch.equal(combine(TENSOR, "mean_minus_var", 0.0), mean)


def test_half_precision_is_combined_in_float32_and_nothing_is_guessed():
    assert combine(TENSOR.bfloat16(), "mean").dtype == torch.float32
    with pytest.raises(ValueError, match="at least one member"):
        combine(torch.zeros(0, 3), "min")
    with pytest.raises(ValueError, match="'max'; one of mean, min, mean_minus_var"):
        combine(TENSOR, "max")  # type: ignore[arg-type]


def test_a_score_of_the_first_member_on_the_scale_of_the_ensemble():
    a, b = ENSEMBLE.first_as_ensemble()
    expected = ENSEMBLE.score(_as_if_all_agreed())
    torch.testing.assert_close((TENSOR[0] - a) / b, expected)


def _as_if_all_agreed() -> torch.Tensor:
    """The members' scores of texts on which all of them say, standardised, what the first one says."""
    first = ENSEMBLE.standardise(TENSOR)[0]
    return torch.stack([mean + sd * first for mean, sd in zip(ENSEMBLE.means, ENSEMBLE.sds, strict=True)])
