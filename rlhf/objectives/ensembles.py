"""One score from the scores of several reward models.

Source: Coste et al., "Reward Model Ensembles Help Mitigate Overoptimization", ICLR 2024, arXiv 2310.02743, section 3.2:
mean, worst-case (`min`) and uncertainty-weighted (`mean_minus_var`) optimization. There the members' scores are
combined as they are; here each member's are standardised first, so that no member counts more for its scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.objectives.choices import COMBINES, Combine
from rlhf.objectives.masked import at_least_float32


class Ensemble(NamedTuple):
    """How the scores of M reward models become one; means and standard deviations are of the same texts."""

    means: tuple[float, ...] = ()  # (M,) of each member's scores
    sds: tuple[float, ...] = ()  # (M,) above 0
    combine: Combine = "mean"
    variance_coef: float = 0.0  # of `mean_minus_var`

    def measured_on(self, scores: Tensor) -> "Ensemble":
        """Return the same ensemble with means and standard deviations of the members' scores (M, N)."""
        return self._replace(
            means=tuple(member.mean().item() for member in scores), sds=tuple(member.std().item() for member in scores)
        )

    def standardise(self, scores: Tensor) -> Tensor:
        """Return the members' scores (M, …), each member's less its mean, by its standard deviation."""
        means, sds = (
            torch.tensor(numbers, dtype=scores.dtype, device=scores.device).view(-1, *[1] * (scores.dim() - 1))
            for numbers in (self.means, self.sds)
        )
        return (scores - means) / sds

    def score(self, scores: Tensor) -> Tensor:
        """Return the ensemble's score (…) from the members' (M, …), with the members' mean mean and mean sd as scale.

        A margin thus stays about as large as one member's, of which a sigmoid is a probability.
        """
        combined = combine(self.standardise(scores), self.combine, self.variance_coef)
        return sum(self.means) / len(self.means) + sum(self.sds) / len(self.sds) * combined

    def first_as_ensemble(self) -> tuple[float, float]:
        """Return (a, b) such that (score - a) / b is on the ensemble's scale for a score of the first member."""
        b = self.sds[0] / (sum(self.sds) / len(self.sds))
        return self.means[0] - sum(self.means) / len(self.means) * b, b


def combine(scores: Tensor, how: Combine, variance_coef: float = 0.0) -> Tensor:
    """Return one score for each text.

    mean: 1/M Σ s_m;   min: min_m s_m;   mean_minus_var: mean - variance_coef * 1/M Σ (s_m - mean)^2.

    Shapes: scores (M, …) of M members on one scale; returns (…) float32 or wider. The order of the members does not
    count, but for rounding. Raises ValueError without members, and for another `how`.
    """
    if not scores.dim() or not len(scores):
        raise ValueError(f"want scores (M, ...) of at least one member, got {tuple(scores.shape)}")
    scores = at_least_float32(scores)
    if how == "mean":
        return scores.mean(0)
    if how == "min":
        return scores.amin(0)
    if how == "mean_minus_var":
        return scores.mean(0) - variance_coef * scores.var(0, correction=0)
    raise ValueError(f"unknown combination {how!r}; one of {', '.join(COMBINES)}")


def disagreement(scores: Tensor) -> Tensor:
    """Return the standard deviation between members of each text's score, √(1/M Σ (s_m - mean)^2).

    Shapes: scores (M, …) of M members on one scale; returns (…) float32 or wider.
    """
    return at_least_float32(scores).std(0, correction=0)
