"""The chart of docs/memory.md: predicted need by model size, both on logarithmic axes, with the cards as lines."""

import json
from collections.abc import Mapping
from math import log
from pathlib import Path

from bench.memory.sizes import CARD_MEMORY, CHARTED, MODEL_SIZES, SIZES_FILE, Sizes
from bench.svg import picture
from rlhf.recipe import StageName
from rlhf.terminal.wording import GB

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 58, 78, 16, 62
SMALLEST, LARGEST = 1.0, 80.0  # billions of parameters
LEAST, MOST = 2.0, 100.0  # GB
COLOURS = {"sft": "#1f6feb", "rm": "#8250df", "ppo": "#cf222e", "dpo": "#1a7f37"}
WORDS = {"sft": "SFT", "rm": "reward model", "ppo": "PPO", "dpo": "DPO"}


def chart(predicted: Sizes) -> str:
    """Return the predicted need over model size as SVG, with a line for each stage and one for each card."""
    return picture(WIDE, HIGH, [*_grid(), *_lines(predicted["needed"]), *_legend()])


def _x(billions: float) -> float:
    """Return the place of a model's size across the chart."""
    return LEFT + log(billions / SMALLEST) / log(LARGEST / SMALLEST) * (WIDE - LEFT - RIGHT)


def _y(gigabytes: float) -> float:
    """Return the place of a need down the chart."""
    return HIGH - BOTTOM - log(gigabytes / LEAST) / log(MOST / LEAST) * (HIGH - BOTTOM - TOP)


def _grid() -> list[str]:
    """Return the ticks of both axes, and a dashed line for each card."""
    parts = []
    for tick in (1, 2, 4, 8, 16, 32, 64):
        parts.append(f'<path d="M{_x(tick):.1f} {TOP}V{HIGH - BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{_x(tick):.1f}" y="{HIGH - BOTTOM + 17}" text-anchor="middle">{tick}</text>')
    for tick in (2, 4, 8, 16, 32, 64):
        parts.append(f'<path d="M{LEFT} {_y(tick):.1f}H{WIDE - RIGHT}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{_y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for card, mebibytes in CARD_MEMORY.items():
        at = _y(mebibytes * 2**20 / GB)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDE - RIGHT}" stroke="#666" stroke-dasharray="5 4"/>')
        parts.append(f'<text x="{WIDE - RIGHT + 6}" y="{at + 4:.1f}" fill="#444">{card} card</text>')
    return parts


def _lines(needs: Mapping[str, Mapping[StageName, int]]) -> list[str]:
    """Return a line for each stage, with a dot for each model that names it and its need."""
    parts = []
    for stage in CHARTED:
        points = [(_x(size.billions), _y(needs[size.name][stage] / GB)) for size in MODEL_SIZES]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[stage]}" stroke-width="1.8"/>')
        for size, (a, b) in zip(MODEL_SIZES, points, strict=True):
            title = f"{size.name}, {WORDS[stage]}: {needs[size.name][stage] / GB:.1f} GB"
            parts.append(
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.2" fill="{COLOURS[stage]}"><title>{title}</title></circle>'
            )
    return parts


def _legend() -> list[str]:
    """Return the names of the lines and of the axes."""
    parts = []
    for at, stage in enumerate(CHARTED):
        across, down = WIDE - RIGHT - 140, HIGH - BOTTOM - 66 + 17 * at
        parts.append(
            f'<path d="M{across} {down - 4}h22" stroke="{COLOURS[stage]}" stroke-width="2"/>'
            f'<text x="{across + 28}" y="{down}">{WORDS[stage]}</text>'
        )
    middle = (LEFT + WIDE - RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{HIGH - 24}" text-anchor="middle">parameters of the model, billions</text>'
        f'<text x="{middle:.0f}" y="{HIGH - 7}" text-anchor="middle" fill="#666">'
        "NF4 base, LoRA, 16 rows of 512 tokens; predicted, not measured</text>"
        f'<text transform="translate(16 {(HIGH - BOTTOM + TOP) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        "GB of the card, predicted</text>"
    )
    return parts


def write(root: Path, predicted: Sizes) -> None:
    """Write the predictions into sizes.json, and the chart into docs/."""
    SIZES_FILE.write_text(json.dumps(predicted, indent=1) + "\n", encoding="utf-8")
    (root / "docs" / "images" / "memory.svg").write_text(chart(predicted), encoding="utf-8")
