"""The first charts of the page: what was learned, on held-out prompts, beside the level of the start."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from rlhf.recipe import StageName
from rlhf.recipe.stages import POLICIES, RM, SFT
from rlhf.report.parts import LINE_COLOURS, STAGE_TITLES, Chart, Charts, Section, Trace, level, sections_or_problem
from rlhf.report.runs import RunRecords, metrics, suffix, trusted_summaries
from rlhf.run.evidence import OF_EVALUATIONS, START_IN_WORDS, Ends, Gain, gain_of_stage, gains_over_start, of_prompts


class Point(NamedTuple):
    """A figure after a step, with the ends of its interval if there is one."""

    step: int
    value: float
    interval: Ends | None


def sections_of_learned(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return a chart for each policy: its main metric over the steps, with 95 % intervals, and the level of its start.

    Where no policy was trained, the reward model's accuracy and SFT's loss stand for it.
    """
    made = [
        section
        for stage in POLICIES
        for section in sections_or_problem(f"{stage} learned", partial(_of_policy, stage, runs, charts), charts)
    ]
    return made or [Section("", "charts.html", _of_other_stages(runs, charts))]


def _of_policy(stage: StageName, runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Draw the evaluations of a policy while it trained, and its result at its end; a line for each run."""
    traces: list[Trace] = []
    starts: list[Gain] = []
    for number, run in enumerate(runs):
        rows = metrics(run, stage)
        logged = [(row.step, gain) for row in rows if (gain := gain_of_stage(stage, row.values, OF_EVALUATIONS))]
        result = next((gain for gain in gains_over_start(trusted_summaries(run)) if gain.stage == stage), None)
        gains = [gain for _, gain in logged] or ([result] if result else [])
        if not gains:
            continue
        starts.append(gains[-1])
        points = [Point(step, gain.end, gain.end_interval) for step, gain in logged]
        points = points or [Point(rows[-1].step if rows else 1, gains[-1].end, gains[-1].end_interval)]
        name = f"{STAGE_TITLES[stage]}{of_prompts(gains[-1].prompts)}{suffix(run, runs)}"
        traces += _curve([Point(0, gains[0].start, None), *points], name, number)
        if result and logged and result.end != logged[-1][1].end:
            label = f"result{of_prompts(result.prompts)}{suffix(run, runs)}"
            traces.append(_bars([Point(points[-1].step, result.end, result.end_interval)], label, number))
    if not traces:
        return []
    shown = starts[0]
    bounds = "; bands: 95 %" if any(gain.interval for gain in starts) else ""
    title = f"{shown.name}, {STAGE_TITLES[stage]} (dotted: {START_IN_WORDS[shown.origin]}{bounds})"
    levels = [level(gain.start) for gain in starts]
    axes: Trace = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": shown.name}}}
    return [Section("", "charts.html", [charts.add(title, traces, tall=True, shapes=levels, **axes)])]


def _curve(points: Sequence[Point], name: str, number: int) -> list[Trace]:
    """Return a line through points, and the band of their intervals."""
    colour = LINE_COLOURS[number % len(LINE_COLOURS)]
    steps, values = [point.step for point in points], [point.value for point in points]
    line: Trace = {"x": steps, "y": values, "name": name, "mode": "lines+markers", "line": {"color": colour}}
    bounded = [point for point in points if point.interval]
    if len(bounded) == 1:
        return [line, _bars(bounded, "95 %", number)]
    x = [point.step for point in bounded]
    lows, highs = ([point.interval[end] for point in bounded if point.interval] for end in (0, 1))
    band: Trace = {"x": [*x, *reversed(x)], "y": [*highs, *reversed(lows)], "fill": "toself", "mode": "lines"}
    band |= {"line": {"width": 0}, "fillcolor": colour + "33", "hoverinfo": "skip", "showlegend": False}
    return [band, line] if bounded else [line]


def _bars(points: Sequence[Point], name: str, number: int) -> Trace:
    """Return points with bars for their intervals."""
    colour = LINE_COLOURS[number % len(LINE_COLOURS)]
    ends = [point.interval or (point.value, point.value) for point in points]
    error = {
        "type": "data",
        "symmetric": False,
        "array": [high - point.value for point, (_, high) in zip(points, ends, strict=True)],
        "arrayminus": [point.value - low for point, (low, _) in zip(points, ends, strict=True)],
    }
    marker = {"color": colour, "size": 11, "symbol": "diamond"}
    of_points: Trace = {"x": [point.step for point in points], "y": [point.value for point in points]}
    return of_points | {"mode": "markers", "name": name, "marker": marker, "error_y": error}


def _of_other_stages(runs: Sequence[RunRecords], charts: Charts) -> list[Chart]:
    """Draw the accuracy of the reward model and the loss of SFT over their steps."""
    made = []
    drawn: tuple[tuple[StageName, str, str, float | None], ...] = (
        (RM, "accuracy", "reward model: accuracy in training, share of pairs (dotted: a guess)", 0.5),
        (SFT, "loss", "SFT: loss in training, nats per token", None),
    )
    for stage, key, title, chance in drawn:
        lines: list[Trace] = []
        for number, run in enumerate(runs):
            rows = [row for row in metrics(run, stage) if row.values.get(key) is not None]
            points = [Point(row.step, row.values[key] or 0.0, None) for row in rows]
            lines += _curve(points, STAGE_TITLES[stage] + suffix(run, runs), number) if points else []
        if lines:
            axes: Trace = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": key}}}
            made.append(charts.add(title, lines, tall=True, shapes=[level(chance)] if chance else [], **axes))
    return made
