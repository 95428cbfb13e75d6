"""`python -m bench.peer.supervised`: steps of SFT, reward model and DPO here and in TRL's trainers.

Both sides train the same adapter shape on the same random weights and the same rows, with the recipe's micro-batch,
accumulation and longest row. All else of TRL's is its default; once more it keeps activations and puts rows of similar
length into a batch where it can, as a careful user would. Ours is the real stage. Processes take turns.
`make bench-peer` compares PPO, RLOO and GRPO, `make bench-peer-real` a recipe's own model and rows.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import click

from bench import options, steps
from bench.clocks import clock_of
from bench.kinds import SideFigures, StageSteps, SupervisedRecord
from bench.provenance import code, describe_for, device_text, today
from bench.reading import last_line
from bench.rounds import in_order
from rlhf.cli import guarded
from rlhf.cli.options import WholeNumber
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.memory.rehearsal.short_runs import few_steps
from rlhf.process.children import child_environment
from rlhf.recipe import Changes, PinnedRecipe, StageName
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb

COMPARED_STAGES: tuple[StageName, ...] = ("sft", "rm", "dpo")
PEERS = ("trl", "trl, tuned")
TrlSettings = dict[str, bool | str]  # arguments of TRL's configuration
KEPT: TrlSettings = {"gradient_checkpointing": False}
# Pairs have no one length: TRL's two other trainers cannot put similar ones together.
TUNED: dict[str, TrlSettings] = {
    "sft": KEPT | {"train_sampling_strategy": "group_by_length"},
    "rm": KEPT,
    "dpo": KEPT,
    "grpo": KEPT,
}


class Asked(TypedDict):
    """What bench/peer/trl_stages.py is told, as JSON."""

    recipe: str  # folder
    overrides: Changes
    stage: StageName
    out: str  # folder of our run, which has the rows and the weights
    settings: TrlSettings
    warm_up: int  # steps that do not count


@options.command()
@options.HW
@options.RECIPE
@options.SET
@options.stages(COMPARED_STAGES)
@options.STEPS
@click.option("--repeats", default=3, show_default=True, type=WholeNumber(min=1), help="Runs of each, in turn.")
@options.SAVE
def main(
    hw: str,
    directory: Path | None,
    changes: tuple[str, ...],
    stages: tuple[StageName, ...],
    count: int,
    repeats: int,
    save: Path | None,
) -> None:
    """Compare steps of SFT, reward model and DPO with those of TRL's trainers, at their defaults and tuned."""
    loaded = options.load(hw, directory, changes)
    short = loaded.with_changes(few_steps(loaded.recipe, steps.WARM_UP + count, "hh"))
    figures = {stage: compare(short, stage, repeats, steps.WARM_UP) for stage in (stages or COMPARED_STAGES)}
    show(loaded, figures)
    if save:
        write_json(save, record_of(loaded, count, repeats, figures))


def show(loaded: PinnedRecipe, figures: Mapping[StageName, Mapping[str, SideFigures]]) -> None:
    """Print the figures of all stages."""
    clock = clock_of(row for sides in figures.values() for row in sides.values())
    ratios = ("speed, times TRL's", "times TRL tuned", "memory ratio", "to TRL tuned")
    columns = ("stage", "", f"step, {clock} s", f"tokens/{clock} s", "peak, GB", *ratios)
    rows = [_row(stage, name, row) for stage, sides in figures.items() for name, row in sides.items()]
    rows_table(f"{loaded.name} {loaded.version} compared with trl {version('trl')}", columns, rows)


def markdown(records: Sequence[SupervisedRecord]) -> str:
    """Return the table of some records, a row for each stage: ours, and beside it TRL's defaults and TRL tuned."""
    columns = (
        "processor",
        "stage",
        "CPU s a step",
        "speed ÷ TRL's",
        "÷ tuned",
        "peak, GB",
        "memory ÷ TRL's",
        "÷ tuned",
    )
    lines = [columns, ("---", "---", *["---:"] * 6)]
    for record in records:
        for stage, sides in record["stages_beside"].items():
            ours = sides["ours"]
            peak = ours["peak_bytes"]
            lines.append(
                (
                    device_text(record["device"], stage),
                    stage,
                    f"{ours['step_seconds']:.1f}",
                    with_range(ours.get("times_faster"), ours.get("times_faster_range")),
                    with_range(ours.get("times_faster_tuned"), ours.get("times_faster_tuned_range")),
                    "–" if peak is None else gb(peak),
                    with_range(ours.get("memory_ratio"), ours.get("memory_ratio_range")),
                    with_range(ours.get("memory_ratio_tuned"), ours.get("memory_ratio_tuned_range")),
                )
            )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def with_range(ratio: float | None, rounds: Sequence[float] | None) -> str:
    """Return a ratio, with the range of the ratios within a round where a record has it."""
    return "–" if ratio is None else f"{ratio:.2f}" + (f" ({rounds[0]:.2f} to {rounds[1]:.2f})" if rounds else "")


def record_of(
    loaded: PinnedRecipe, count: int, repeats: int, figures: dict[StageName, dict[str, SideFigures]]
) -> SupervisedRecord:
    """Return the record of a comparison."""
    return {
        "date": today(),
        "code": code(),
        "peer": f"trl {version('trl')} at its defaults, and tuned",
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "overrides": loaded.overrides,
        "device": describe_for(loaded.recipe),
        "packages": {name: version(name) for name in ("torch", "transformers", "trl", "peft")},
        "steps": count,
        "repeats": repeats,
        "stages_beside": figures,
    }


def compare(short: PinnedRecipe, stage: StageName, repeats: int, warm_up: int) -> dict[str, SideFigures]:
    """Run both sides of a recipe of few steps in turn; return `side_by_side` of all repeats.

    TRL's trainers take the rows and the weights of our first run.
    """
    runs: dict[str, list[StageSteps]] = {"ours": [], **{name: [] for name in PEERS}}
    settings = dict(zip(PEERS, ({}, TUNED[stage]), strict=True))
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder:
        for number in range(repeats):
            for name in in_order(runs, number):
                if name == "ours":
                    runs[name].append(_ours(short, stage, folder, warm_up))
                else:
                    runs[name].append(_trl(short, stage, folder, settings[name], warm_up))
    return side_by_side(runs)


def _ours(short: PinnedRecipe, stage: StageName, out: str, warm_up: int) -> StageSteps:
    """Run our stage once, again if it was run below `out`; what it builds on is run there once."""
    shutil.rmtree(Path(out, short.name, short.version, stage), ignore_errors=True)
    row = steps.measure_short(short, (stage,), Path(out), preflight=False, warm_up=warm_up)[stage]
    if row.get("out_of_memory"):
        raise UserError(f"{stage}: out of memory; what fits can be compared: lower the micro-batch")
    return row


def side_by_side(runs: Mapping[str, Sequence[StageSteps]]) -> dict[str, SideFigures]:
    """Return the `summary` of each side's repeats, with ours the ratios to TRL's.

    A ratio is of the medians of tokens per second; its range is that of the ratios within each round.
    """
    sides = {name: summary(parts) for name, parts in runs.items()}
    ours, theirs, tuned = (sides[name] for name in ("ours", *PEERS))
    ours["times_faster"] = ours["tokens_per_second"] / theirs["tokens_per_second"]
    ours["times_faster_range"] = _range_of(_speeds(runs["ours"], runs[PEERS[0]]))
    ours["times_faster_tuned"] = ours["tokens_per_second"] / tuned["tokens_per_second"]
    ours["times_faster_tuned_range"] = _range_of(_speeds(runs["ours"], runs[PEERS[1]]))
    if ours["peak_bytes"] and theirs["peak_bytes"] and tuned["peak_bytes"]:
        ours["memory_ratio"] = ours["peak_bytes"] / theirs["peak_bytes"]
        ours["memory_ratio_range"] = _range_of(_memory(runs["ours"], runs[PEERS[0]]))
        ours["memory_ratio_tuned"] = ours["peak_bytes"] / tuned["peak_bytes"]
        ours["memory_ratio_tuned_range"] = _range_of(_memory(runs["ours"], runs[PEERS[1]]))
    return sides


def _speeds(ours: Sequence[StageSteps], theirs: Sequence[StageSteps]) -> list[float]:
    """Return the ratio of tokens per second of each round."""
    return [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(ours, theirs, strict=True)]


def _memory(ours: Sequence[StageSteps], theirs: Sequence[StageSteps]) -> list[float]:
    """Return the ratio of the peaks of each round in which both are known."""
    peaks = ((_peak(a), _peak(b)) for a, b in zip(ours, theirs, strict=True))
    return [a / b for a, b in peaks if a and b]


def _range_of(ratios: Sequence[float]) -> list[float]:
    return [min(ratios), max(ratios)]


def summary(parts: Sequence[StageSteps]) -> SideFigures:
    """Return the median and range of the repeats' medians.

    The peak is a GPU's while it trains, on a CPU that of the whole process.
    """
    seconds = [part["step_seconds"]["median"] for part in parts]
    peaks = [peak for part in parts if (peak := _peak(part))]
    return {
        "step_seconds": statistics.median(seconds),
        "step_seconds_range": [min(seconds), max(seconds)],
        "tokens_per_second": statistics.median(part["tokens_per_second"] for part in parts),
        "peak_bytes": statistics.median(peaks) if peaks else None,
        "clock": parts[0]["clock"],
    }


def _peak(part: StageSteps) -> int | None:
    peaks = part["phase_peak_bytes"]
    if peaks is None:
        return part.get("peak_rss_bytes")
    return max((peaks[name] for name in ("train", "rollout", "score", "update") if name in peaks), default=None)


def _trl(short: PinnedRecipe, stage: StageName, out: str, settings: TrlSettings, warm_up: int) -> StageSteps:
    """Run TRL's trainer once. Return the same keys as `bench.steps` has for ours."""
    asked: Asked = {
        "recipe": str(short.directory),
        "overrides": short.overrides,
        "stage": stage,
        "out": out,
        "settings": settings,
        "warm_up": warm_up,
    }
    command = [sys.executable, "-m", "bench.peer.trl_stages", json.dumps(asked)]
    environment = child_environment(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"TRL's {stage}: {done.stderr.strip()[-2000:]}")
    return last_line(done.stdout, StageSteps, f"TRL's {stage}")


def _row(stage: StageName, name: str, row: SideFigures) -> tuple[str, ...]:
    ratios = (
        _ratio(row.get("times_faster"), row.get("times_faster_range")),
        _ratio(row.get("times_faster_tuned"), row.get("times_faster_tuned_range")),
        _ratio(row.get("memory_ratio"), row.get("memory_ratio_range")),
        _ratio(row.get("memory_ratio_tuned"), row.get("memory_ratio_tuned_range")),
    )
    peak = gb(row["peak_bytes"] or 0)
    shown = f"{row['step_seconds']:.3g}", f"{row['tokens_per_second']:,.0f}", peak
    return (stage if name == "ours" else "", name, *shown, *ratios)


def _ratio(value: float | None, ends: Sequence[float] | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


if __name__ == "__main__":
    guarded(main)
