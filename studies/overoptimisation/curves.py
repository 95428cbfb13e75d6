"""Curves of proxy and truth over d = √KL, and the forms that Gao et al. (arXiv 2210.10760) fit to them.

Best-of-n: R(d) = d (α − β d). Reinforcement learning: R(d) = d (α − β log d). Both are linear in α and β.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal

from rlhf.evaluation.best_of_n import SCORE, best_by_score, sizes
from rlhf.stats import kl_of_best_of, mean_interval
from studies.kinds import Fitted, OptimisedPoint

Form = Literal["best_of_n", "ppo"]
JUDGES = ("proxy", "truth", "utility")


def slope(form: Form, d: float) -> float:
    """Return what β is multiplied with in R(d) / d = α − β · slope."""
    return d if form == "best_of_n" else math.log(d)


def value(fitted: Fitted, form: Form, d: float) -> float:
    """Return the fitted R(d); 0 at d = 0."""
    return d * (fitted["alpha"] - fitted["beta"] * slope(form, d)) if d > 0 else 0.0


def peak(fitted: Fitted, form: Form) -> float | None:
    """Return the d at which the fitted form is highest; None where it has no maximum above d = 0."""
    alpha, beta = fitted["alpha"], fitted["beta"]
    if beta <= 0 or (form == "best_of_n" and alpha <= 0):
        return None
    return alpha / (2 * beta) if form == "best_of_n" else math.exp(alpha / beta - 1)


def fit(form: Form, points: Sequence[tuple[float, float]]) -> Fitted:
    """Return α and β of the least squares fit to points (d, R) with d > 0, and the root mean square of its residuals.

    Raises ValueError for points that do not determine both.
    """
    rows = [(d, -d * slope(form, d), gain) for d, gain in points if d > 0]
    aa, ab, bb = (math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (math.fsum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb or not rows:
        raise ValueError("the points do not determine both coefficients")
    fitted: Fitted = {
        "alpha": (bb * ay - ab * by) / determinant,
        "beta": (aa * by - ab * ay) / determinant,
        "residual": 0.0,
    }
    errors = [gain - value(fitted, form, d) for d, _, gain in rows]
    return {**fitted, "residual": math.sqrt(fmean(error * error for error in errors))}


def of_best_of_n(judged: Mapping[str, Sequence[Sequence[float]]]) -> list[OptimisedPoint]:
    """Return the points of best-of-n for n = 2, 4, … in gains over the mean answer, in sd of all answers.

    `judged`: by judge of `JUDGES`, the numbers of the answers to each prompt.
    """
    numbers = {judge: [list(row) for row in judged[judge]] for judge in JUDGES}
    means = {judge: fmean(x for row in rows for x in row) for judge, rows in numbers.items()}
    sds = {judge: stdev(x for row in rows for x in row) for judge, rows in numbers.items()}
    points = []
    for n in sizes(len(numbers["proxy"][0])):
        best = best_by_score({SCORE: numbers["proxy"], **numbers}, n)
        gains = {judge: (fmean(best[judge]) - means[judge]) / sds[judge] for judge in JUDGES}
        interval = mean_interval(
            [(x - fmean(row)) / sds["truth"] for x, row in zip(best["truth"], numbers["truth"], strict=True)]
        )
        points.append(_point(n, kl_of_best_of(n), gains, interval[1:] if interval else None))
    return points


def _point(number: int, kl: float, gains: Mapping[str, float], interval: tuple[float, float] | None) -> OptimisedPoint:
    low, high = interval or (gains["truth"], gains["truth"])
    return {
        "number": number,
        "kl": round(kl, 5),
        "proxy": round(gains["proxy"], 5),
        "truth": round(gains["truth"], 5),
        "truth_low": round(low, 5),
        "truth_high": round(high, 5),
        "utility": round(gains["utility"], 5),
    }


def of_ppo(rows: Sequence[Mapping[str, float]], sds: Mapping[str, float]) -> list[OptimisedPoint]:
    """Return the evaluations in PPO's metrics.jsonl, with gains in sd of SFT's answers (`sds`, by judge)."""
    points = []
    for row in rows:
        if "eval/kl_per_token" not in row:
            continue
        gains = {judge: row[f"eval/reward_{_named(judge)}_gain"] / sds[judge] for judge in ("truth", "utility")}
        ends = tuple(row[f"eval/reward_{_named('truth')}_gain_{end}"] / sds["truth"] for end in ("low", "high"))
        points.append(
            _point(
                int(row["step"]),
                row["eval/kl_per_token"] * row["eval/response_length"],
                {"proxy": row["eval/score_gain_sd"], **gains},
                (ends[0], ends[1]),
            )
        )
    return points


def _named(judge: str) -> str:
    """Return how metrics name a judge of studies/overoptimisation/judges.py."""
    return f"studies.overoptimisation.judges.{judge}"
