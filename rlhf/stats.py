"""Small statistics of comparisons, answers and scores; plain Python numbers in, plain numbers out.

Each is a few lines. Libraries would be three more dependencies: statsmodels, krippendorff and torchmetrics.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist, fmean, pstdev, stdev
from typing import NamedTuple

Z95 = NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(count: float, total: int) -> Estimate:
    """A share with its Wilson interval (Wilson 1927): (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    Half counts (ties) are allowed; the interval is then too wide rather than too narrow. Raises ValueError for total 0.
    """
    if total < 1:
        raise ValueError("a share of nothing")
    p, spread = count / total, Z95**2 / total
    middle = (p + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(p * (1 - p) / total + spread / (4 * total)) / (1 + spread)
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))


def mean_interval(values: Sequence[float]) -> Estimate | None:
    """The mean of independent values with its normal interval, mean ± z·sd/√n; None for fewer than two values."""
    if len(values) < 2:
        return None
    middle, half = fmean(values), Z95 * stdev(values) / math.sqrt(len(values))
    return Estimate(middle, middle - half, middle + half)


def outcomes(differences: Sequence[float]) -> list[float]:
    """1 for a win, 0 for a loss, 0.5 for a tie, from what one side has more than the other."""
    return [1.0 if d > 0 else 0.5 if d == 0 else 0.0 for d in differences]


def length_controlled_win_rate(outcomes: Sequence[float], longer: Sequence[float]) -> Estimate | None:
    """The win rate that is left when both answers are equally long, after AlpacaEval 2 (arXiv 2404.04475).

    P(win) = σ(a + b·tanh(d/s)), fitted to `outcomes` (1 win, 0 loss, 0.5 tie) by maximum likelihood, d the answer's
    length less its rival's (`longer`, any unit), s the standard deviation of d; the rate is σ(a). Its interval is a's,
    from H⁻¹MH⁻¹: H is the Hessian and M the sum of squared residuals: of wins and losses as fitted, p(1 − p), which
    stays honest where one side wins everything; of ties and of means of several outcomes as they are, (p − y)². Of that
    paper's regression the term for the difficulty of a prompt is left out: with two answers to each it cannot be told
    from noise. A penalty of 0.01·(a² + b²) keeps the fit finite where length decides every outcome. None without
    outcomes.
    """
    if not outcomes:
        return None
    scale = pstdev(longer) or 1.0
    rows = [(math.tanh(d / scale), y) for d, y in zip(longer, outcomes, strict=True)]
    ridge = 0.02
    a = b = 0.0
    for _ in range(100):  # Newton's method on a strictly convex function; a few steps are enough
        ga, gb, haa, hab, hbb = ridge * a, ridge * b, ridge, 0.0, ridge
        for x, y in rows:
            p = sigmoid(a + b * x)
            weight = p * (1 - p)
            ga, gb = ga + p - y, gb + (p - y) * x
            haa, hab, hbb = haa + weight, hab + weight * x, hbb + weight * x * x
        determinant = haa * hbb - hab * hab
        step_a, step_b = (hbb * ga - hab * gb) / determinant, (haa * gb - hab * ga) / determinant
        shrink = min(1.0, 4.0 / max(abs(step_a), abs(step_b), 1e-300))  # far from the answer a step overshoots
        a, b = a - shrink * step_a, b - shrink * step_b
        if max(abs(step_a), abs(step_b)) < 1e-10:
            break
    maa = mab = mbb = 0.0
    for x, y in rows:
        p = sigmoid(a + b * x)
        square = (p - y) ** 2 if 0 < y < 1 else p * (1 - p)
        maa, mab, mbb = maa + square, mab + square * x, mbb + square * x * x
    error = Z95 * math.sqrt(hbb * hbb * maa - 2 * hbb * hab * mab + hab * hab * mbb) / determinant
    return Estimate(sigmoid(a), sigmoid(a - error), sigmoid(a + error))


def krippendorff_alpha(units: Sequence[Sequence[Hashable]]) -> float | None:
    """Agreement of raters beyond chance: 1 is perfect, 0 what chance gives (Krippendorff 2011, nominal data).

    `units` holds, for each rated thing, the ratings it got; things rated once say nothing. α = 1 − D_o/D_e with D_o the
    observed and D_e the expected disagreement. None where nothing was rated twice or all ratings are the same value.
    """
    pairable = [list(unit) for unit in units if len(unit) > 1]
    totals = Counter(value for unit in pairable for value in unit)
    n = totals.total()
    if len(totals) < 2:
        return None
    agreeing = sum(count * (count - 1) / (len(unit) - 1) for unit in pairable for count in Counter(unit).values())
    expected = sum(count * (count - 1) for count in totals.values()) / (n - 1)
    return 1 - (n - agreeing) / (n - expected)


def distinct(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams of words over all n-grams of all texts (arXiv 1510.03055); 0 where there are none."""
    grams = Counter(
        tuple(words[i : i + n]) for words in (text.split() for text in texts) for i in range(len(words) - n + 1)
    )
    return len(grams) / grams.total() if grams else 0.0


class Bin(NamedTuple):
    """Pairs whose confidence lies in one range: how sure the reward model was, and how often it was right."""

    low: float
    high: float
    pairs: int
    confidence: float
    accuracy: float


def calibration(margins: Sequence[float], bins: int = 10) -> tuple[list[Bin], float]:
    """How far a reward model's confidence can be believed, and the expected calibration error (arXiv 1706.04599).

    `margins` are score differences, chosen less rejected. The model prefers the higher score, with confidence
    σ(|margin|) from 0.5 to 1, which is cut into equal `bins`; it is right where the margin is positive, half
    right where it is 0. The error is Σ pairs·|accuracy − confidence| / all pairs. Bins without pairs are left out.
    """
    width = 0.5 / bins
    held: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for margin, right in zip(margins, outcomes(margins), strict=True):
        sure = sigmoid(abs(margin))
        held[min(bins - 1, int((sure - 0.5) / width))].append((sure, right))
    curve = [
        Bin(0.5 + i * width, 0.5 + (i + 1) * width, len(rows), fmean(c for c, _ in rows), fmean(r for _, r in rows))
        for i, rows in enumerate(held)
        if rows
    ]
    error = sum(b.pairs * abs(b.accuracy - b.confidence) for b in curve) / max(1, len(margins))
    return curve, error


def histogram(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Values in each range [edges[i], edges[i+1]); what lies outside counts in the first or last."""
    counts = [0] * (len(edges) - 1)
    width = (edges[-1] - edges[0]) / len(counts)
    for value in values:
        counts[max(0, min(len(counts) - 1, int((value - edges[0]) // width)))] += 1
    return counts


def sigmoid(x: float) -> float:
    """1 / (1 + e^−x), for any x."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
