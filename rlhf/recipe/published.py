"""Published figures and targets of a recipe (`published.yaml`), and their comparison with measured values.

`plan --published`, the tables of `run`, `bench`, `reproduce` and `report`, and the page of results use `verdict_of`.
docs/metrics.md, "Verdicts", explains the rules.
"""

import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, Self, get_args

from pydantic import model_validator

from rlhf.recipe.bounds import Finite
from rlhf.recipe.choices import COMPONENTS, StrategyName
from rlhf.recipe.stages import StageName
from rlhf.recipe.strict import AsTuple, Section
from rlhf.terminal.wording import span

QUANTITIES = ("memory_gb", "memory_percent", "time_percent", "time_factor")  # of a strategy's effect
VerdictWord = Literal["met", "better", "overlaps", "explained", "missed", "not compared"]
MET: Final = "met"
BETTER: Final = "better"  # than a published figure
OVERLAPS: Final = "overlaps"  # a projected range reaches the figure; the projected value itself does not
EXPLAINED: Final = "explained"  # worse than published, and by no more than the recipe says and explains
MISSED: Final = "missed"
NOT_COMPARED: Final = "not compared"  # not measured, or with nothing here that could be compared
NOT_MEASURED: Final = "not measured"
GOOD = (MET, BETTER)

EXPLAINED_UP_TO = 1.1  # times what a figure expects
ABOUT = "10%"  # the tolerance of a figure that is published as "about" or "~"
COSTS = ("peak_vram_gb", "hours", "cost_usd", "adapter_gb", "merged_model_gb", "base_model_gb")
LESS = (*COSTS, "perplexity", "perplexity_ratio", "last.loss", "accuracy_gap_points")
MORE = (
    "accuracy",
    "last.accuracy",
    "score_gain_sd",
    "true_reward_gain_sd",
    "win_rate_vs_sft",
    "win_rate_vs_base",
    "preference_accuracy",
)
# Metrics that no run of a stage can produce, with the reason.
ELSEWHERE = {
    "component_gb.activations": "predicted only: a run measures the peak, not which part of it activations are",
    "component_gb.kv_cache": "predicted only: a run measures the peak, not which part of it the cache is",
    "effect.": "only `make bench-ablation` measures it",
}

Range = tuple[float | None, float | None]


def _check_metric(metric: str) -> None:
    """Raise ValueError for the effect of an unknown strategy, or for an unknown component of a peak."""
    kind, _, rest = metric.partition(".")
    if kind == "component_gb" and rest not in COMPONENTS:
        raise ValueError(f"metric: {metric} names no component of a peak: {', '.join(COMPONENTS)}")
    known = {f"{name}.{quantity}" for name in (*get_args(StrategyName), "combined") for quantity in QUANTITIES}
    if kind == "effect" and rest not in known:
        raise ValueError(f"metric: {metric} is not effect.<strategy>.<{'|'.join(QUANTITIES)}>")


def _check_ends(key: str, ends: Range | None) -> None:
    """Raise ValueError for a range without ends, or with the higher end first."""
    if ends == (None, None):
        raise ValueError(f"{key}: both ends are open; give one of them a number")
    low, high = ends or (None, None)
    if low is not None and high is not None and low > high:
        raise ValueError(f"{key}: {low:g} is above {high:g}; write the lower end first")


class Figure(Section):
    """A published figure or a target of our own, with the metric that it is compared with.

    A published figure is a number (`value`) or a `range`, whose open ends are null. It names its `guide`; a figure
    without one is a target of our own. `tolerance` is a number in the figure's unit or a percentage ("10%"); `about`
    stands for 10 %. Without either, a number is exact to its last digit and a range to its ends.
    """

    documented_in: ClassVar[str] = "docs/metrics.md"
    name: str
    stage: StageName | Literal["all"]
    guide: str | None = None
    # Key in the stage's summary metrics, or a cost that rlhf/run/comparisons.py or rlhf/plan/published_figures.py
    # adds.
    metric: str | None = None
    not_comparable: str | None = None  # the reason; a metric beside it is shown and not compared
    value: Finite | None = None
    range: Annotated[tuple[Finite | None, Finite | None] | None, AsTuple] = None
    range_of_mean: Annotated[tuple[Finite | None, Finite | None] | None, AsTuple] = None  # over several seeds; targets
    tolerance: float | str | None = None
    about: bool = False
    better: Literal["less", "more", "neither"] | None = None  # null: by the metric, see `direction`
    expected: Finite | None = None  # a worse value that the recipe's settings lead to; up to 10 % beyond is explained
    explained: str | None = None  # the reason for it
    unit: str
    source: str

    @model_validator(mode="after")
    def _check_figure(self) -> Self:
        """Raise ValueError for keys that a figure cannot have together."""
        if self.metric is None and self.not_comparable is None:
            raise ValueError("a figure has a metric that it is compared with, or a reason: not_comparable")
        _check_metric(self.metric or "")
        if (self.value is None) == (self.range is None):
            raise ValueError("a figure has either a value (one number) or a range [low, high]")
        _check_ends("range", self.range)
        _check_ends("range_of_mean", self.range_of_mean)
        if self.range and self.range[0] == self.range[1]:
            raise ValueError(f"range: both ends are {self.range[0]:g}; write value: {self.range[0]:g}")
        if self.guide is None and (self.range is None or self.tolerance is not None or self.about or self.better):
            raise ValueError("a target of our own (a figure without guide) is a range, without tolerance or direction")
        if self.guide is not None and self.range_of_mean:
            raise ValueError(
                "range_of_mean is for targets of our own, which have no guide: remove range_of_mean or guide"
            )
        if self.guide is not None and not self.source.startswith(f"{self.guide} > "):
            raise ValueError(f"source: begins with the guide's name, '{self.guide} > heading > place'")
        if self.about and self.tolerance is not None:
            raise ValueError("about is a tolerance of 10 %; leave out one of the two")
        if isinstance(self.tolerance, str) and not re.fullmatch(r"[0-9]+(\.[0-9]+)? ?%", self.tolerance):
            raise ValueError(f"tolerance: {self.tolerance} is neither a number nor a percentage such as 10%")
        if isinstance(self.tolerance, float | int) and not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance: {self.tolerance} must be 0 or more, and finite")
        return self

    @model_validator(mode="after")
    def _check_expected(self) -> Self:
        """Raise ValueError for an expected value without its reason, or one that needs none."""
        if (self.expected is None) != (self.explained is None):
            raise ValueError("expected, a worse value, and explained, the reason for it, go together")
        if self.expected is not None:
            high = self.accepted[1]
            if high is None or self.expected <= high or self.guide is None or not is_cost(self.metric):
                raise ValueError("expected is a value worse than a published cost: leave out expected and explained")
        return self

    def text(self, in_full: bool = False) -> str:
        """Return the range in words: `about 61 GB`, `≤ 5`, `18 – 24 GB`; `in_full` adds every unit."""
        text = ("about " if self.about else "") + span(*self.printed)
        return f"{text} {self.unit}" if in_full or self.unit in ("GB", "hours", "USD") else text

    @property
    def printed(self) -> Range:
        """Return the figure's ends as they are published; a single number is both."""
        return self.range or (self.value, self.value)

    @property
    def accepted(self) -> Range:
        """Return the ends widened by the tolerance; a value within them reproduces the figure."""
        low, high = self.printed
        return None if low is None else self._shifted(low, -1), None if high is None else self._shifted(high, 1)

    @property
    def direction(self) -> Literal["less", "more", "neither"]:
        """Return which way is better: less for a cost, more for a gain, neither for other metrics."""
        if self.better:
            return self.better
        metric = self.metric or ""
        if metric in LESS or metric.startswith(("component_gb.", "effect.")):
            return "less"
        return "more" if metric in MORE else "neither"

    @property
    def title(self) -> str:
        """Return the name, with the heading under which the guide has the figure."""
        return f"{self.name} ({self.source.split(' > ')[1]})" if self.guide else self.name

    def _shifted(self, end: float, sign: int) -> float:
        """Return an end moved outwards by the tolerance, computed in decimals: 2.5 − 0.05 is exactly 2.45."""
        exact = Decimal(repr(end))
        tolerance = ABOUT if self.about else self.tolerance
        if isinstance(tolerance, str):
            margin = abs(exact) * Decimal(tolerance.rstrip("% ")) / 100
        elif tolerance is not None:
            margin = Decimal(repr(tolerance))
        elif self.range is None:  # half a unit of the last digit; a whole number is exact to one
            digits = exact.as_tuple().exponent
            assert isinstance(digits, int)  # a string only for NaN and infinity
            margin = Decimal(5).scaleb((0 if end == int(end) else digits) - 1)
        else:
            margin = Decimal(0)
        return float(exact + sign * margin)


class Verdict(NamedTuple):
    """The outcome of comparing a value with a figure, with their distance or the reason for no comparison."""

    word: VerdictWord
    detail: str = ""

    def __str__(self) -> str:
        if not self.detail:
            return self.word
        return f"{self.word}: {self.detail}" if self.word == NOT_COMPARED else self.with_distance

    @property
    def with_distance(self) -> str:
        """Return the outcome with the distance in brackets."""
        return f"{self.word} ({self.detail})"


def verdict_of(figure: Figure, value: float | None, ends: tuple[float, float] | None = None) -> Verdict:
    """Compare a value with a figure, both in the figure's unit. None, NaN and infinity count as not measured.

    A projected value has `ends`, the range in which it is expected. A range that reaches the figure overlaps it where
    the value itself would have missed it.

    A value within the tolerance has met the figure. One beyond it on the better side is better than a published figure,
    and has met a target of our own. Any other has missed it; but a worse cost that the figure expects, or one at most
    10 % above it, is explained.
    """
    if figure.not_comparable is not None:
        return Verdict(NOT_COMPARED, figure.not_comparable)
    if value is None or not math.isfinite(value):
        return Verdict(NOT_COMPARED, why_not_measured(figure.metric or "") or NOT_MEASURED)
    word = _word(figure, *(ends or (value, value)))
    if word == MET and _word(figure, value, value) == MISSED:
        word = OVERLAPS
    if word == MISSED and figure.expected is not None and value <= figure.expected * EXPLAINED_UP_TO:
        return Verdict(EXPLAINED, f"{distance(figure, value)}; {figure.explained}")
    return Verdict(word, distance(figure, value))


def _word(figure: Figure, least: float, most: float) -> VerdictWord:
    """Return the verdict on a value that lies somewhere from `least` to `most`: met if any of it is accepted."""
    low, high = figure.accepted
    below, above = low is not None and most < low, high is not None and least > high
    if not below and not above:
        return MET
    is_better = figure.direction == ("less" if below else "more")
    return MISSED if not is_better else BETTER if figure.guide else MET


def distance(figure: Figure, value: float) -> str:
    """Return how far a value is from the figure as printed, with its sign: "-4.9 %"; "" inside a range.

    Shares and percentages are compared in points, everything else relative to the nearest printed end.
    """
    low, high = figure.printed
    end = low if low is not None and value < low else high if high is not None and value > high else figure.value
    if end is None:
        return ""
    if figure.unit in ("fraction", "percent") or not end:
        points = (value - end) * (100 if figure.unit == "fraction" else 1)
        return f"{points:+.3g} points" if figure.unit in ("fraction", "percent") else f"{points:+.3g}"
    percent = 100 * (value - end) / abs(end)
    return f"{percent:+.1f} %" if abs(percent) < 100 else f"{percent:+,.0f} %"


def why_not_measured(metric: str) -> str:
    """Return why no run produces a metric; "" where a run can."""
    return next((reason for prefix, reason in ELSEWHERE.items() if metric.startswith(prefix)), "")


def is_cost(metric: str | None) -> bool:
    """Return whether a metric is a cost: memory, time, money or size.

    Costs of random weights are comparable with those of trained ones.
    """
    return metric is not None and (metric in COSTS or metric.startswith("component_gb."))


def best(words: Iterable[VerdictWord]) -> VerdictWord | None:
    """Return the most favourable of several verdicts on one value; None without any.

    A guide may publish several figures for one quantity that disagree: 45 and 61 GB for one stage. A value that meets
    one of them is therefore good, and only a value worse than all of them has missed.
    """
    return min(words, key=(MET, BETTER, OVERLAPS, EXPLAINED, NOT_COMPARED, MISSED).index, default=None)


def count(verdicts: Iterable[Verdict], noun: str = "") -> str:
    """Return verdicts in words: "2 of 3 met", "2 of 3 targets met", "2 of 3 met, 1 of 3 better".

    What was not compared is no part of a whole: "6 met, 1 not measured". 6 of 7 would sound like a figure missed.
    """
    every = list(verdicts)
    judged = [verdict for verdict in every if verdict.word != NOT_COMPARED] or every
    words = [verdict.word for verdict in judged]
    kinds: Iterable[VerdictWord] = [MET] if MISSED in words and {*words} <= {MET, MISSED} else dict.fromkeys(words)
    whole = "" if judged != every and len({*words}) == 1 else f"of {len(words)}"
    texts = (f"{words.count(kind)} {whole} {noun} {kind}" for kind in kinds)
    return ", ".join(" ".join(text.split()) for text in texts) + (not_judged(every) if judged is not every else "")


def not_judged(verdicts: Iterable[Verdict]) -> str:
    """Return what follows a count of judged figures: `, 1 not measured`; "" where every figure was judged."""
    details = [verdict.detail for verdict in verdicts if verdict.word == NOT_COMPARED]
    word = NOT_MEASURED if {*details} == {NOT_MEASURED} else NOT_COMPARED
    return f", {len(details)} {word}" if details else ""
