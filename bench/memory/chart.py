"""The chart of docs/memory.md: predicted need by model size, both on logarithmic axes, with the cards as lines."""

import json
from math import log
from pathlib import Path

from bench.memory.sizes import CARD_MEMORY, CHARTED, MODEL_SIZES, SIZES_FILE, Sizes
from bench.svg import Axes, picture
from rlhf.terminal.wording import GB

SMALLEST, LARGEST = 1.0, 80.0  # billions of parameters
LEAST, MOST = 2.0, 100.0  # GB
COLOURS = {"sft": "#1f6feb", "rm": "#8250df", "ppo": "#cf222e", "dpo": "#1a7f37"}
WORDS = {"sft": "SFT", "rm": "reward model", "ppo": "PPO", "dpo": "DPO"}
TICKS = {float(size): str(size) for size in (1, 2, 4, 8, 16, 32, 64)}
AXES = Axes(
    *(640, 400, 58, 78, 16, 62),
    across=lambda billions: log(billions / SMALLEST) / log(LARGEST / SMALLEST),
    up=lambda gigabytes: log(gigabytes / LEAST) / log(MOST / LEAST),
)


def chart(predicted: Sizes) -> str:
    """Return the predicted need over model size as SVG, with a line for each stage and one for each card."""
    parts = AXES.grid(TICKS, {size: text for size, text in TICKS.items() if size >= LEAST})
    end = AXES.wide - AXES.right
    for card, mebibytes in CARD_MEMORY.items():
        at = AXES.y(mebibytes * 2**20 / GB)
        parts.append(f'<path d="M{AXES.left} {at:.1f}H{end}" stroke="#666" stroke-dasharray="5 4"/>')
        parts.append(f'<text x="{end + 6}" y="{at + 4:.1f}" fill="#444">{card} card</text>')
    for stage in CHARTED:
        needs = [predicted["needed"][size.name][stage] / GB for size in MODEL_SIZES]
        points = [*zip((size.billions for size in MODEL_SIZES), needs, strict=True)]
        parts.append(AXES.line(points, COLOURS[stage]))
        for size, point in zip(MODEL_SIZES, points, strict=True):
            parts.append(AXES.dot(point, COLOURS[stage], f"{size.name}, {WORDS[stage]}: {point[1]:.1f} GB"))
    parts += AXES.key({WORDS[stage]: COLOURS[stage] for stage in CHARTED}, end - 130, AXES.high - AXES.bottom - 66)
    note = "NF4 base, LoRA, 16 rows of 512 tokens; predicted, not measured"
    parts += AXES.titles("parameters of the model, billions", "GB of the card, predicted", note)
    return picture(AXES.wide, AXES.high, parts)


def write(root: Path, predicted: Sizes) -> None:
    """Write the predictions into sizes.json, and the chart into docs/."""
    SIZES_FILE.write_text(json.dumps(predicted, indent=1) + "\n", encoding="utf-8")
    (root / "docs" / "images" / "memory.svg").write_text(chart(predicted), encoding="utf-8")
