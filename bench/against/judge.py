"""What changed between two sides: ratios with intervals, and which of them are worse than is allowed.

A count is exact, and its ratio has no interval. Seconds are measured in pairs, one side right after the other. The
interval is that of the median of the pairs' ratios, widened to the ratio of both sides' least seconds: what else the
machine does only ever adds to seconds, so that the least of several are the nearest to what the code needs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from bench.against.sides import Cost, Predicted
from bench.steps import growth
from rlhf.recipe import StageName

CPU, WALL, RATE, PEAK, HELD, CARD_PEAK, PROCESS = (
    *("CPU s", "wall s", "s per token", "peak memory", "held memory", "peak of the card", "process so far"),
)
COUNTED = {"flops": "operations", "moved": "bytes moved", "launched": "launches", "reads": "host reads"}
PREDICTED = {"flops": "operations", "moved": "bytes moved", "launched": "launches", "peak_bytes": PEAK}
MEMORY = (PEAK, HELD, CARD_PEAK)
REST = "the rest"  # of a stage: reading and encoding rows, starting, writing
MATERIAL = 0.01  # share of the whole stage's below which a change of a phase is not judged
SHORTEST = 0.2  # seconds of a phase below which its time is not judged
GROWTH = 0.001  # share of the held bytes by which they may grow in a step
OUTSIDE = 0.11  # at most, the probability that a median lies beyond one end: one of six pairs may be an outlier


class Bounds(NamedTuple):
    """The shares by which a figure may be worse, and whether only gross losses count."""

    slower: float = 0.05  # seconds, and what is computed, moved, launched and read
    larger: float = 0.02  # bytes
    gross: bool = False  # a host's single read is none

    def of(self, what: str) -> float | None:
        """Return the bound of a figure; None for one that is shown and never judged."""
        if what in (WALL, RATE, PROCESS) or (self.gross and what == COUNTED["reads"]):
            return None
        return self.larger if what in MEMORY else self.slower


@dataclass(frozen=True)
class Change:
    """A figure of a phase on both sides. "" is the whole stage; a ratio above 1 is worse."""

    stage: str
    phase: str
    what: str
    old: float
    new: float
    low: float  # of the ratio
    high: float
    bound: float | None
    ratio: float
    share: float  # of the stage's figure, by which the phase's grew

    @property
    def place(self) -> str:
        """Return the stage and the phase."""
        return f"{self.stage}/{self.phase}" if self.phase else self.stage

    @property
    def worse(self) -> bool:
        """Return whether the ratio exceeds its bound, with the whole interval, and matters to the stage."""
        return self.bound is not None and self.low > 1 + self.bound and self.share >= MATERIAL

    def text(self) -> str:
        """Return the change as a sentence's end: how much, and from what to what."""
        interval = f" [{self.low - 1:+.1%}, {self.high - 1:+.1%}]" if self.low != self.high else ""
        return f"{self.what} {self.ratio - 1:+.1%}{interval}, {number(self.old)} to {number(self.new)}"


def number(value: float) -> str:
    """Return a number of any size with three digits."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def counted(stage: StageName, old: Cost, new: Cost, bounds: Bounds) -> Iterator[Change]:
    """Yield the changes of what a stage's phases compute, move, launch, read and hold."""
    whole = old["counts"][""]
    for phase, before in old["counts"].items():
        after = new["counts"].get(phase)
        if after is None:
            continue
        names = {**COUNTED, "peak_bytes": PEAK}
        for key, what in names.items():
            a, b, total = before[key], after[key], whole[key]  # type: ignore[literal-required]  # keys of Counts
            if what != PEAK or not old["card_peak_bytes"]:  # the card's allocator knows better
                yield exact(stage, phase, what, a, b, bounds, total)
    if old["held"] and new["held"]:
        before_last = old["held"][-1]
        change = exact(stage, "", HELD, before_last, new["held"][-1], bounds, before_last)
        kept = growth(new["held"]) - growth(old["held"]) > GROWTH * before_last  # in every step: that has no limit
        yield replace(change, bound=0.0, share=1.0) if kept and not bounds.gross else change


def exact(stage: str, phase: str, what: str, old: float, new: float, bounds: Bounds, whole: float) -> Change:
    """Return the change of a figure that is the same in every run; `whole` is the stage's, before."""
    ratio = new / old if old else 1.0 if not new else float("inf")
    share = (new - old) / whole if whole else ratio - 1
    return Change(stage, phase, what, old, new, ratio, ratio, bounds.of(what), ratio, share)


def predicted(
    recipe: str,
    old: Mapping[str, Mapping[str, Predicted]],
    new: Mapping[str, Mapping[str, Predicted]],
    bounds: Bounds,
) -> Iterator[Change]:
    """Yield the changes of what is predicted for a card's recipe, of the stages and phases that both sides have."""
    for stage, phases in old.items():
        for key, what in PREDICTED.items():
            whole = max(phase[key] for phase in phases.values())  # type: ignore[literal-required]  # keys of Predicted
            for name, before in phases.items():
                after = new.get(stage, {}).get(name)
                if after is not None:
                    a, b = before[key], after[key]  # type: ignore[literal-required]
                    yield exact(f"{recipe} {stage}", name, what, a, b, bounds, whole)


def timed(stage: StageName, pairs: Sequence[tuple[Cost, Cost]], bounds: Bounds) -> Iterator[Change]:
    """Yield the changes of a stage's seconds by phase, and of the memory that a card's allocator counted."""
    phases = [phase for phase in pairs[0][0]["seconds"] if all(phase in c["seconds"] for pair in pairs for c in pair)]
    whole = median(old["seconds"][""]["cpu"] for old, _ in pairs)
    for phase in phases:
        cpu = [(old["seconds"][phase]["cpu"], new["seconds"][phase]["cpu"]) for old, new in pairs]
        yield spread(stage, phase, CPU, cpu, bounds, whole)
        wall = [(old["seconds"][phase]["wall"], new["seconds"][phase]["wall"]) for old, new in pairs]
        yield spread(stage, phase, WALL, wall, bounds, whole)
    yield spread(stage, REST, CPU, [(rest(old), rest(new)) for old, new in pairs], bounds, whole)
    if all(cost["tokens"] for pair in pairs for cost in pair):
        rates = [tuple(cost["seconds"][""]["cpu"] / cost["tokens"] for cost in pair) for pair in pairs]
        yield spread(stage, "", RATE, [(a, b) for a, b in rates], bounds, whole)
    resident: list[tuple[float, float]] = [(old["peak_rss_bytes"], new["peak_rss_bytes"]) for old, new in pairs]
    yield spread(stage, "", PROCESS, resident, bounds, max(old for old, _ in resident))
    for phase in pairs[0][0]["card_peak_bytes"]:
        peaks = [(o["card_peak_bytes"][phase], n["card_peak_bytes"].get(phase, 0)) for o, n in pairs]
        yield spread(stage, phase, CARD_PEAK, peaks, bounds, max(old for old, _ in peaks))


def rest(cost: Cost) -> float:
    """Return the CPU seconds of a stage outside its phases."""
    return cost["seconds"][""]["cpu"] - sum(
        seconds["cpu"] for phase, seconds in cost["seconds"].items() if phase and "/" not in phase
    )


def spread(
    stage: str, phase: str, what: str, pairs: Sequence[tuple[float, float]], bounds: Bounds, whole: float
) -> Change:
    """Return the change of a figure that was measured in pairs of (old, new)."""
    ratios = sorted(new / old if old > 0 else 1.0 for old, new in pairs)
    dropped = extremes(len(ratios))
    olds, news = [old for old, _ in pairs], [new for _, new in pairs]
    least = min(news) / min(olds) if min(olds) > 0 else 1.0
    low, high = min(ratios[dropped], least), max(ratios[-1 - dropped], least)
    bound = bounds.of(what)
    if what == CPU and median(olds) < SHORTEST:
        bound = None
    share = (median(news) - median(olds)) / whole if whole else 0.0
    return Change(stage, phase, what, median(olds), median(news), low, high, bound, median(ratios), share)


def extremes(count: int) -> int:
    """Return how many of `count` measured values lie beyond each end of the interval of their median, 78 % or more.

    The interval goes from one value to another, so that nothing is assumed about how they are distributed: k or fewer
    of them lie below the true median with the probability of k or fewer heads in `count` throws. A few values have no
    other interval than from the least to the greatest.
    """
    beyond, below = -1, 0.0
    while below <= OUTSIDE:
        beyond += 1
        below += math.comb(count, beyond) / 2**count
    return max(0, beyond - 1)


def verdicts(changes: Sequence[Change]) -> list[str]:
    """Return a line for each stage that is worse: its largest change, and how many others there are."""
    lines = []
    for stage in dict.fromkeys(change.stage for change in changes):
        worse = [change for change in changes if change.stage == stage and change.worse]
        if worse:
            largest = max(worse, key=lambda change: (change.ratio, len(change.phase)))
            more = f" (and {len(worse) - 1} more)" if len(worse) > 1 else ""
            lines.append(f"{largest.place}: {largest.text()}{more}")
    return lines
