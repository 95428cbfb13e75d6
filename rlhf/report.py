"""Finished and unfinished runs as one page that can be read without network: figures, curves, samples, provenance."""

import html
import itertools
import json
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf import ab, report_overview
from rlhf import recipe as recipes
from rlhf.data import formats
from rlhf.data.quality import check as quality
from rlhf.data.quality import spread
from rlhf.errors import UserError
from rlhf.files import write_json, write_output
from rlhf.observe import console
from rlhf.options import refuse_inputs
from rlhf.page import left_out, with_interval
from rlhf.page import section as _section
from rlhf.page import table as _table
from rlhf.page import text as _text
from rlhf.recipe import ONLINE, STAGES, default_root, published
from rlhf.recipe.published import DIFFERS, Figure, Verdict
from rlhf.report_overview import CURVES
from rlhf.run import reader, records
from rlhf.run.finished import data_file
from rlhf.run.provenance import code_version

TEMPLATE = Path(__file__).with_suffix(".html")
SAMPLES = 200  # shown at most
OPEN = 12  # of them at once, the others when they are asked for
COLOURS = ("#2f7ed8", "#d9822b", "#2e9d5b", "#b24fb5", "#7a8794", "#c23b3b", "#19a3a3", "#8c6d31")


class Recorded(NamedTuple):
    """What a run directory of one recipe version holds, by stage, and why a record of it could not be read."""

    name: str
    path: Path
    manifests: dict[str, dict[str, Any]]
    summaries: dict[str, dict[str, Any]]
    price: float | None = None  # dollars for an hour of one card
    problems: tuple[str, ...] = ()


def write(roots: Sequence[Path], file: Path, price: float | None = None) -> None:
    """Write the page of the run directories `<out>/<recipe>/<version>`. Raises UserError where one holds no run.

    `price`: dollars for an hour of one card.
    """
    runs = [load(root)._replace(price=price) for root in roots]
    if len({run.name for run in runs}) < len(runs):
        runs = [run._replace(name=str(run.path)) for run in runs]
    facts = [(run.path, manifest.get("data") or {}) for run in runs for manifest in run.manifests.values()]
    refuse_inputs(file, [data_file(root, entry["name"]) for root, data in facts for entry in data.get("files", ())])
    write_output(file, page(runs))


def load(root: Path) -> Recorded:
    """Read the records of a run. Raises UserError where there is none that can be read."""
    problems = []

    def of(name: str, kind: type[records.Record]) -> dict[str, dict[str, Any]]:
        found = {}
        for stage in STAGES:
            try:
                content = reader.read(root / stage / name, kind)
            except UserError as error:
                problems.append(str(error))
                continue
            if content is not None:
                found[stage] = content
        return found

    manifests, summaries = of("manifest.json", records.Manifest), of("summary.json", records.Summary)
    if not manifests:
        missing = f"{root}: no run there; it should hold folders named {', '.join(STAGES[:3])} …"
        raise UserError(problems[0] if problems else missing)
    known = {stage: summary for stage, summary in summaries.items() if stage in manifests}
    return Recorded("/".join(root.resolve().parts[-3:]), root, manifests, known, problems=tuple(problems))


def page(runs: Sequence[Recorded]) -> str:
    """The whole page; several runs share its charts."""
    charts = _Charts()
    first = next(iter(runs[0].manifests.values()))
    title = f"{first['recipe']} {first['version']}" + (f" and {len(runs) - 1} more" if len(runs) > 1 else "")
    drawn = (_curves, _frontier, _policies, _ratings, _reward_model, _time, _memory, _data)
    parts = [left_out(problem) for run in runs for problem in run.problems]
    parts += [_or_why(section, runs, charts) for section in (_verdicts, _findings, *drawn, _provenance, _samples)]
    parts = [_or_why(_overview, runs, charts), report_overview.contents("".join(parts)), *parts]
    from plotly.offline import get_plotlyjs  # megabytes; only a report needs it

    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        body="\n".join(part for part in parts if part),
        charts=json.dumps(charts.all, allow_nan=False).replace("<", "\\u003c"),
        library=get_plotlyjs(),
        colours=json.dumps(COLOURS),
    )


def _overview(runs: Sequence[Recorded], charts: "_Charts") -> str:
    """The outcome of each run in a sentence, what it was measured on, and its stages as a picture."""
    names = [run.name if len(runs) > 1 else "" for run in runs]
    return "".join(
        report_overview.section(run.manifests, run.summaries, name, run.price)
        for run, name in zip(runs, names, strict=True)
    )


def _or_why(
    section: Callable[[Sequence[Recorded], "_Charts"], str], runs: Sequence[Recorded], charts: "_Charts"
) -> str:
    """A part of the page, or why it is missing: a damaged file takes the part that reads it, and no other."""
    try:
        return section(runs, charts)
    except UserError as error:
        return left_out(f"{section.__name__.strip('_').replace('_', ' ')}: {error}")


class _Charts:
    """What the page's script draws; each gets a place of its own."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def add(self, title: str, data: list[dict[str, Any]], tall: bool = False, **layout: Any) -> str:
        name = f"chart-{len(self.all)}"
        heading = {"title": {"text": title, "font": {"size": 13}}}
        self.all.append({"id": name, "data": data, "layout": heading | layout})
        kind = "chart tall" if tall else "chart"
        return f'<div class="{kind}" id="{name}" role="img" aria-label="{html.escape(title)}"></div>'


def _verdicts(runs: Sequence[Recorded], charts: _Charts) -> str:
    rows = []
    for run in runs:
        for stage, summary in run.summaries.items():
            for entry in summary["targets"]:
                is_peak = entry.get("metric") == "peak_vram_gb"
                predicted = summary.get("predicted_peak_vram_bytes") if is_peak else None
                figure = published.recorded(entry)
                row = _compared(figure, entry["measured"], published.verdict_of(entry), predicted)
                rows.append((run.name, stage, *row))
        for figure, value, verdict in published.totals(run.summaries, run.price):
            rows.append((run.name, "all", *_compared(figure, value, verdict, None)))
    guided = any(entry.get("guide") for run in runs for s in run.summaries.values() for entry in s["targets"])
    asked = "published" if guided or any(row[1] == "all" for row in rows) else "target"
    columns = ("run", "stage", "figure", asked, "predicted", "measured", "verdict")
    title = "Published figures and what was measured" if asked == "published" else "Targets and what was measured"
    return _section(title, _table(columns, rows, runs, safe=(6,), numbers=(4, 5)))


def _compared(figure: Figure, value: float | None, verdict: Verdict, predicted: int | None) -> tuple[str, ...]:
    """Cells of a figure: name, what it says, predicted GB, measured, and the verdict as HTML."""
    expected = f"{predicted / published.GB:.2f}" if predicted else ""
    kind = {DIFFERS: "warn"} | dict.fromkeys(published.GOOD, "good") | dict.fromkeys(published.BAD, "bad")
    said = f'<span class="{kind.get(verdict.word, "")}">{_text(str(verdict))}</span>'
    return (figure.title, console.figure_text(figure, in_full=True), expected, console.number(value), said)


def _findings(runs: Sequence[Recorded], charts: _Charts) -> str:
    items = []
    for run in runs:
        for stage in run.manifests:
            for row in reader.read_lines(run.path / stage / "findings.jsonl", records.FindingLine):
                tries = ", ".join(f"{key}={value}" for key, value in row["remedies"].items())
                where = f"{run.name}, {stage}" if len(runs) > 1 else stage
                text = f"{where}, step {row['step']}: {row['seen']}. {row['cause']}."
                items.append(f"<li>{_text(text)}{f' Try <code>{_text(tries)}</code>.' if tries else ''}</li>")
    watched = all("findings" in summary for run in runs for summary in run.summaries.values())
    done = all(run.summaries.keys() == run.manifests.keys() for run in runs)
    nothing = f"No check found anything while it trained{'' if watched and done else '; not all was watched'}."
    said = f'<ul class="warn">{"".join(items)}</ul>' if items else f"<p>{nothing}</p>"
    return _section("What looked wrong while it trained", said)


def _curves(runs: Sequence[Recorded], charts: _Charts) -> str:
    sections = []
    for stage, curves in CURVES.items():
        drawn = []
        for key, title in curves:
            lines = []
            for number, run in enumerate(runs):
                rows = [row for row in _metrics(run, stage) if row.get(key) is not None]
                if rows:
                    lines.append(_line(run.name, [r["step"] for r in rows], [r[key] for r in rows], number, len(runs)))
            if lines:
                band = _timeline(runs[0], stage, key, max(line["x"][-1] for line in lines))
                drawn.append(charts.add(title, [*band, *lines], xaxis={"title": {"text": "step"}}))
        drawn += _memory_over_time(runs, stage, charts)
        if drawn:
            sections.append(_section(f"{stage}: curves", f'<div class="charts">{"".join(drawn)}</div>'))
    return "\n".join(sections)


def _metrics(run: Recorded, stage: str) -> list[dict[str, Any]]:
    return reader.read_lines(run.path / stage / "metrics.jsonl", records.MetricsLine)


def _line(name: str, x: list[Any], y: list[Any], number: int, count: int) -> dict[str, Any]:
    colour = COLOURS[number % len(COLOURS)]
    return {"x": x, "y": y, "name": name, "mode": "lines", "line": {"color": colour}, "showlegend": count > 1}


def _timeline(run: Recorded, stage: str, key: str, last: float) -> list[dict[str, Any]]:
    """The published course of a curve, from the range of its first value to that of its last; none without both."""
    ranges = {t.get("metric"): t["published"] for t in run.summaries.get(stage, {}).get("targets", [])}
    start, end = ranges.get(f"first.{key}"), ranges.get(f"last.{key}")
    if not start or not end or None in (*start, *end):
        return []
    first = 1 if stage in ONLINE else 0
    ends = {"x": [first, last, last, first], "y": [start[0], end[0], end[1], start[1]]}
    style = {"fill": "toself", "mode": "lines", "line": {"dash": "dot", "color": "#9a6700", "width": 1}}
    return [ends | style | {"name": "published", "fillcolor": "rgba(154,103,0,.15)", "showlegend": True}]


def _memory_over_time(runs: Sequence[Recorded], stage: str, charts: _Charts) -> list[str]:
    lines = []
    for number, run in enumerate(runs):
        lines_read = reader.read_lines(run.path / stage / "telemetry.jsonl", records.TelemetryLine)
        rows = [row for row in lines_read if row.get("memory_bytes") is not None]
        if rows:
            size = [row["memory_bytes"] / 1e9 for row in rows]
            lines.append(_line(run.name, [row["step"] for row in rows], size, number, len(runs)))
    if not lines:
        return []
    manifest = runs[0].manifests.get(stage)
    card = manifest["settings"].get("hardware", {}).get("memory_gb") if manifest else None
    on_card = manifest is not None and manifest["device"]["type"] == "cuda"
    measured = "peak of the GPU's memory" if on_card else "the process's memory"
    axes: dict[str, Any] = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"rangemode": "tozero"}}
    return [charts.add(f"{measured}, measured, GB", lines, shapes=[_level(card)] if card else [], **axes)]


def _level(y: float) -> dict[str, Any]:
    line = {"dash": "dot", "color": "#9a6700", "width": 1}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _frontier(runs: Sequence[Recorded], charts: _Charts) -> str:
    """Score against divergence of PPO's, RLOO's and GRPO's evaluations; the picked checkpoint is marked."""
    data: list[dict[str, Any]] = []
    known: list[dict[str, Any]] = []
    trained = [(run, stage) for run in runs for stage in ONLINE if _metrics(run, stage)]
    several = len({stage for _, stage in trained}) > 1
    for number, (run, stage) in enumerate(trained):
        rows = [r for r in _metrics(run, stage) if r.get("eval/score") is not None]
        if not rows:
            continue
        method = f", {report_overview.NAMES[stage]}" if several else ""
        x, y = [r.get("eval/kl_per_token") for r in rows], [r["eval/score"] for r in rows]
        colour = COLOURS[number % len(COLOURS)]
        steps = [f"step {r['step']}" for r in rows]
        mark = {"color": colour}
        data.append({"x": x, "y": y, "text": steps, "mode": "lines+markers", "name": run.name + method, "marker": mark})
        for key, name, dash in (("score", "score", "solid"), ("true_reward", "true reward", "dash")):
            gains = [row.get(f"eval/{key}_gain_sd") for row in rows]
            if rows[0].get("eval/true_reward_gain_sd") is not None:  # who knows no truth has no gap to show
                line = {"color": colour, "dash": dash}
                known.append({"x": [0, *x], "y": [0, *gains], "name": f"{name}{_of(run, runs)}{method}", "line": line})
        chosen = reader.read(run.path / stage / "checkpoints" / "best.json", records.BestCheckpoint)
        best = chosen["best_step"] if chosen else None
        for row in rows:
            if row["step"] == best:
                star = {"symbol": "star", "size": 16, "color": colour, "line": {"width": 1, "color": "#000"}}
                point = {
                    "x": [row.get("eval/kl_per_token")],
                    "y": [row["eval/score"]],
                    "mode": "markers",
                    "marker": star,
                }
                data.append(point | {"name": f"picked: step {best}"})
    if not data:
        return ""
    across = {"title": {"text": "KL to SFT, nats per token"}}
    axes: dict[str, Any] = {"xaxis": across, "yaxis": {"title": {"text": "score, held out"}}}
    methods = " and ".join(dict.fromkeys(report_overview.NAMES[stage] for _, stage in trained))
    drawn = charts.add(f"{methods}'s evaluations, in order", data, tall=True, **axes)
    if known:
        gain = axes | {"yaxis": {"title": {"text": "gain over SFT, standard deviations"}}}
        drawn += charts.add("what the reward model says, and what is true", known, tall=True, **gain)
    return _section("Score against divergence", drawn)


def _policies(runs: Sequence[Recorded], charts: _Charts) -> str:
    """Every policy on the same held-out prompts: the evaluation's numbers side by side, and where the scores lie."""
    parts = []
    for run in runs:
        metrics = run.summaries.get("evaluate", {}).get("metrics", {})
        names = [name.split("/", 1) for name in metrics if "/" in name and not name.startswith("rm/")]
        if not names:
            continue
        policies = list(dict.fromkeys(who for who, _ in names))
        rows = []
        whats = list(dict.fromkeys(what for _, what in names))
        for what in whats:
            if what.removesuffix("_low").removesuffix("_high") == what or what.rpartition("_")[0] not in whats:
                rows.append(
                    (run.name, what.replace("_", " "), *(with_interval(metrics, who, what) for who in policies))
                )
        numbers = tuple(range(2, 2 + len(policies)))
        parts.append(_table(("run", "metric", *policies), rows, runs, numbers=numbers))
        parts.append('<p class="note">docs/metrics.md explains every metric. Brackets: a 95 % interval.</p>')
        details = _details(run)
        if scores := details.get("scores"):
            middle = _middles(scores["edges"])
            lines = [
                _line(who, middle, counts, number, 2) | {"line": {"shape": "hvh", "color": COLOURS[number]}}
                for number, (who, counts) in enumerate(scores["counts"].items())
            ]
            axes = {"xaxis": {"title": {"text": "score"}}, "yaxis": {"title": {"text": "answers"}}}
            parts.append(charts.add(f"scores of every policy's answers{_of(run, runs)}", lines, tall=True, **axes))
    return _section("The policies on held-out prompts", "".join(parts))


def _details(run: Recorded) -> dict[str, Any]:
    return reader.read(run.path / "evaluate" / "details.json", records.Details) or {}


def _ratings(runs: Sequence[Recorded], charts: _Charts) -> str:
    """What people and models said of two policies' answers, blind."""
    rows = []
    for run in runs:
        for file in sorted((run.path / "ab").glob("*-vs-*.jsonl")):
            a, _, b = file.stem.partition("-vs-")
            try:
                found = ab.summary(ab.compare(run.path, a, b))
            except UserError as error:
                rows.append((run.name, f"{b} against {a}", f"not counted: {error}", "", "", "", ""))
                continue
            for rater, figures in [*found["raters"].items(), *found["groups"].items()]:
                rates = [figures["win_rate"], figures["length_controlled_win_rate"]]
                shown = [f"{r['value']:.0%} ({r['low']:.0%} to {r['high']:.0%})" if r else "" for r in rates]
                alpha = "" if figures["alpha"] is None else f"{figures['alpha']:.2f}"
                rows.append((run.name, f"{b} against {a}", rater, figures["pairs"], *shown, alpha))
    columns = ("run", "", "rater", "pairs", "win rate", "at equal length", "agreement (alpha)")
    return _section("Rated blind", _table(columns, rows, runs, numbers=(3, 4, 5, 6)))


def _reward_model(runs: Sequence[Recorded], charts: _Charts) -> str:
    """Whether the reward model can be believed: how sure it is, how often it is right, and what it contradicts."""
    drawn, said = [], []
    for run in runs:
        details = _details(run)
        found = details.get("reward_model")
        if not found:
            continue
        sure = [row["confidence"] for row in found["calibration"]]
        right = [row["accuracy"] for row in found["calibration"]]
        pairs = [f"{row['pairs']} pairs" for row in found["calibration"]]
        ideal = {
            "x": [0.5, 1],
            "y": [0.5, 1],
            "mode": "lines",
            "showlegend": False,
            "line": {"dash": "dot", "color": COLOURS[4]},
        }
        model = {
            "x": sure,
            "y": right,
            "text": pairs,
            "mode": "lines+markers",
            "showlegend": False,
            "line": {"color": COLOURS[0]},
        }
        axes: dict[str, Any] = {"xaxis": {"title": {"text": "confidence"}}, "yaxis": {"title": {"text": "accuracy"}}}
        drawn.append(charts.add(f"calibration (dotted: perfect){_of(run, runs)}", [ideal, model], **axes))
        for key, title in (("margins", "margin, chosen less rejected"), ("sigmoid_scores", "score after a sigmoid")):
            bars = {"type": "bar", "x": _middles(found[key]["edges"]), "y": found[key]["counts"], "showlegend": False}
            drawn.append(charts.add(f"{title}{_of(run, runs)}", [bars], bargap=0))
        for row in details.get("contradicted", []):
            cells = _dialogue(row)
            for who in ("chosen", "rejected"):
                cells += f'<div class="who">{who}</div><div class="said">{_text(row[who])}</div>'
            said.append(f'<div class="pair">{cells}<div class="who">margin {row["margin"]:.2f}</div></div>')
    if not drawn:
        return ""
    title = f"Held-out labels that it contradicts most: its mistakes, or the annotators' ({len(said)})"
    listed = f"<details><summary>{title}</summary>{''.join(said)}</details>"
    return _section("The reward model on held-out pairs", f'<div class="charts">{"".join(drawn)}</div>{listed}')


def _middles(edges: Sequence[float]) -> list[float]:
    return [(low + high) / 2 for low, high in itertools.pairwise(edges)]


def _of(run: Recorded, runs: Sequence[Recorded]) -> str:
    """The run's name in a title, where there are several."""
    return f": {run.name}" if len(runs) > 1 else ""


def _time(runs: Sequence[Recorded], charts: _Charts) -> str:
    """Seconds of each stage by its top phases."""
    names = [f"{run.name} {stage}" if len(runs) > 1 else stage for run in runs for stage in run.summaries]
    spent = [summary.get("phase_seconds", {}) for run in runs for summary in run.summaries.values()]
    phases = list(dict.fromkeys(phase for row in spent for phase in row if "/" not in phase))
    if not phases:
        return ""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [row.get(phase, 0) for row in spent],
            "name": phase,
            "marker": {"color": COLOURS[i % len(COLOURS)]},
        }
        for i, phase in enumerate(phases)
    ]
    axes = {"barmode": "stack", "xaxis": {"title": {"text": "seconds"}}, "yaxis": {"autorange": "reversed"}}
    return _section("Where the time went", charts.add("seconds by phase, measured", data, tall=True, **axes))


def _memory(runs: Sequence[Recorded], charts: _Charts) -> str:
    """Predicted components of every phase, as pinned beside the recipe, under the card's limit; measured peaks."""
    manifests = [manifest for run in runs for manifest in run.manifests.values()]
    manifest = manifests[0]
    folder = default_root() / manifest["recipe"] / manifest["version"]
    same = {found["recipe_sha256"] for found in manifests} == {manifest["recipe_sha256"]}
    unchanged = same and not any(m["overrides"] for m in manifests)
    pinned = reader.read(folder / "predicted.json", records.Prediction) if unchanged else None
    notes, drawn = "", ""
    if pinned and recipes.load(folder).sha256 == manifest["recipe_sha256"]:
        phases = {
            (stage, phase): parts
            for stage, found in pinned["stages"].items()
            for phase, parts in found.items()
            if phase and "/" not in phase and stage != "merge"  # which is done in the host's memory
        }
        seconds = [runs[0].summaries.get(s, {}).get("phase_seconds", {}).get(p) for s, p in phases]
        known = [spent for spent in seconds if spent]
        widths = [spent or 0.0 for spent in seconds] if len(known) == len(seconds) else [1.0] * len(seconds)
        starts = [sum(widths[:i]) for i in range(len(widths))]
        components = list(dict.fromkeys(name for parts in phases.values() for name in parts))
        data = [
            {
                "type": "bar",
                "x": [start + width / 2 for start, width in zip(starts, widths, strict=True)],
                "width": widths,
                "y": [parts.get(name, 0) / 1e9 for parts in phases.values()],
                "customdata": [f"{stage} {phase}" for stage, phase in phases],
                "hovertemplate": "%{customdata}: %{y:.2f} GB",
                "name": name,
                "marker": {"color": COLOURS[i % len(COLOURS)]},
            }
            for i, name in enumerate(components)
        ]
        card = manifest["settings"]["hardware"].get("memory_gb")
        ticks = {
            "tickvals": data[0]["x"],
            "ticktext": [f"{stage} {phase}" for stage, phase in phases],
            "tickangle": -45,
        }
        layout = {"barmode": "stack", "xaxis": ticks, "yaxis": {"title": {"text": "GB"}}}
        limit = {"shapes": [_level(card)] if card else []}
        drawn = charts.add("predicted peak of each phase by component, in order", data, tall=True, **layout, **limit)
        wide = "each as wide as the seconds it took" if len(known) == len(seconds) else "all equally wide"
        notes = f'<p class="note">Predicted, not measured; {wide}; the dotted line is the card.</p>'
    rows = []
    for run in runs:
        for stage, summary in run.summaries.items():
            vram, rss = summary.get("peak_vram_bytes"), summary.get("peak_rss_bytes")
            shown = [f"{size / 1e9:.2f}" if size else "-" for size in (vram, rss)]
            rows.append((run.name, stage, *shown))
    peaks = _table(("run", "stage", "peak VRAM, GB", "peak of the process, GB"), rows, runs, numbers=(2, 3))
    return _section("Memory", drawn + notes + peaks)


def _samples(runs: Sequence[Recorded], charts: _Charts) -> str:
    """Held-out prompts with every policy's answer, from the evaluation or, without one, a policy's last samples."""
    shown, total = [], 0
    for run in runs:
        files = [run.path / stage / "samples.jsonl" for stage in ("evaluate", *ONLINE)]
        rows = next((rows for file in files if (rows := reader.read_lines(file, records.SampleLine))), [])
        total += len(rows)
        for row in rows[-SAMPLES:]:
            answers = {key: value for key, value in row.items() if key not in ("step", "prompt", "sample", "messages")}
            cells = []
            for who, said in answers.items():
                found = said if isinstance(said, Mapping) else {"response": said}
                known = (("score", "score"), ("true_reward", "true reward"))
                worth = "".join(f", {name} {found[key]:.3f}" for key, name in known if found.get(key) is not None)
                text = _text(str(found.get("response", "")))
                cells.append(f'<div class="who">{_text(who + worth)}</div><div class="said">{text}</div>')
            shown.append(f'<div class="sample">{_dialogue(row)}{"".join(cells)}</div>')
    if not shown:
        return ""
    field = '<p class="screen"><input id="filter" placeholder="only samples with …" aria-label="filter samples"></p>'
    more = f" ({total} in all; the others are in samples.jsonl)" if total > len(shown) else ""
    count = f'<p class="note"><span id="shown">{len(shown)}</span> of {len(shown)} samples{more}</p>'
    folded = f'<details id="more"><summary>{len(shown) - OPEN} more</summary>{"".join(shown[OPEN:])}</details>'
    return _section("Samples", field + count + "".join(shown[:OPEN]) + (folded if shown[OPEN:] else ""))


def _dialogue(row: Mapping[str, Any]) -> str:
    """The prompt of a sample, turn by turn."""
    said = ab.turns(row)
    return "".join(f'<div class="who">{who}</div><div class="said prompt">{_text(text)}</div>' for who, text in said)


def _data(runs: Sequence[Recorded], charts: _Charts) -> str:
    """Signs of bad data in what the runs were trained on, and how long its texts are."""
    parts = []
    for run in runs:
        found = _checked(run)
        if isinstance(found, str):
            parts.append(f'<p class="note">{_text(f"{run.name}: {found}")}</p>')
        if not isinstance(found, dict):
            continue
        rows = []
        for line in found["table"]:
            mark = {"error": "bad", "warning": "warn"}.get(line["severity"], "")
            hint = f'<span class="{mark}">{_text(line["hint"])}</span>'
            if line["value"] != "0":
                rows.append((run.name, line["name"], line["value"], hint))
        parts.append(_table(("run", "sign", "found", "hint"), rows, runs, safe=(3,)))
        dropped = (next(iter(run.manifests.values())).get("data") or {}).get("dropped")
        if dropped:
            left = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in dropped.items())
            parts.append(f'<p class="note">Left out before training (data.drop): {_text(left)}.</p>')
        drawn = []
        for part, lengths in found["lengths"].items():
            ends = [f"≤ {end:,}" for end in lengths["upto"]]
            bars = {"type": "bar", "x": ends, "y": lengths["counts"], "showlegend": False}
            drawn.append(charts.add(f"{found['unit']} per {part}{_of(run, runs)}", [bars], bargap=0.05))
        parts.append(f'<div class="charts">{"".join(drawn)}</div>')
    return _section("Data quality", "".join(parts))


def _checked(run: Recorded) -> dict[str, Any] | str | None:
    """What a check of the run's data says, made once and kept beside it, or why there is none; None for stand-ins.

    Lengths are in tokens where the run has a tokenizer of its own, otherwise in words.
    """
    manifest = next((m for m in run.manifests.values() if m.get("data") and m["settings"].get("data")), None)
    if manifest is None or manifest["settings"]["data"]["source"] == "lengths":
        return None
    file, facts, settings = run.path / "data" / "quality.json", manifest["data"], manifest["settings"]
    tokenizer = run.path / "pretrain" / "model"
    count, unit = (spread.tokens(tokenizer), "tokens") if tokenizer.is_dir() else (spread.words, "words")
    split = {"seed": manifest["seed"], "fraction": settings["data"]["heldout_fraction"]}
    made_from = {"data": facts["sha256"], "unit": unit, "code": code_version()["commit"], **split}
    known = reader.read(file, records.Quality)
    if known and known["made_from"] == made_from:
        return known
    with console.working(f"{run.name}: checking its data"):
        try:
            rows = _rows(settings["data"], [str(data_file(run.path, entry["name"])) for entry in facts["files"]])
        except (UserError, OSError) as error:
            return f"its data cannot be checked any more: {error}"
        if [entry.sha256 for entry in rows.report.files] != [entry["sha256"] for entry in facts["files"]]:
            return "its data has changed since; what it was trained on cannot be checked any more"
        found = quality.check(rows, **split, count=count, unit=unit).to_dict() | {"made_from": made_from}
    try:
        file.parent.mkdir(exist_ok=True)
        write_json(file, found)
    except OSError:
        pass  # a page about a run that cannot be written to is checked anew each time
    return found


def _rows(data: Mapping[str, Any], files: list[str]) -> formats.Rows:
    """What a run read, read again."""
    if data["source"] == "hub":
        where = {"data_dir": data.get("data_dir"), "format": data.get("format", "auto")}
        return formats.read_hub(data["name"], data["revision"], on_bad_row="skip", **where)
    return formats.read(files, on_bad_row="skip", format=data.get("format", "auto"))


def _provenance(runs: Sequence[Recorded], charts: _Charts) -> str:
    rows = []
    for run in runs:
        for stage, manifest in run.manifests.items():
            data = manifest.get("data") or {}
            facts = {
                "recipe": f"{manifest['recipe']} {manifest['version']}, sha256 {manifest['recipe_sha256'][:12]}",
                "changed": ", ".join(f"{key}={value}" for key, value in manifest["overrides"].items()) or "nothing",
                "seed": manifest["seed"],
                "code": f"{manifest['code']['commit']}{' with changes' if manifest['code']['dirty'] else ''}",
                "device": manifest["device"]["name"],
                "data": f"{data.get('pairs', 0):,} pairs, {data.get('examples', 0):,} instructions, "
                f"{data.get('documents', 0):,} texts, sha256 {str(data.get('sha256'))[:12]}",
                "parents from": ", ".join(f"{k}: {v}" for k, v in manifest.get("parents_from", {}).items())
                or "this run",
                "packages": ", ".join(f"{name} {version}" for name, version in manifest["packages"].items()),
                "state": "done" if stage in run.summaries else "not finished",
            }
            rows.append((run.name, stage, "; ".join(f"{key}: {value}" for key, value in facts.items())))
    return _section("Provenance", _table(("run", "stage", "what it was made by"), rows, runs))
