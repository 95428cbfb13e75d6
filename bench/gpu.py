"""`python -m bench.gpu`: everything that a GPU can tell, most valuable first, within a time box.

Each item is a process of its own that writes its record into the output folder when it is done, so that a run that is
cut off loses only the item that was running. No network is needed: weights are random, dialogues stand-ins.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import click
import torch

from rlhf.cli import guarded

ROOT = Path(__file__).parents[1]
LEAST = 20.0  # seconds below which no further item is begun


class Item(NamedTuple):
    name: str
    arguments: tuple[str, ...]  # of python; OUT stands for the item's record


def items() -> list[Item]:
    """Correctness on CUDA; predicted against measured memory; then speed, recipe by recipe."""
    h100, card = "recipes/h100-mistral-7b", "recipes/4090-llama2-7b"
    found = [Item("correctness", ("-m", "pytest", "-q", "-rs", "tests/gpu", "tests/invariants/test_rollout.py"))]
    for recipe in (f"{card}/v1", f"{h100}/v1"):
        found.append(
            Item(f"memory of {recipe}", ("-m", "bench.memory", "measure", "--recipe", recipe, "--save", "OUT"))
        )
    for recipe in (f"{h100}/v2", f"{card}/v2", f"{h100}/v1", f"{card}/v1"):
        speed = ("-m", "bench", "--recipe", recipe, "--steps", "4", "--out", "OUT", "--shape")
        found += [Item(f"{shape} rows of {recipe}", (*speed, shape)) for shape in ("longest", "hh")]
    found.append(Item("ablation", ("-m", "bench.ablation", "--recipe", f"{h100}/v1", "--save", "OUT")))
    others = ("recipes/h100-mistral-7b-4bit/v1", "recipes/4090-mistral-7b/v1", "recipes/h100-llama2-13b/v1")
    found += [Item(f"memory of {r}", ("-m", "bench.memory", "measure", "--recipe", r, "--save", "OUT")) for r in others]
    return found


@click.command()
@click.option("--box", default="9m", show_default=True, metavar="9m", help="Time for all of it: 90s, 9m, 1h.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results/gpu"), show_default=True)
@click.option("--only", metavar="TEXT", help="Only items whose name holds this.")
def main(box: str, out: Path, only: str | None) -> None:
    """Run the items one after another until the box is used up; exit code 1 if one failed."""
    end = time.monotonic() + seconds(box)
    if not torch.cuda.is_available():
        raise click.ClickException("bench.gpu measures a CUDA device, and torch sees none here")
    out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[str, object]] = {}
    for item in items():
        if only and only not in item.name:
            continue
        left = end - time.monotonic()
        outcomes[item.name] = run(item, out, left) if left > LEAST else {"outcome": "not begun"}
        (out / "outcomes.json").write_text(json.dumps(outcomes, indent=2) + "\n")
        click.echo(f"{item.name}: {outcomes[item.name]['outcome']}, {max(0, end - time.monotonic()):.0f} s left")
    sys.exit(any(str(o["outcome"]).startswith("failed") for o in outcomes.values()))


def run(item: Item, out: Path, limit: float) -> dict[str, object]:
    """Run one item for at most `limit` seconds; its output goes to a log beside its record."""
    stem = re.sub(r"[^a-z0-9]+", "-", item.name.lower())
    command = [sys.executable, *(str((out / f"{stem}.json").resolve()) if a == "OUT" else a for a in item.arguments)]
    begun = time.monotonic()
    with open(out / f"{stem}.log", "w") as log:
        try:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=limit, env=environment).returncode
            outcome = "done" if code == 0 else f"failed with exit code {code}: see {out / f'{stem}.log'}"
        except subprocess.TimeoutExpired:
            outcome = "cut off by the box"
    return {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1)}


def seconds(box: str) -> float:
    """`9m` -> 540. Raises a usage error for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", box)
    if not match:
        raise click.BadParameter(f"{box!r}: write 90s, 9m or 1h", param_hint="--box")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


if __name__ == "__main__":
    guarded(main)
