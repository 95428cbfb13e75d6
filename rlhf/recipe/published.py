"""Published figures and targets of a recipe (`published.yaml`), and what is said of a value beside one.

A guide's figure is judged against the guide's settings alone: versions with other settings have none. docs/guides.md
explains the words.
"""

import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import model_validator

from rlhf.recipe.bounds import Finite
from rlhf.recipe.stages import StageName
from rlhf.recipe.strict import AsTuple, Section
from rlhf.terminal.wording import span

MET: Final = "met"  # a target of our own
MISSED: Final = "missed"
REPRODUCED: Final = "reproduced"  # a guide's figure, within its tolerance
BELOW: Final = "below"
TOO_HIGH: Final = "below: the guide is too high"  # of a cost
ABOVE: Final = "above"
CONTRADICTS: Final = "contradicts itself"  # the guide has another figure for the same, which the value reproduces
NOT_MEASURED: Final = "not measured"
NOT_COMPARED: Final = "not compared"  # with the reason
VerdictWord = Literal[
    "met",
    "missed",
    "reproduced",
    "below",
    "below: the guide is too high",
    "above",
    "contradicts itself",
    "not measured",
    "not compared",
]
GOOD: Final = (MET, REPRODUCED)
BAD: Final = (MISSED, ABOVE)
OPEN: Final = (NOT_MEASURED, NOT_COMPARED)

ABOUT = "10%"  # the tolerance of a figure that is published as "about" or "~"
COSTS = ("peak_vram_gb", "hours", "cost_usd", "adapter_gb", "merged_model_gb", "base_model_gb")
TIMES = ("hours", "cost_usd")
LESS = (*COSTS, "perplexity", "perplexity_ratio", "last.loss", "accuracy_gap_points")
MORE = (
    *("accuracy", "last.accuracy", "preference_accuracy", "score_gain_sd", "true_reward_gain_sd"),
    *("win_rate_vs_sft", "win_rate_vs_base"),
)
Range = tuple[float | None, float | None]
Ends = Annotated[tuple[Finite | None, Finite | None] | None, AsTuple]


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
    tolerance: float | str | None = None
    about: bool = False
    unit: str
    source: str

    @model_validator(mode="after")
    def _check_figure(self) -> Self:
        """Raise ValueError for keys that a figure cannot have together."""
        if self.metric is None and self.not_comparable is None:
            raise ValueError("a figure has a metric that it is compared with, or a reason: not_comparable")
        if (self.value is None) == (self.range is None):
            raise ValueError("a figure has either a value (one number) or a range [low, high]")
        for key, ends in (("range", self.range), ("range_of_mean", self.range_of_mean)):
            if ends and (ends == (None, None) or (None not in ends and ends[0] > ends[1])):  # type: ignore[operator]
                raise ValueError(f"{key}: {list(ends)} has no ends, or the lower one last")
        if self.guide is None and (self.range is None or self.tolerance is not None or self.about):
            raise ValueError("a target of our own (a figure without guide) is a range, without tolerance")
        if self.guide is not None and (self.range_of_mean or not self.source.startswith(f"{self.guide} > ")):
            raise ValueError(
                "a guide's figure has no range_of_mean, and its source begins with the guide's name and ' > '"
            )
        if self.about and self.tolerance is not None:
            raise ValueError("about is a tolerance of 10 %; leave out one of the two")
        if isinstance(self.tolerance, str) and not re.fullmatch(r"[0-9]+(\.[0-9]+)? ?%", self.tolerance):
            raise ValueError(f"tolerance: {self.tolerance} is neither a number nor a percentage such as 10%")
        if isinstance(self.tolerance, float | int) and not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance: {self.tolerance} must be 0 or more, and finite")
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
        separator = ": {}" if self.word == NOT_COMPARED else " ({})"
        return f"{self.word}{separator.format(self.detail) if self.detail else ''}"


def verdict_of(figure: Figure, value: float | None, others: Sequence[Figure] = ()) -> Verdict:
    """Compare a value with a figure, both in the figure's unit. None, NaN and infinity count as not measured.

    `others` are the guide's figures for the same quantity: 45 and 61 GB for one stage. A value beyond an end of a
    target of our own has met it where that is the better side.
    """
    if figure.not_comparable is not None:
        return Verdict(NOT_COMPARED, figure.not_comparable)
    if value is None or not math.isfinite(value):
        return Verdict(NOT_MEASURED)
    side = _side(figure, value)
    better = figure.metric in (LESS if side < 0 else MORE)
    if figure.guide is None:
        return Verdict(MET if not side or better else MISSED, distance(figure, value))
    if side and any(not _side(other, value) and _apart(figure, other) for other in others):
        return Verdict(CONTRADICTS, distance(figure, value))
    word: VerdictWord = ABOVE if side > 0 else TOO_HIGH if is_cost(figure.metric) else BELOW
    return Verdict(word if side else REPRODUCED, distance(figure, value))


def _side(figure: Figure, value: float) -> int:
    """Return whether a value is below (-1) or above (1) what a figure accepts; 0 within."""
    low, high = figure.accepted
    return -1 if low is not None and value < low else int(high is not None and value > high)


def _apart(a: Figure, b: Figure) -> bool:
    """Return whether no value is accepted by both figures."""
    (low, high), (other_low, other_high) = (
        (-math.inf if ends[0] is None else ends[0], math.inf if ends[1] is None else ends[1])
        for ends in (a.accepted, b.accepted)
    )
    return high < other_low or other_high < low


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


def best(words: Iterable[VerdictWord]) -> VerdictWord | None:
    """Return the most favourable of several verdicts on one value; None without any."""
    order = (REPRODUCED, MET, TOO_HIGH, BELOW, NOT_COMPARED, NOT_MEASURED, CONTRADICTS, ABOVE, MISSED)
    return min(words, key=order.index, default=None)


def count(verdicts: Iterable[Verdict], noun: str = "") -> str:
    """Return verdicts in words: "2 of 3 met", "2 of 3 targets met, 1 not measured"."""
    words = [verdict.word for verdict in verdicts]
    judged = [word for word in words if word not in OPEN] or words
    good = MET if MET in judged or MISSED in judged else REPRODUCED
    text = " ".join(f"{sum(word in GOOD for word in judged)} of {len(judged)} {noun} {good}".split())
    left = len(words) - len(judged)
    return f"{text}, {left} {NOT_MEASURED}" if left else text
