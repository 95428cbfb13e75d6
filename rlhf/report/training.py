"""Sections about training: curves, score against KL, time and memory."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rlhf import recipe as recipes
from rlhf.plan import prediction_file as pins
from rlhf.recipe import StageName
from rlhf.recipe.folders import default_root
from rlhf.recipe.stages import ONLINE, STAGE_TABLE
from rlhf.report.parts import (
    LINE_COLOURS,
    STAGE_TITLES,
    Chart,
    Charts,
    Section,
    Table,
    Trace,
    level,
    line,
    sections_or_problem,
    table,
)
from rlhf.report.runs import RunRecords, metrics, suffix
from rlhf.run import reader, records
from rlhf.run.evidence import START_IN_WORDS, origin_of
from rlhf.run.layout import TELEMETRY
from rlhf.run.records import MetricsLine

EVALUATED_KL = "eval/kl_per_token"  # key of metrics.jsonl


def sections_of_curves(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the curves of each stage, the last one first; a damaged log costs the section of its stage."""
    by_stage = [
        sections_or_problem(f"{stage} curves", partial(_curves, stage, runs, charts), charts)
        for stage, row in reversed(STAGE_TABLE.items())
        if row.curves
    ]
    return list(itertools.chain.from_iterable(by_stage))


def _curves(stage: StageName, runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the section of a stage's curves; none if it has logged nothing."""
    stage_charts = []
    rows_of_runs = [metrics(run, stage) for run in runs]
    for key, title, unit in STAGE_TABLE[stage].curves:
        lines = []
        for number, (run, rows) in enumerate(zip(runs, rows_of_runs, strict=True)):
            points = [(row.step, row.values[key]) for row in rows if row.values.get(key) is not None]
            if points:
                steps, values = map(list, zip(*points, strict=True))
                lines.append(line(run.name, steps, values, number, len(runs)))
        if lines:
            band = _published_course(runs[0], stage, key, max(line_data["x"][-1] for line_data in lines))
            axes: Trace = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": unit}}}
            stage_charts.append(charts.add(title, [*band, *lines], **axes))
    return [Section(f"{stage}: curves", "charts.html", stage_charts)] if stage_charts else []


def _published_course(run: RunRecords, stage: StageName, key: str, last: float) -> list[Trace]:
    """Return the published course of a curve as a band, from its first range to its last; [] without ranges."""
    targets = run.summaries[stage].targets if stage in run.summaries else []
    ranges = {target.metric: target.published for target in targets}
    start, end = ranges.get(f"first.{key}"), ranges.get(f"last.{key}")
    if not start or not end or None in (*start, *end):
        return []
    first = 1 if stage in ONLINE else 0
    ends = {"x": [first, last, last, first], "y": [start[0], end[0], end[1], start[1]]}
    style = {"fill": "toself", "mode": "lines", "line": {"dash": "dot", "color": "#9a6700", "width": 1}}
    return [ends | style | {"name": "published", "fillcolor": "rgba(154,103,0,.15)", "showlegend": True}]


def _memory_over_time(runs: Sequence[RunRecords], charts: Charts) -> list[Chart]:
    """Draw the measured memory of each logged step, a line for each stage, over the share of its steps."""
    lines: list[Trace] = []
    for run, stage in itertools.product(runs, STAGE_TABLE):
        telemetry = reader.read_lines(run.run_directory / stage / TELEMETRY, records.TelemetryLine)
        points = [(row.step, row.memory_bytes / 1e9) for row in telemetry if row.memory_bytes is not None]
        if points:
            steps, sizes = map(list, zip(*points, strict=True))
            shares = [100 * step / max(steps[-1], 1) for step in steps]
            lines.append(line(STAGE_TITLES[stage] + suffix(run, runs), shares, sizes, len(lines), 2))
    if not lines:
        return []
    manifest = next(iter(runs[0].manifests.values()), None)
    card = manifest.settings.hardware.memory_gb if manifest else None
    on_card = manifest is not None and any(m.device.type == "cuda" for m in runs[0].manifests.values())
    measured = "peak of the GPU's memory" if on_card else "the process's memory"
    axes: Trace = {
        "xaxis": {"title": {"text": "per cent of the stage's steps"}},
        "yaxis": {"title": {"text": "GB"}, "rangemode": "tozero"},
    }
    shapes = [level(card)] if card else []
    return [charts.add(f"{measured}, measured", lines, shapes=shapes, **axes)]


# What judges beside the score: its key, its name, and how its line is drawn.
JUDGES = (("true_reward", "true reward", "dash"), ("second_score", "score of the second reward model", "dot"))


def sections_of_frontier(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return score against KL for the evaluations of PPO, RLOO and GRPO; the chosen checkpoint is marked."""
    scores: list[Trace] = []
    gains: list[Trace] = []
    trained = [(run, stage, rows) for run in runs for stage in ONLINE if (rows := metrics(run, stage))]
    several = len({stage for _, stage, _ in trained}) > 1
    for number, (run, stage, all_rows) in enumerate(trained):
        rows = [row for row in all_rows if row.values.get("eval/score") is not None]
        if rows:
            method = f", {STAGE_TITLES[stage]}" if several else ""
            colour = LINE_COLOURS[number % len(LINE_COLOURS)]
            scores += [_score_trace(rows, run.name + method, colour), *_chosen(run, stage, rows, colour)]
            gains += _gain_traces(rows, suffix(run, runs) + method, colour)
    if not scores:
        return []
    origins = {origin_of(row.values, "eval/") for _, _, rows in trained for row in rows if "eval/score" in row.values}
    start = " or ".join(title for origin, title in START_IN_WORDS.items() if origin in origins)
    kl_axis = {"title": {"text": f"KL to {start}, nats per token"}}
    axes: Trace = {"xaxis": kl_axis, "yaxis": {"title": {"text": "score, held out"}}}
    methods = " and ".join(dict.fromkeys(STAGE_TITLES[stage] for _, stage, _ in trained))
    frontier_charts = [charts.add(f"{methods}'s evaluations, in order", scores, tall=True, **axes)]
    if gains:
        gain = axes | {"yaxis": {"title": {"text": f"gain over {start}, standard deviations"}}}
        second = any("eval/second_score_gain_sd" in row.values for _, _, rows in trained for row in rows)
        title = "gains by both reward models" if second else "gain by the reward model, and true gain"
        frontier_charts.append(charts.add(title, gains, tall=True, **gain))
    return [Section("Score against divergence", "chart.html", frontier_charts)]


def _score_trace(rows: Sequence[MetricsLine], name: str, colour: str) -> Trace:
    """Return the scores of a stage's evaluations against their KL."""
    x, y = ([row.values.get(key) for row in rows] for key in (EVALUATED_KL, "eval/score"))
    trace = {"mode": "lines+markers", "name": name, "marker": {"color": colour}}
    return {"x": x, "y": y, "text": [f"step {row.step}" for row in rows]} | trace


def _chosen(run: RunRecords, stage: StageName, rows: Sequence[MetricsLine], colour: str) -> list[Trace]:
    """Return a star at the evaluation of the chosen checkpoint; none if no checkpoint was chosen."""
    record = reader.read(run.run_directory / stage / "checkpoints" / "best.json", records.BestCheckpoint)
    best = record.best_step if record else None
    points = [(row.values.get(EVALUATED_KL), row.values["eval/score"]) for row in rows if row.step == best]
    return [_star(x, y, f"picked: step {best}", colour) for x, y in points]


def _star(x: float | None, y: float | None, name: str, colour: str) -> Trace:
    """Return one marked point of a chart."""
    star = {"symbol": "star", "size": 16, "color": colour, "line": {"width": 1, "color": "#000"}}
    return {"x": [x], "y": [y], "mode": "markers", "marker": star, "name": name}


def _gain_traces(rows: Sequence[MetricsLine], ending: str, colour: str) -> list[Trace]:
    """Return gains in score, and in what else judges, against KL, from the start on; none where nothing else judges.

    A star marks the highest gain by the second reward model: where the score goes on rising after it, the policy has
    over-optimised the first.
    """
    judges = [judge for judge in JUDGES if rows[0].values.get(f"eval/{judge[0]}_gain_sd") is not None]
    if not judges:
        return []
    kl = [0, *(row.values.get(EVALUATED_KL) for row in rows)]
    traces: list[Trace] = []
    for key, name, dash in (("score", "score", "solid"), *judges):
        gains = [0, *(row.values.get(f"eval/{key}_gain_sd") for row in rows)]
        traces.append({"x": kl, "y": gains, "name": name + ending, "line": {"color": colour, "dash": dash}})
        if key == "second_score":
            steps = [0, *(row.step for row in rows)]
            at, _ = max(enumerate(gains), key=lambda point: -math.inf if point[1] is None else point[1])
            traces.append(_star(kl[at], gains[at], f"highest: step {steps[at]}", colour))
    return traces


def sections_of_time(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the seconds of each stage by its outermost phases."""
    names = [f"{run.name} {stage}" if len(runs) > 1 else stage for run in runs for stage in run.summaries]
    seconds_by_phase = [summary.phase_seconds for run in runs for summary in run.summaries.values()]
    phases = list(dict.fromkeys(phase for row in seconds_by_phase for phase in row if "/" not in phase))
    if not phases:
        return []
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [row.get(phase, 0) for row in seconds_by_phase],
            "name": phase,
            "marker": {"color": LINE_COLOURS[i % len(LINE_COLOURS)]},
        }
        for i, phase in enumerate(phases)
    ]
    axes = {"barmode": "stack", "xaxis": {"title": {"text": "seconds"}}, "yaxis": {"autorange": "reversed"}}
    chart = charts.add("seconds by phase, measured", data, tall=len(names) > 3, **axes)
    return [Section("Where the time went", "chart.html", [chart])]


class Memory(NamedTuple):
    """The predicted memory as a chart, and measured peaks. With `by_time` a bar is as wide as its phase's seconds."""

    predicted: Chart | None
    by_time: bool
    measured: list[Chart]
    peaks: Table | None


def sections_of_memory(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the predicted components of every phase, as pinned beside the recipe, and the measured peaks."""
    predicted, by_time = _predicted_memory(runs, charts)
    rows = []
    for run in runs:
        for stage, summary in run.summaries.items():
            vram, rss = summary.peak_vram_bytes, summary.peak_rss_bytes
            rows.append((run.name, stage, *(f"{size / 1e9:.2f}" if size else "-" for size in (vram, rss))))
    columns = ("run", "stage", "peak VRAM, GB", "peak of the process, GB")
    peaks = table(columns, rows, len(runs) > 1, numbers=(2, 3))
    memory = Memory(predicted, by_time, _memory_over_time(runs, charts), peaks)
    return [Section("Memory", "memory.html", memory)] if predicted or memory.measured or peaks else []


def _predicted_memory(runs: Sequence[RunRecords], charts: Charts) -> tuple[Chart | None, bool]:
    """Draw the pinned prediction of an unchanged recipe, and return whether its bars are as wide as their time."""
    manifests = [manifest for run in runs for manifest in run.manifests.values()]
    manifest = manifests[0]
    folder: Path = default_root() / manifest.recipe / manifest.version
    same_recipe = {m.recipe_sha256 for m in manifests} == {manifest.recipe_sha256}
    unchanged = same_recipe and not any(m.overrides for m in manifests)
    pinned = reader.read(folder / pins.PREDICTION_FILE, pins.Pinned) if unchanged else None
    if not pinned or recipes.load(folder).sha256 != manifest.recipe_sha256:
        return None, False
    phases = {
        (stage, phase): components
        for stage, stage_phases in pinned.stages.items()
        for phase, components in stage_phases.items()
        if phase and "/" not in phase and not STAGE_TABLE[stage].on_host
    }
    if not phases:
        return None, False
    labels = [f"{stage} {phase}" for stage, phase in phases]
    summaries = runs[0].summaries
    seconds = [summaries[stage].phase_seconds.get(p, 0.0) if stage in summaries else 0.0 for stage, p in phases]
    by_time = all(seconds)
    widths = seconds if by_time else [1.0] * len(seconds)
    starts = [sum(widths[:i]) for i in range(len(widths))]
    centres = [start + width / 2 for start, width in zip(starts, widths, strict=True)]
    data = [
        {
            "type": "bar",
            "x": centres,
            "width": widths,
            "y": [components.get(name, 0) / 1e9 for components in phases.values()],
            "customdata": labels,
            "hovertemplate": "%{customdata}: %{y:.2f} GB",
            "name": name,
            "marker": {"color": LINE_COLOURS[i % len(LINE_COLOURS)]},
        }
        for i, name in enumerate(dict.fromkeys(name for components in phases.values() for name in components))
    ]
    card = manifest.settings.hardware.memory_gb
    ticks = {"tickvals": centres, "ticktext": labels, "tickangle": -45}
    layout: Trace = {"barmode": "stack", "xaxis": ticks, "yaxis": {"title": {"text": "GB"}}}
    title = "predicted peak of each phase by component, in order"
    return charts.add(title, data, tall=True, shapes=[level(card)] if card else [], **layout), by_time
