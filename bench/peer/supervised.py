"""`python -m bench.peer.supervised`: steps of SFT, reward model and DPO here beside TRL's trainers.

Both sides train the same adapter shape on the same random weights and the same rows, with the recipe's micro-batch,
accumulation and longest row. All else of TRL's is its default; once more it keeps activations and puts rows of similar
length into a batch where it can, as a careful user would. Ours is the real stage. Processes take turns.
`make bench-peer` compares PPO, RLOO and GRPO.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import click

from bench import options, steps
from bench.clocks import clock_of
from bench.steps import StageSteps
from rlhf.cli import guarded
from rlhf.files import write_json
from rlhf.memory.short_runs import few_steps
from rlhf.observe import console
from rlhf.process.launching import child_environment
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.run.provenance import code_version

STAGES: tuple[StageName, ...] = ("sft", "rm", "dpo")
PEERS = ("trl", "trl, tuned")
KEPT = {"gradient_checkpointing": False}
# Pairs have no one length: TRL's two other trainers cannot put similar ones together.
TUNED: dict[str, dict[str, Any]] = {
    "sft": KEPT | {"train_sampling_strategy": "group_by_length"},
    "rm": KEPT,
    "dpo": KEPT,
}


@click.command()
@options.HW
@options.RECIPE
@options.SET
@click.option("--stage", "only", multiple=True, type=click.Choice(STAGES), help="Only these.")
@options.STEPS
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Runs of each, in turn.")
@click.option("--save", type=click.Path(path_type=Path), help="Write the figures to this JSON file.")
def main(
    hw: str,
    directory: Path | None,
    changes: tuple[str, ...],
    only: tuple[StageName, ...],
    count: int,
    repeats: int,
    save: Path | None,
) -> None:
    """Compare steps of SFT, reward model and DPO with those of TRL's trainers, at their defaults and tuned."""
    if save and code_version()["dirty"]:
        raise click.ClickException("--save: the code differs from its commit; a result must name what it was made by")
    loaded = options.load(hw, directory, changes)
    figures = {stage: compare(loaded, stage, count, repeats) for stage in (only or STAGES)}
    clock = clock_of(row for sides in figures.values() for row in sides.values())
    ratios = ("times faster", "than tuned", "memory ratio")
    columns = ("stage", "", f"step, {clock} s", f"tokens/{clock} s", "peak, GB", *ratios)
    rows = [_row(stage, name, row) for stage, sides in figures.items() for name, row in sides.items()]
    console.rows_table(f"{loaded.name} {loaded.version} beside trl {version('trl')}", columns, rows)
    if save:
        facts = {
            "date": date.today().isoformat(),
            "code": code_version(),
            "peer": f"trl {version('trl')} at its defaults, and tuned",
        }
        about = {"recipe": loaded.name, "version": loaded.version, "recipe_sha256": loaded.sha256}
        packages = {name: version(name) for name in ("torch", "transformers", "trl", "peft")}
        with console.quiet_libraries():
            from rlhf.observe.telemetry import device_facts
            from rlhf.process.torch_setup import device_of
        device = device_facts(device_of(loaded.recipe))
        record = facts | about | {"overrides": loaded.overrides, "device": device, "packages": packages}
        write_json(save, record | {"repeats": repeats, "stages_beside": figures})


def compare(loaded: PinnedRecipe, stage: StageName, count: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Run both sides in turn; return `side_by_side` of all repeats."""
    runs: dict[str, list[StageSteps]] = {"ours": [], **{name: [] for name in PEERS}}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder:
            out = Path(folder)
            ours = steps.measure(loaded, (stage,), out, steps=count, shape="hh", preflight=False)
            if stage not in ours or ours[stage].get("out_of_memory"):
                raise click.ClickException(f"{stage}: out of memory; what fits can be compared: lower the micro-batch")
            runs["ours"].append(ours[stage])
            for name, settings in zip(PEERS, ({}, TUNED[stage]), strict=True):
                runs[name].append(_trl(loaded, stage, out, count, settings))
    return side_by_side(runs)


def side_by_side(runs: Mapping[str, Sequence[StageSteps]]) -> dict[str, dict[str, Any]]:
    """Return the `summary` of each side's repeats, with ours the ratios to TRL's.

    A ratio is of the medians of tokens per second; its range is that of the ratios within each round.
    """
    sides = {name: summary(parts) for name, parts in runs.items()}
    ours = sides["ours"]
    for key, name in {"times_faster": "trl", "times_faster_tuned": "trl, tuned"}.items():
        ours[key] = ours["tokens_per_second"] / sides[name]["tokens_per_second"]
        rounds = [
            a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(runs["ours"], runs[name], strict=True)
        ]
        ours[f"{key}_range"] = [min(rounds), max(rounds)]
    if ours["peak_bytes"]:
        ours["memory_ratio"] = ours["peak_bytes"] / sides["trl"]["peak_bytes"]
    return sides


def summary(parts: Sequence[StageSteps]) -> dict[str, Any]:
    """Return the median and range of the repeats' medians.

    The peak is a GPU's while it trains; a whole process has more.
    """
    seconds = [part["step_seconds"]["median"] for part in parts]
    return {
        "step_seconds": statistics.median(seconds),
        "step_seconds_range": [min(seconds), max(seconds)],
        "tokens_per_second": statistics.median(part["tokens_per_second"] for part in parts),
        "peak_bytes": statistics.median(peaks) if (peaks := [p for part in parts if (p := _peak(part))]) else None,
        "clock": parts[0]["clock"],
    }


def _peak(part: StageSteps) -> int | None:
    peaks = part["phase_peak_bytes"] or {}
    return max((peaks[name] for name in ("train", "rollout", "score", "update") if name in peaks), default=None)


def _trl(loaded: PinnedRecipe, stage: StageName, out: Path, count: int, settings: dict[str, Any]) -> StageSteps:
    overrides = loaded.overrides | few_steps(loaded.recipe, steps.WARM_UP + count, "hh")
    asked = {
        "recipe": str(loaded.directory),
        "overrides": overrides,
        "stage": stage,
        "out": str(out),
        "settings": settings,
    }
    command = [sys.executable, "-m", "bench.peer.trl_supervised", json.dumps(asked)]
    environment = child_environment(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise click.ClickException(f"TRL's {stage}: {done.stderr.strip()[-2000:]}")
    return cast(StageSteps, json.loads(done.stdout.splitlines()[-1]))


def _row(stage: StageName, name: str, row: dict[str, Any]) -> tuple[str, ...]:
    ratios = [_ratio(row, key) for key in ("times_faster", "times_faster_tuned", "memory_ratio")]
    peak = f"{row['peak_bytes'] / 1e9:.2f}" if row["peak_bytes"] else "-"
    shown = f"{row['step_seconds']:.3g}", f"{row['tokens_per_second']:,.0f}", peak
    return (stage if name == "ours" else "", name, *shown, *ratios)


def _ratio(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        return ""
    low, high = row.get(f"{key}_range", (None, None))
    return f"{row[key]:.2f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    guarded(main)
