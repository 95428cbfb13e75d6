"""README's table and picture of cpu-smollm2-sums: its answers before and after GRPO, from the newest record.

Beside a record PATH.json lie the logs of its runs as they were written, in the folder PATH: of each seed
`seed-N/metrics.jsonl` and `telemetry.jsonl` of GRPO, of seed 0 `samples.jsonl` of the evaluation too.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import paths
from bench.paths import ROOT
from bench.steps import telemetry
from bench.svg import Axes, picture
from rlhf.run import reader
from rlhf.run.layout import METRICS, SAMPLES
from rlhf.run.outcomes import Reproduction, SampleLine
from rlhf.run.records import MetricsLine

RECORDS = ROOT / "results" / "cpu-smollm2-sums" / "v1" / "cpu"
IMAGE = ROOT / "docs" / "images" / "sums.svg"
SHOWN = 3  # questions of the table: the first held-out ones
REWARD = "reward_numeric_answer"
COLOURS = ("#1f6feb", "#cf222e", "#1a7f37", "#8250df", "#9a6700")


def newest() -> Path:
    """Return the newest record; their names begin with the date."""
    return paths.newest(RECORDS)


def samples(file: Path) -> list[dict[str, Any]]:
    """Return the held-out questions of seed 0, each with the answers of `base` and `grpo` and their rewards."""
    return [line.plain() for line in reader.read_lines(file.with_suffix("") / "seed-0" / SAMPLES, SampleLine)]


def logged(file: Path) -> dict[str, list[MetricsLine]]:
    """Return what GRPO logged, by seed."""
    folders = sorted(file.with_suffix("").glob("seed-*"))
    return {folder.name.removeprefix("seed-"): reader.read_lines(folder / METRICS, MetricsLine) for folder in folders}


def cpu_minutes(file: Path, seed: str) -> float:
    """Return the CPU time of a seed's GRPO in minutes, from loading the model to the last step's evaluation."""
    rows = telemetry(file.with_suffix("") / f"seed-{seed}", ("cpu/total",))
    return sum(row["cpu/total"] for row in rows) / 60


def table() -> str:
    """Return the table: the first questions with both answers, then each seed's share of right answers and time."""
    file = newest()
    record = reader.read(file, Reproduction)
    assert record is not None
    rows = [("held-out question", "answer before", "answer after")]
    rows += [("---",) * 3]
    for row in samples(file)[:SHOWN]:
        rows.append((_question(row), _cell(row["base"]["response"]), _cell(row["grpo"]["response"])))
    for seed, stages in record.seeds.items():
        metrics = stages["evaluate"].metrics
        time = f"{cpu_minutes(file, seed):.1f} CPU minutes"
        rows.append((f"**right, seed {seed}** ({time})", _share(metrics, "base"), _share(metrics, "grpo")))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def _question(row: dict[str, Any]) -> str:
    """Return the question of a sample, without the sentence that all of them end with."""
    return _cell(row["messages"][-1]["content"].partition("?")[0] + "?")


def _cell(text: str) -> str:
    """Return a text as the cell of a table: on one line, with the signs of Markdown shown as they are."""
    return re.sub(r"([|*_<\\`$])", r"\\\1", " ".join(text.split()))


def _share(metrics: dict[str, Any], policy: str) -> str:
    """Return a policy's share of right answers with its 95 % interval."""
    value, low, high = (100 * metrics[f"{policy}/{REWARD}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.1f} % ({low:.1f} to {high:.1f})"


def chart() -> str:
    """Return the share of right answers over the steps as SVG: in training as lines, on held-out questions as dots."""
    logs = logged(newest())
    last = max(lines[-1].step for lines in logs.values())
    axes = Axes(640, 300, 58, 16, 14, 64, across=lambda step: step / last, up=lambda share: share)
    parts = axes.grid({n: str(n) for n in range(0, last + 1, 5)}, {n / 100: str(n) for n in range(0, 101, 20)})
    colours = dict(zip(logs, COLOURS, strict=False))
    for seed, lines in logs.items():
        training = [(line.step, float(line.values["objective/scores"] or 0.0)) for line in lines]
        parts.append(axes.line(training, colours[seed], opacity=0.6))
        parts += [axes.dot(point, colours[seed], f"step {point[0]}: {point[1]:.1%}") for point in held_out(lines)]
    parts += axes.key({f"seed {seed}": colour for seed, colour in colours.items()}, axes.left + 18, axes.top + 14)
    note = "lines: the 64 answers of a step; dots: answers to 64 held-out questions"
    parts += axes.titles("step of GRPO", "right answers, %", note)
    return picture(axes.wide, axes.high, parts)


def held_out(lines: Sequence[MetricsLine]) -> list[tuple[int, float]]:
    """Return the steps at which held-out questions were answered, and the share that was right: the base's at 0."""
    base = next(line.values[f"eval/{REWARD}_base"] for line in lines if f"eval/{REWARD}_base" in line.values)
    shares = [(0, base), *((line.step, line.values.get(f"eval/{REWARD}")) for line in lines)]
    return [(step, share) for step, share in shares if share is not None]
