"""Statistics of comparisons, answers and scores. Plain Python numbers go in and come out."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from statistics import NormalDist, fmean, pstdev, stdev
from typing import NamedTuple

Z95 = NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(count: float, total: float) -> Estimate:
    """Return a share with its Wilson interval (Wilson 1927): (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    Half counts (ties) are allowed; the interval is then too wide rather than too narrow. `total` may be an effective
    number of observations. Raises ValueError for a total below 1.
    """
    if total < 1:
        raise ValueError("a share of nothing")
    p, z2_n = count / total, Z95**2 / total
    middle = (p + z2_n / 2) / (1 + z2_n)
    half_width = Z95 * math.sqrt(p * (1 - p) / total + z2_n / (4 * total)) / (1 + z2_n)
    low, high = max(0.0, middle - half_width), min(1.0, middle + half_width)
    return Estimate(p, min(low, p), max(high, p))  # rounding leaves 3e-17 below a share of 0


def clustered_share(outcomes: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Return the mean of `outcomes` (1, 0, or 0.5 for a tie) with a Wilson interval that allows for `clusters`.

    Outcomes of one cluster, such as a prompt, may depend on each other. The interval is that of n / max(1, d) outcomes,
    where the design effect d is the cluster-robust variance of the mean over that of independent outcomes,
    p(1 − p)/(n − 1). Where all are equal, or share one cluster, each cluster counts as one outcome.
    """
    n, groups = len(outcomes), len(set(clusters))
    p = fmean(outcomes) if n else 0.0
    variance, independent = _variance_of_mean(outcomes, clusters), p * (1 - p)
    if variance is None or independent == 0:
        return wilson(p * groups, groups)
    effective = n / max(1.0, variance * (n - 1) / independent)
    return wilson(p * effective, effective)


def mean_interval(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    bounds: tuple[float, float] | None = None,
) -> Estimate | None:
    """Return the mean of values with its 95 % interval; `bounds` are the ends that no value can lie beyond, if any.

    Without bounds the interval is normal, mean ± z·sd/√n for independent values. With bounds it stays within them: it
    is Wilson's, of the number of observations at which a share with this mean would have the variance of this mean.
    Values with the same entry in `clusters` may depend on each other; the variance is then cluster-robust. Returns None
    for fewer than two clusters, and where nothing varies: that would be an interval without width.
    """
    variance = _variance_of_mean(values, range(len(values)) if clusters is None else clusters)
    if not variance or len(set(values)) == 1:
        return None
    middle = fmean(values)
    if bounds is not None:
        low, width = bounds[0], bounds[1] - bounds[0]
        p = (middle - low) / width
        effective = max(1.0, len(values) / (len(values) - 1) * p * (1 - p) * width**2 / variance)
        return Estimate(middle, *(low + width * end for end in wilson(p * effective, effective)[1:]))
    half_width = Z95 * math.sqrt(variance)
    return Estimate(middle, middle - half_width, middle + half_width)


def _variance_of_mean(values: Sequence[float], clusters: Sequence[Hashable]) -> float | None:
    """Return the cluster-robust variance of a mean, G/(G − 1) · Σ_g (Σ_{i∈g} (x_i − mean))² / n²; None for G < 2."""
    residuals: defaultdict[Hashable, float] = defaultdict(float)
    middle = fmean(values) if values else 0.0
    for value, cluster in zip(values, clusters, strict=True):
        residuals[cluster] += value - middle
    groups = len(residuals)
    if groups < 2:
        return None
    return groups / (groups - 1) * math.fsum(r * r for r in residuals.values()) / len(values) ** 2


def share_bounds(*sides: Sequence[float]) -> tuple[float, float] | None:
    """Return 0 and 1 if all numbers lie between them, as shares do, and None otherwise."""
    return (0.0, 1.0) if all(0 <= number <= 1 for side in sides for number in side) else None


def paired_difference(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Estimate | None:
    """Return the mean of after[i] − before[i] with the interval of `mean_interval`; of shares it is within −1 and 1."""
    bounds = (-1.0, 1.0) if share_bounds(before, after) else None
    return mean_interval([y - x for x, y in zip(before, after, strict=True)], clusters, bounds)


def gain_in_sd(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Estimate | None:
    """Return the gain (mean of `after` − mean of `before`) / sd of `before`, with its 95 % interval.

    before[i] and after[i] belong to each other, such as two answers to one prompt. The interval is that of the mean of
    (after − before)/sd − gain/2 · ((before − mean)²/sd² − 1), by the delta method: the second term is the error of the
    estimated sd. Returns None where `mean_interval` does, and if all of `before` are equal.
    """
    if len(set(before)) < 2:
        return None
    middle, sd = fmean(before), stdev(before)
    gain = (fmean(after) - middle) / sd
    terms = [(y - x) / sd - gain / 2 * (((x - middle) / sd) ** 2 - 1) for x, y in zip(before, after, strict=True)]
    interval = mean_interval(terms, clusters)
    if interval is None:
        return None
    half_width = interval.high - interval.value
    return Estimate(gain, gain - half_width, gain + half_width)


def outcomes(differences: Sequence[float]) -> list[float]:
    """Return 1 (win), 0 (loss) or 0.5 (tie) for each difference between the first side and the second."""
    return [1.0 if d > 0 else 0.5 if d == 0 else 0.0 for d in differences]


def length_controlled_win_rate(outcomes: Sequence[float], length_differences: Sequence[float]) -> Estimate | None:
    """Return the win rate that remains when both answers are equally long, after AlpacaEval 2 (arXiv 2404.04475).

    The model is P(win) = σ(a + b·tanh(d/s)), where d is the answer's length minus its rival's in any unit, and s the
    standard deviation of d. It is fitted to `outcomes` (1 win, 0 loss, 0.5 tie) by maximum likelihood, and the rate is
    σ(a). A penalty of 0.01·(a² + b²) keeps the fit finite where length decides every outcome. The interval is that of
    a, from the sandwich H⁻¹MH⁻¹: a win or a loss adds its fitted variance p(1 − p) to M, so that the interval stays
    honest where one side wins everything, and any other outcome its squared residual.

    Returns None without outcomes, if all are 0.5, and where one side is nearly always the longer one: n comparisons are
    worth n − (Σx)²/Σx² at equal length, x = tanh(d/s), and that must be 1 or more.
    """
    import numpy as np  # of which a command that compares nothing has no use

    def fitted(weights: np.ndarray) -> np.ndarray:
        won: np.ndarray = 0.5 * (1 + np.tanh(weights @ design / 2))
        return won

    y = np.array(outcomes)
    if (y == 0.5).all():
        return None
    x = np.tanh(np.array(length_differences) / (pstdev(length_differences) or 1.0))
    if (x**2).sum() and len(x) - x.sum() ** 2 / (x**2).sum() < 1:
        return None
    design, penalty = np.stack([np.ones_like(x), x]), 0.02 * np.eye(2)  # (2, n)
    weights = np.zeros(2)
    for _ in range(100):  # Newton's method on a strictly convex function converges in a few steps
        p = fitted(weights)
        hessian = (design * p * (1 - p)) @ design.T + penalty
        step = np.linalg.solve(hessian, design @ (p - y) + penalty @ weights)
        longest = abs(step).max()
        weights = weights - step * min(1.0, 4.0 / max(longest, 1e-300))  # far from the optimum a step overshoots
        if longest < 1e-10:
            break
    p = fitted(weights)
    inverse = np.linalg.inv((design * p * (1 - p)) @ design.T + penalty)
    middle = (design * np.where((y > 0) & (y < 1), (p - y) ** 2, p * (1 - p))) @ design.T
    error = Z95 * math.sqrt((inverse @ middle @ inverse)[0, 0])
    a = float(weights[0])
    return Estimate(sigmoid(a), sigmoid(a - error), sigmoid(a + error))


def distinct(texts: Sequence[str], n: int) -> float:
    """Return the share of distinct n-grams among the word n-grams of all texts (arXiv 1510.03055); 0 without any."""
    grams = Counter(
        tuple(words[i : i + n]) for words in (text.split() for text in texts) for i in range(len(words) - n + 1)
    )
    return len(grams) / grams.total() if grams else 0.0


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^−x) without overflow for any x."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
