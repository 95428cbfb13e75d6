"""Line charts as SVG: what was learned, with intervals, and the curves of training."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.recipe.stages import POLICIES, STAGE_TABLE, StageName
from rlhf.report.records import TITLES, RunRecords
from rlhf.run.evidence import OF_EVALUATIONS, START_IN_WORDS, gain_of_stage, gains_over_start
from rlhf.terminal.wording import number

MARKED = 20  # points of a line up to which each is marked: one point has no line, and few ones look like more


class Tick(NamedTuple):
    """A mark at an axis: its place in per cent and its text."""

    place: float
    text: str


class Chart(NamedTuple):
    """A chart in a square of 100 × 100: paths of its line, its marks, the band of its interval and a level."""

    title: str
    line: str
    marks: str
    band: str
    level: float | None
    x: list[Tick]
    y: list[Tick]


class Point(NamedTuple):
    """A value after a step, with the ends of its interval if there is one."""

    step: float
    value: float
    ends: tuple[float, float] | None = None


def chart(title: str, points: Sequence[Point], level: float | None = None) -> Chart:
    """Return the chart of one or more points, with a dotted line across it at `level`."""
    heights = [y for p in points for y in (p.value, *(p.ends or ()))] + ([] if level is None else [level])
    x_ticks = _ticks(min(p.step for p in points), max(p.step for p in points))
    y_ticks = _ticks(min(heights), max(heights))
    low, high = y_ticks[0], y_ticks[-1]
    left, right = x_ticks[0], x_ticks[-1]

    def at(x: float, y: float) -> str:
        return f"{across(x):.2f} {down(y):.2f}"

    def across(x: float) -> float:
        return 100 * (x - left) / (right - left)

    def down(y: float) -> float:
        return 100 * (high - y) / (high - low)

    bounded = [(p.step, *p.ends) for p in points if p.ends]
    there, back = [at(x, top) for x, _, top in bounded], [at(x, bottom) for x, bottom, _ in reversed(bounded)]
    return Chart(
        title,
        line="M" + "L".join(at(p.step, p.value) for p in points),
        marks="".join(f"M{at(p.step, p.value)}h0" for p in points) if len(points) <= MARKED else "",
        band=f"M{'L'.join(there + back)}z" if bounded else "",
        level=None if level is None else down(level),
        x=[Tick(across(x), number(x)) for x in x_ticks],
        y=[Tick(down(y), number(y)) for y in y_ticks],
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return two to seven round numbers around and between `low` and `high`."""
    span = (high - low) or abs(low) or 1.0
    unit: float = 10.0 ** math.floor(math.log10(span / 2))
    step: float = next(size * unit for size in (1, 2, 5, 10) if span / (size * unit) <= 4)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [round(step * index, 12) for index in range(first, last + 1)]


def learned(run: RunRecords) -> list[Chart]:
    """Return for each policy its main metric on held-out prompts over its steps, with intervals and its start."""
    charts = []
    results = {gain.stage: gain for gain in gains_over_start(run.summaries)}
    for stage in (stage for stage in POLICIES if stage in run.manifests):
        gains = [
            (line.step, gain)
            for line in run.metrics(stage)
            if (gain := gain_of_stage(stage, line.values, OF_EVALUATIONS)) is not None
        ]
        if not gains and stage in results:
            rows = run.metrics(stage)
            gains = [(rows[-1].step if rows else 1, results[stage])]
        if gains:
            first = gains[0][1]
            points = [Point(0, first.start), *(Point(step, gain.end, gain.end_interval) for step, gain in gains)]
            bands = "; band: 95 %" if any(point.ends for point in points) else ""
            what = f"{first.name} of {TITLES[stage]} by step, on validation prompts"
            title = f"{what} (dotted: {START_IN_WORDS[first.origin]}{bands})"
            charts.append(chart(title, points, first.start))
    return charts


def training(run: RunRecords) -> list[tuple[str, list[Chart]]]:
    """Return the curves of each stage that has logged some, the last stage first, with the stage's title."""
    found = []
    for stage in (stage for stage in reversed(STAGE_TABLE) if stage in run.manifests):
        curves = [
            one for key, title, unit in STAGE_TABLE[stage].curves if (one := _curve(run, stage, key, title, unit))
        ]
        if curves:
            found.append((TITLES[stage], curves))
    return found


def _curve(run: RunRecords, stage: StageName, key: str, title: str, unit: str) -> Chart | None:
    """Return a curve of a stage's log; None if it has none of its values."""
    points = [Point(row.step, value) for row in run.metrics(stage) if (value := row.values.get(key)) is not None]
    return chart(title if title == unit else f"{title}, {unit}", points) if points else None
