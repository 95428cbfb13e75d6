"""What stages measured, beside what was predicted of them and the published figures of their recipe."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.chain import comparable
from rlhf.recipe.published import TIMES, Figure, compare_total
from rlhf.run import reader, records
from rlhf.run.layout import ADAPTER, METRICS, MODEL
from rlhf.terminal.wording import GB


def figures(loaded: PinnedRecipe, stage: StageName | Literal["all"], device: str) -> list[Figure]:
    """Return the figures of a stage with which a run of the recipe can be compared.

    `device` is the card's name: a guide's hours are those of the guide's card.
    """
    other_card = re.sub(r"^\d+x", "", loaded.recipe.hardware.name) not in device.lower()
    return [
        figure
        for figure in loaded.figures
        if figure.stage == stage
        and comparable(figure, loaded.recipe, loaded.overrides)
        and not (figure.guide and figure.metric in TIMES and other_card)
    ]


def comparable_values(
    path: Path, metrics: Mapping[str, float], costs: records.Costs, seconds: float
) -> dict[str, float]:
    """Return the values that a figure may name: results, costs in its units, sizes, ends of the log.

    `path` is the stage's directory, `seconds` the time that the stage took.
    """
    values = {**metrics, "hours": seconds / 3600}
    if peak := costs["peak_vram_bytes"]:
        values["peak_vram_gb"] = peak / GB
    for component, size in (costs["component_bytes"] or {}).items():
        values[f"component_gb.{component}"] = size / GB
    if "base_bytes" in metrics:
        values["base_model_gb"] = metrics["base_bytes"] / GB
    for folder, name in ((ADAPTER, "adapter_gb"), (MODEL, "merged_model_gb")):
        sizes = [file.stat().st_size for file in (path / folder).glob("*.safetensors")]
        if sizes:
            values[name] = sum(sizes) / GB
    for row in reader.read_lines(path / METRICS, records.MetricsLine):
        for key, value in row.values.items():
            if value is not None:
                values.setdefault(f"first.{key}", value)
                values[f"last.{key}"] = value
    return values


def totals(summaries: Mapping[str, records.Summary], price: float | None = None) -> list[records.Compared]:
    """Compare the figures of all stages together with one run's finished stages, which `summaries` has by name.

    `price` is in dollars per hour of one card.
    """
    figures = next((summary.all_stages for summary in reversed([*summaries.values()]) if summary.all_stages), [])
    spent = {stage: summary.spent(price) for stage, summary in summaries.items()}
    return [records.Compared(figure, *compare_total(figure, spent)) for figure in figures]


class Cost(NamedTuple):
    """What a stage took, as text, beside what was predicted and what a guide published; "" for what is not known."""

    name: str
    measured: str
    predicted: str
    published: str


def costs(summary: records.Summary) -> list[Cost]:
    """Return the peak of the card, the time and the speed of a finished stage, and the memory of its process."""
    texts = {target.figure.metric: target.figure.text() for target in summary.figures}
    peak, predicted = summary.peak_vram_bytes, summary.predicted_peak_vram_bytes
    seconds, hours, speed = summary.wall_seconds, summary.projected_hours, summary.tokens_per_second
    found = [
        Cost("peak VRAM", _gb(peak), _gb(predicted), texts.get("peak_vram_gb", "")),
        Cost("time", _time(seconds), "" if hours is None else _time(3600 * hours), texts.get("hours", "")),
        Cost("tokens per second", f"{speed:,.0f}" if speed else "", "", texts.get("tokens_per_second", "")),
        Cost("memory of the process", _gb(summary.peak_rss_bytes), "", ""),
    ]
    return [cost for cost in found if any(cost[1:])]


def _gb(size: float | None) -> str:
    return f"{size / GB:.2f} GB" if size else ""


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.2f} hours" if seconds >= 3600 else f"{seconds:.0f} s"
