"""Published figures and targets of a recipe (`published.yaml`), and what is said of a value beside one.

A guide's figure is judged against the guide's settings alone: versions with other settings have none. docs/guides.md
explains the words.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from rlhf.recipe.bounds import Finite, NonNegative
from rlhf.recipe.stages import PPO, RM, SFT, StageName
from rlhf.recipe.strict import AsTuple, Section
from rlhf.terminal.wording import span

VerdictWord = Literal[
    "reproduced",  # a guide's figure, within its tolerance
    "met",  # a target of our own
    "below: the guide is too high",  # of a cost
    "below",
    "not compared",  # with the reason
    "not measured",
    "contradicts itself",  # the guide has another figure for the same, which the value reproduces
    "above",
    "missed",  # a target of our own
]
GOOD: tuple[VerdictWord, ...] = ("met", "reproduced")
BAD: tuple[VerdictWord, ...] = ("missed", "above")
OPEN: tuple[VerdictWord, ...] = ("not measured", "not compared")

ABOUT = "10%"  # the tolerance of a figure that is published as "about" or "~"
COSTS = ("peak_vram_gb", "hours", "cost_usd", "adapter_gb", "merged_model_gb", "base_model_gb")
TIMES = ("hours", "cost_usd")
LESS = (*COSTS, "perplexity", "perplexity_ratio", "last.loss", "accuracy_gap_points")
MORE = (
    *("accuracy", "last.accuracy", "preference_accuracy", "score_gain_sd", "true_reward_gain_sd"),
    *("win_rate_vs_sft", "win_rate_vs_base"),
)
Range = tuple[Finite | None, Finite | None]
Ends = Annotated[Range | None, AsTuple]


class Figure(Section):
    """A published figure or a target of our own, with the metric that it is compared with.

    A published figure is a number (`value`) or a `range`, whose open ends are null. It names its `guide`; a figure
    without one is a target of our own. `tolerance` is a number in the figure's unit or a percentage ("10%"); `about`
    stands for 10 %. Without either, a number is exact to its last digit and a range to its ends.
    """

    documented_in: ClassVar[str] = "docs/guides.md"
    name: str
    stage: StageName | Literal["all"]
    guide: str | None = None
    metric: str | None = None  # in the stage's summary, or a cost of rlhf/run/comparisons.py
    not_comparable: str | None = None  # the reason; a metric beside it is shown and not compared
    value: Finite | None = None
    range: Ends = None
    range_of_mean: Ends = None  # over several seeds; targets
    tolerance: NonNegative | Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)? ?%$")] | None = None
    about: bool = False
    unit: str
    source: str

    def problems(self) -> Iterator[str]:
        if self.metric is None and self.not_comparable is None:
            yield "a figure has a metric that it is compared with, or a reason: not_comparable"
        if (self.value is None) == (self.range is None):
            yield "a figure has either a value (one number) or a range [low, high]"
        if self.guide is None and self.range is None:
            yield "a target of our own (a figure without guide) is a range"
        if self.guide and not self.source.startswith(f"{self.guide} > "):
            yield "source: that of a guide's figure begins with the guide's name and >"

    def text(self) -> str:
        """Return the range in words: `about 61 GB`, `≤ 5 points`, `18 – 24 GB`."""
        return f"{'about ' if self.about else ''}{span(*self.printed)} {self.unit}"

    @property
    def printed(self) -> Range:
        """Return the figure's ends as they are published; a single number is both."""
        return self.range or (self.value, self.value)

    @property
    def accepted(self) -> tuple[float, float]:
        """Return the ends widened by the tolerance, infinite where open; a value within them reproduces the figure."""
        low, high = self.printed
        return (
            -math.inf if low is None else self._shifted(low, -1),
            math.inf if high is None else self._shifted(high, 1),
        )

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
    """What is said of a value beside a figure, with their distance or the reason for no comparison."""

    word: VerdictWord
    detail: str = ""

    def __str__(self) -> str:
        separator = ": {}" if self.word == "not compared" else " ({})"
        return f"{self.word}{separator.format(self.detail) if self.detail else ''}"


def verdict_of(figure: Figure, value: float | None, others: Sequence[Figure] = ()) -> Verdict:
    """Compare a value with a figure, both in the figure's unit. None, NaN and infinity count as not measured.

    `others` are the guide's figures for the same quantity: 45 and 61 GB for one stage. A value beyond an end of a
    target of our own has met it where that is the better side.
    """
    if figure.not_comparable is not None:
        return Verdict("not compared", figure.not_comparable)
    if value is None or not math.isfinite(value):
        return Verdict("not measured")
    side = _side(figure, value)
    better = figure.metric in (LESS if side < 0 else MORE)
    if figure.guide is None:
        return Verdict("met" if not side or better else "missed", distance(figure, value))
    if side and any(not _side(other, value) and _apart(figure, other) for other in others):
        return Verdict("contradicts itself", distance(figure, value))
    below: VerdictWord = "below: the guide is too high" if is_cost(figure.metric) else "below"
    return Verdict("above" if side > 0 else below if side < 0 else "reproduced", distance(figure, value))


def _side(figure: Figure, value: float) -> int:
    """Return whether a value is below (-1) or above (1) what a figure accepts; 0 within."""
    low, high = figure.accepted
    return -1 if value < low else int(value > high)


def _apart(a: Figure, b: Figure) -> bool:
    """Return whether no value is accepted by both figures."""
    return a.accepted[1] < b.accepted[0] or b.accepted[1] < a.accepted[0]


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


def is_cost(metric: str | None) -> bool:
    """Return whether a metric is memory, time, money or size, which random weights have as trained ones do."""
    return metric is not None and (metric in COSTS or metric.startswith("component_gb."))


def count(verdicts: Iterable[Verdict]) -> str:
    """Return verdicts in words: "2 of 3 met", "2 of 3 reproduced, 1 not measured"."""
    words = [verdict.word for verdict in verdicts]
    judged = [word for word in words if word not in OPEN] or words
    good = "met" if {"met", "missed"} & {*judged} else "reproduced"
    text = f"{sum(word in GOOD for word in judged)} of {len(judged)} {good}"
    left = len(words) - len(judged)
    return f"{text}, {left} not measured" if left else text


# -- figures of a whole run (`stage: all`) -----------------------------------------------------------------------------

CHAIN: tuple[StageName, ...] = (SFT, RM, PPO)  # the stages whose hours and cost a published total adds up


def compare_total(figure: Figure, stages: Mapping[str, Mapping[str, float | None]]) -> tuple[float | None, Verdict]:
    """Return the value and the verdict of a figure of all stages together; `stages` have what each took, by metric.

    Peak memory is the highest peak, of SFT, reward model and PPO, as the guides count; that of a target of our own is
    of every stage. Hours and dollars are sums over those three. While stages are missing the value is None, unless it
    already exceeds the accepted range: costs only grow.
    """
    if figure.metric is None or figure.not_comparable is not None:
        return None, verdict_of(figure, None)
    costs = {stage: cost for stage, took in stages.items() if (cost := took.get(figure.metric)) is not None}
    of_chain = [costs[stage] for stage in CHAIN if stage in costs]
    missing = [stage for stage in CHAIN if stage not in costs]
    if figure.metric == "peak_vram_gb":
        value = max(of_chain if figure.guide else costs.values(), default=None)
    else:
        value = sum(of_chain) if of_chain else None
    if missing and (value is None or value <= figure.accepted[1]):
        needed = "the price of an hour (--price)" if figure.metric == "cost_usd" and not costs else ", ".join(missing)
        return None, Verdict("not compared", f"needs {needed}")
    return value, verdict_of(figure, value)
