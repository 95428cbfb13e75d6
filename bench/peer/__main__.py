"""`python -m bench.peer`: a few steps of a stage here, and in TRL's trainer of the pinned version, in turn.

Both sides train adapters of the same shape on the same weights and rows, with the recipe's batches and lengths. All
else of TRL's is its default; once more it is tuned as a careful user would. TRL has no PPO any more: beside PPO's
phases stand the same rollout, passes and updates by transformers' `generate` and peft. Each run is a process of its
own; a figure is the median over all runs, a ratio's range that of the runs of a round.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench import options, records, steps
from rlhf.cli import guarded
from rlhf.cli.choice import Choice
from rlhf.errors import UserError
from rlhf.plan.rehearsal.short_runs import few_steps
from rlhf.process.children import child_environment
from rlhf.recipe import Changes, PinnedRecipe, Recipe, StageName
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb

STAGES: tuple[StageName, ...] = ("sft", "rm", "dpo", "ppo", "rloo", "grpo")
KEPT: dict[str, object] = {"gradient_checkpointing": False}
TUNED: Mapping[str, dict[str, object]] = {  # trainers of pairs cannot put rows of similar length together
    "sft": KEPT | {"train_sampling_strategy": "group_by_length"},
    **dict.fromkeys(("rm", "dpo", "rloo", "grpo"), KEPT),
}
EVALUATED = 8  # held-out rows of an evaluation: it is no part of a step
# What `rlhf` asks of glibc itself, for the peer: pages of freed tensors stay with the process.
GLIBC = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_MAX_": "0"}
Run = dict[str, Any]  # seconds of each step, tokens a second if they are counted, peak in bytes


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options.recipe
@options.stages(STAGES)
@click.option(
    "--random", "random_weights", is_flag=True, help="Random weights and stand-in rows, not the recipe's own."
)
@click.option("--data", multiple=True, metavar="FILE", help="Rows used instead of the recipe's. May be repeated.")
@click.option("--steps", "count", default=4, show_default=True, type=click.IntRange(min=2), help="Steps after warm-up.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Runs of each, in turn.")
@options.SAVE
def main(
    hw: str,
    guide: bool,
    directory: Path | None,
    changes: tuple[str, ...],
    stages: tuple[StageName, ...],
    random_weights: bool,
    data: tuple[str, ...],
    count: int,
    repeats: int,
    save: Path | None,
) -> None:
    """Compare steps of SFT, reward model, DPO, PPO, RLOO and GRPO with TRL's, in turn."""
    loaded = options.load(hw, guide, directory, changes)
    if save:
        records.check_savable(file=save)
    chosen = options.stages_of(loaded, stages, STAGES)
    warm_up = steps.WARM_UP if random_weights else 1
    if random_weights:
        short = loaded.with_changes(few_steps(loaded.recipe, warm_up + count, "hh"))
    else:
        own = Choice(recipe=loaded.directory, data=data).load().with_changes(loaded.overrides) if data else loaded
        short = own.with_changes(few_real_steps(own.recipe, warm_up + count))
    with tempfile.TemporaryDirectory(prefix="rlhf-peer-") as folder:
        found = {stage: compare(short, stage, Path(folder, stage), warm_up, repeats) for stage in chosen}
    show(f"{loaded.name} {loaded.version}, {'random' if random_weights else 'its own'} weights", found)
    if save:
        figures = {
            "peer": f"trl {version('trl')} at its defaults, and tuned",
            "packages": {name: version(name) for name in ("torch", "transformers", "trl", "peft")},
            "weights": "random" if random_weights else "the recipe's",
            "steps": count,
            "repeats": repeats,
            "rows": [Path(file).name for file in data],
            "stages_beside": found,
        }
        records.save(records.new("peer", loaded) | figures, save)


def few_real_steps(recipe: Recipe, count: int) -> Changes:
    """Return the overrides by which every stage takes `count` steps on its own rows, with little around them."""
    changes: Changes = {"evaluate.max_samples": EVALUATED}
    around: Changes = {"max_eval_samples": EVALUATED, "logging_steps": 1, "save_steps": count, "adapter": "last"}
    online: Changes = {"steps": count, "eval_steps": count} | around
    dialogues: Changes = {"max_steps": count, "eval_steps": None} | around
    for stage in (*recipe.online(), *recipe.dialogues()):
        section = online if stage in recipe.online() else dialogues
        changes |= {f"{stage}.{key}": value for key, value in section.items()}
    return changes


def compare(short: PinnedRecipe, stage: StageName, out: Path, warm_up: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Run ours and the peers in turn; every second round in reverse, so that none always finds a warm machine."""
    peers: dict[str, dict[str, object]] = {"trl": {}, "trl, tuned": TUNED[stage]} if stage in TUNED else {"library": {}}
    runs: dict[str, list[Run]] = {name: [] for name in ("ours", *peers)}
    for number in range(repeats):
        for name in list(runs)[:: -1 if number % 2 and number else 1]:
            one = ours(short, stage, out, warm_up) if name == "ours" else peer(short, stage, out, warm_up, peers[name])
            runs[name].append(one)
    return {name: summary(mine, runs["ours"]) for name, mine in runs.items()}


def ours(short: PinnedRecipe, stage: StageName, out: Path, warm_up: int) -> Run:
    """Run our stage once, again if it was run before; what it builds on is run there once."""
    shutil.rmtree(out / short.name / short.version / stage, ignore_errors=True)
    row = steps.measure_short(short, (stage,), out, preflight=False, warm_up=warm_up)[stage]
    if row.get("out_of_memory"):
        raise UserError(f"{stage} does not fit here")
    peaks = row["phase_peak_bytes"]
    one: Run = {"step": row["step_seconds"]["median"], "tokens_per_second": row["tokens_per_second"]}
    one["peak_bytes"] = max(peaks.values()) if peaks else row["peak_rss_bytes"]
    return one | {"phases": {name: s["median"] for name, s in row["phase_seconds"].items() if "/" not in name}}


def peer(short: PinnedRecipe, stage: StageName, out: Path, warm_up: int, settings: Mapping[str, object]) -> Run:
    """Run the peer's trainer once, on the rows and weights of our run below `out`."""
    asked: dict[str, object] = {
        "recipe": str(short.directory),
        "overrides": short.overrides,
        "stage": stage,
        "out": str(out),
    }
    asked |= {"out": str(out), "settings": settings, "warm_up": warm_up}
    module = "bench.peer.trl_stage" if stage in TUNED else "bench.peer.parts"
    environment = child_environment(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", **GLIBC)
    command = [sys.executable, "-m", module, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"{module}, {stage}: {done.stderr.strip()[-1000:]}")
    taken = json.loads(done.stdout.splitlines()[-1])
    seconds = taken["wall" if short.recipe.hardware.device == "cuda" else "cpu"]
    one: Run = {"step": median(seconds), "peak_bytes": taken["peak"]} | {k: taken[k] for k in ("phases",) if k in taken}
    return one | ({"tokens_per_second": taken["tokens"] / sum(seconds)} if taken.get("tokens") else {})


def summary(runs: Sequence[Run], ours: Sequence[Run]) -> dict[str, Any]:
    """Return the medians of a contender's runs, and of a peer's how many times faster ours is: median and range.

    Speeds are of tokens where both sides count them, otherwise of steps, which have the same rows.
    """
    row: dict[str, Any] = {key: median(run[key] for run in runs) for key in runs[0] if key != "phases"}
    if "phases" in runs[0]:
        row["phases"] = {name: median(run["phases"][name] for run in runs) for name in runs[0]["phases"]}
    if runs is not ours:
        tokens = all("tokens_per_second" in run for run in (*runs, *ours))
        faster = [
            own["tokens_per_second"] / run["tokens_per_second"] if tokens else run["step"] / own["step"]
            for run, own in zip(runs, ours, strict=True)
        ]
        row |= {"times_faster": median(faster), "times_faster_range": [min(faster), max(faster)]}
        row["memory_ratio"] = median(own["peak_bytes"] / run["peak_bytes"] for run, own in zip(runs, ours, strict=True))
    return row


def show(title: str, found: Mapping[StageName, Mapping[str, dict[str, Any]]]) -> None:
    """Print the figures of all stages. Seconds are the process's on a CPU."""
    rows = []
    for stage, sides in found.items():
        for name, row in sides.items():
            faster, speed = row.get("times_faster"), row.get("tokens_per_second")
            low, high = row.get("times_faster_range", (0, 0))
            phases = ", ".join(f"{phase} {seconds:.3g}" for phase, seconds in row.get("phases", {}).items())
            cells = (f"{row['step']:.3g}", f"{speed:,.0f}" if speed else "-", gb(row["peak_bytes"]))
            ratio = f"{faster:.2f} [{low:.2f}, {high:.2f}]" if faster else "-"
            memory = f"{row['memory_ratio']:.2f}" if faster else "-"
            rows.append((stage, name, *cells, ratio, memory, phases))
    columns = ("stage", "", "step, s", "tokens/s", "peak, GB", "ours, times faster", "our memory", "phases, s")
    rows_table(title, columns, rows)


if __name__ == "__main__":
    guarded(main)
