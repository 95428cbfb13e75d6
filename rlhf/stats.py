"""Statistics of comparisons, answers and scores. Plain Python numbers go in and come out.

Each is a few lines. Libraries would be three more dependencies: statsmodels, krippendorff and torchmetrics.
"""

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

    `clusters` names for each outcome what it has in common with others, such as its prompt; outcomes of one cluster may
    depend on each other. The interval is that of the effective number of outcomes, n / max(1, d). The design effect d
    is the cluster-robust variance of the mean over that of independent outcomes, p(1 − p)/(n − 1). If all outcomes are
    0 or all are 1, or share one cluster, d cannot be estimated, and each cluster counts as one outcome. With a cluster
    of its own for each outcome it is Wilson's interval. Raises ValueError without outcomes.
    """
    n, groups = len(outcomes), len(set(clusters))
    p = fmean(outcomes) if n else 0.0
    variance, independent = _variance_of_mean(outcomes, clusters), p * (1 - p)
    if variance is None or independent == 0:
        return wilson(p * groups, groups)
    effective = n / max(1.0, variance * (n - 1) / independent)
    return wilson(p * effective, effective)


def weighted_mean(parts: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Return the weighted mean of independent estimates, with weights that add up to 1, and its interval.

    The interval follows from those of the parts, and keeps their asymmetry: its lower end is the mean −
    √Σ w²(value − low)², its upper end likewise (MOVER; Zou and Donner 2008, doi:10.1002/sim.3095).
    """
    value = math.fsum(weight * part.value for part, weight in zip(parts, weights, strict=True))
    below = math.hypot(*(weight * (part.value - part.low) for part, weight in zip(parts, weights, strict=True)))
    above = math.hypot(*(weight * (part.high - part.value) for part, weight in zip(parts, weights, strict=True)))
    return Estimate(value, value - below, value + above)


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


def share_bounds(*sides: Sequence[float]) -> tuple[float, float] | None:
    """Return 0 and 1 if all numbers lie between them, as shares do, and None otherwise."""
    return (0.0, 1.0) if all(0 <= number <= 1 for side in sides for number in side) else None


def paired_difference(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Estimate | None:
    """Return the mean of after[i] − before[i], which belong to each other, with the interval of `mean_interval`.

    That of two shares stays between −1 and 1.
    """
    bounds = (-1.0, 1.0) if share_bounds(before, after) else None
    return mean_interval([y - x for x, y in zip(before, after, strict=True)], clusters, bounds)


def gain_in_sd(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Estimate | None:
    """Return the gain (mean of `after` − mean of `before`) / sd of `before`, with its 95 % interval.

    before[i] and after[i] belong to each other, such as two answers to one prompt. The interval is that of the mean of
    (after − before)/sd − gain/2 · ((before − mean)²/sd² − 1), by the delta method: the second term is the error of the
    estimated sd. `clusters` are those of `mean_interval`. Returns None for fewer than two clusters, and if all of
    `before` or all of these terms are equal.
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


def _variance_of_mean(values: Sequence[float], clusters: Sequence[Hashable]) -> float | None:
    """Return the cluster-robust variance of a mean, G/(G − 1) · Σ_g (Σ_{i∈g} (x_i − mean))² / n².

    G is the number of clusters. With a cluster of its own for each value it is sd²/n. None for fewer than two clusters.
    """
    residuals: defaultdict[Hashable, float] = defaultdict(float)
    middle = fmean(values) if values else 0.0
    for value, cluster in zip(values, clusters, strict=True):
        residuals[cluster] += value - middle
    groups = len(residuals)
    if groups < 2:
        return None
    return groups / (groups - 1) * math.fsum(r * r for r in residuals.values()) / len(values) ** 2


def outcomes(differences: Sequence[float]) -> list[float]:
    """Return 1 (win), 0 (loss) or 0.5 (tie) for each difference between the first side and the second."""
    return [1.0 if d > 0 else 0.5 if d == 0 else 0.0 for d in differences]


def length_controlled_win_rate(outcomes: Sequence[float], length_differences: Sequence[float]) -> Estimate | None:
    """Return the win rate that remains when both answers are equally long, after AlpacaEval 2 (arXiv 2404.04475).

    The model is P(win) = σ(a + b·tanh(d/s)), where d, one of `length_differences`, is the answer's length minus its
    rival's in any unit, and s is the standard deviation of d. It is fitted to `outcomes` (1 win, 0 loss, 0.5 tie) by
    maximum likelihood, and the rate is σ(a). The term of that paper's regression for the difficulty of a prompt is left
    out: with two answers to each prompt it cannot be separated from noise. A penalty of 0.01·(a² + b²) keeps the fit
    finite where length decides every outcome.

    The interval is that of a, from the sandwich H⁻¹MH⁻¹, where H is the Hessian and M a sum of squared residuals. A win
    or a loss contributes its fitted variance p(1 − p), so that the interval stays honest where one side wins
    everything. A tie or a mean of several outcomes contributes its squared residual (p − y)².

    Returns None without outcomes; if all are 0.5, which leaves no residuals and so an interval without width; and where
    one side is nearly always the longer one. Then x = tanh(d/s) hardly varies, a and b cannot be told apart, and the
    penalty would decide the rate. The n comparisons are worth n − (Σx)²/Σx² at equal length; that must be 1 or more.
    """
    if all(outcome == 0.5 for outcome in outcomes):
        return None
    scale = pstdev(length_differences) or 1.0
    rows = [(math.tanh(d / scale), y) for d, y in zip(length_differences, outcomes, strict=True)]
    squares = math.fsum(x * x for x, _ in rows)
    if squares and len(rows) - math.fsum(x for x, _ in rows) ** 2 / squares < 1:
        return None
    ridge = 0.02
    a = b = 0.0
    for _ in range(100):  # Newton's method on a strictly convex function converges in a few steps
        ga, gb, haa, hab, hbb = ridge * a, ridge * b, ridge, 0.0, ridge
        for x, y in rows:
            p = sigmoid(a + b * x)
            weight = p * (1 - p)
            ga, gb = ga + p - y, gb + (p - y) * x
            haa, hab, hbb = haa + weight, hab + weight * x, hbb + weight * x * x
        determinant = haa * hbb - hab * hab
        step_a, step_b = (hbb * ga - hab * gb) / determinant, (haa * gb - hab * ga) / determinant
        shrink = min(1.0, 4.0 / max(abs(step_a), abs(step_b), 1e-300))  # far from the optimum a step overshoots
        a, b = a - shrink * step_a, b - shrink * step_b
        if max(abs(step_a), abs(step_b)) < 1e-10:
            break
    haa, hab, hbb = ridge, 0.0, ridge  # of the optimum; those above are of the point before the last step
    maa = mab = mbb = 0.0
    for x, y in rows:
        p = sigmoid(a + b * x)
        weight = p * (1 - p)
        haa, hab, hbb = haa + weight, hab + weight * x, hbb + weight * x * x
        square = (p - y) ** 2 if 0 < y < 1 else weight
        maa, mab, mbb = maa + square, mab + square * x, mbb + square * x * x
    error = Z95 * math.sqrt(hbb * hbb * maa - 2 * hbb * hab * mab + hab * hab * mbb) / (haa * hbb - hab * hab)
    return Estimate(sigmoid(a), sigmoid(a - error), sigmoid(a + error))


def best_of(scores: Sequence[float], values: Sequence[float], n: int) -> float:
    """Return the expected value of the answer with the highest of `n` scores, drawn from these without replacement.

    scores[i] and values[i] belong to one of N answers to a prompt. The highest of n lies among the a answers with a
    score of at most s with probability C(a, n)/C(N, n), so that the mean over all subsets needs none of them; answers
    with the same score are equally likely (arXiv 2112.09332, appendix I). Where scores and values are the same verdicts
    of 0 and 1, c of them 1, this is pass@n, 1 − C(N − c, n)/C(N, n) (arXiv 2107.03374, eq. 1).

    Raises ValueError unless n is from 1 to N.
    """
    if not 1 <= n <= len(scores):
        raise ValueError(f"the best of {n} among {len(scores)} answers")
    tied: defaultdict[float, list[float]] = defaultdict(list)
    for score, value in zip(scores, values, strict=True):
        tied[score].append(value)
    parts, below = [], 0
    for score in sorted(tied):
        upto = below + len(tied[score])
        parts.append((math.comb(upto, n) - math.comb(below, n)) / math.comb(len(scores), n) * fmean(tied[score]))
        below = upto
    return math.fsum(parts)


def kl_of_best_of(n: int) -> float:
    """Return the KL in nats per answer of the best of n to what it was drawn from, log n − (n − 1)/n.

    This is exact where no two scores are equal, and an upper bound otherwise (arXiv 2401.01879).
    """
    return math.log(n) - (n - 1) / n


def distinct(texts: Sequence[str], n: int) -> float:
    """Return the share of distinct n-grams among the word n-grams of all texts (arXiv 1510.03055); 0 without any."""
    grams = Counter(
        tuple(words[i : i + n]) for words in (text.split() for text in texts) for i in range(len(words) - n + 1)
    )
    return len(grams) / grams.total() if grams else 0.0


class Bin(NamedTuple):
    """The pairs whose confidence lies in one range: the reward model's mean confidence and its accuracy on them."""

    low: float
    high: float
    pairs: int
    confidence: float
    accuracy: float


def calibration(margins: Sequence[float], bins: int = 10) -> tuple[list[Bin], float]:
    """Return a reward model's calibration curve and its expected calibration error (arXiv 1706.04599).

    `margins` are score differences, chosen minus rejected. The model prefers the higher score, with confidence
    σ(|margin|). Confidence runs from 0.5 to 1, a range that is cut into `bins` of equal width. The model is right where
    the margin is positive, and half right where it is 0. The error is Σ pairs·|accuracy − confidence| / all pairs. Bins
    without pairs are left out.
    """
    width = 0.5 / bins
    binned: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for margin, right in zip(margins, outcomes(margins), strict=True):
        confidence = sigmoid(abs(margin))
        binned[min(bins - 1, int((confidence - 0.5) / width))].append((confidence, right))
    curve = [
        Bin(0.5 + i * width, 0.5 + (i + 1) * width, len(rows), fmean(c for c, _ in rows), fmean(r for _, r in rows))
        for i, rows in enumerate(binned)
        if rows
    ]
    error = sum(b.pairs * abs(b.accuracy - b.confidence) for b in curve) / max(1, len(margins))
    return curve, error


def histogram(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Count the values in each range [edges[i], edges[i+1]); values outside count in the first or last range."""
    counts = [0] * (len(edges) - 1)
    width = (edges[-1] - edges[0]) / len(counts)
    for value in values:
        counts[max(0, min(len(counts) - 1, int((value - edges[0]) // width)))] += 1
    return counts


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^−x) without overflow for any x."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
