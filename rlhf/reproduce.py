"""A recipe once per seed, in fresh processes, and what the seeds agree on."""

import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf import console
from rlhf.recipe import PARENTS, STAGES, Loaded
from rlhf.run import RunError, read_json, write_json


def chain(loaded: Loaded, until: Sequence[str]) -> list[str]:
    """The stages of a recipe that lead to `until`, in order."""
    wanted = {*until, *(parent for stage in until for parent in PARENTS[stage])}
    return [stage for stage in STAGES if stage in wanted and getattr(loaded.recipe, stage) is not None]


def run_seeds(stages: Sequence[str], seeds: Sequence[int], out: Path, options: Sequence[str]) -> None:
    """`rlhf run` for every seed and stage; what is done is kept, what was interrupted is resumed."""
    for seed in seeds:
        for stage in stages:
            arguments = ["run", stage, "--if-needed", "--resume", "--seed", str(seed), "--out", str(root(out, seed))]
            if subprocess.run([sys.executable, "-m", "rlhf.cli", *arguments, *options], check=False).returncode:
                again = shlex.join(["rlhf", *arguments, *options])
                raise RunError(f"seed {seed} stopped in {stage}; nothing is lost: mend it and run this again ({again})")


def record(loaded: Loaded, stages: Sequence[str], seeds: Sequence[int], out: Path) -> dict[str, Any]:
    """Every seed's summaries with what they were measured on; also written to `<out>/<recipe>-<version>.json`."""
    folders = {seed: root(out, seed) / loaded.name / loaded.version for seed in seeds}
    first = read_json(folders[seeds[0]] / stages[0] / "manifest.json") or {}
    found = {
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "modified": loaded.modified,
        **{key: first.get(key) for key in ("code", "packages", "python", "device")},
        "seeds": {
            str(seed): {stage: read_json(folder / stage / "summary.json") for stage in stages}
            for seed, folder in folders.items()
        },
    }
    write_json(out / f"{loaded.name}-{loaded.version}.json", found)
    return found


def show(found: dict[str, Any]) -> None:
    seeds = list(found["seeds"])
    title = f"{found['recipe']} {found['version']}, seeds {' '.join(seeds)}"
    columns = ("stage", "metric", "target", *(f"seed {seed}" for seed in seeds), "mean ± sd")
    console.rows_table(title, columns, rows([list(found["seeds"][seed].values()) for seed in seeds]))


def markdown(found: dict[str, Any]) -> str:
    """The same table for a document, with what it was measured on."""
    seeds = list(found["seeds"])
    columns = ("stage", "metric", "target", *(f"seed {seed}" for seed in seeds), "mean ± sd")
    body = rows([list(found["seeds"][seed].values()) for seed in seeds])
    lines = [columns, ("---",) * len(columns), *body]
    device, packages = found["device"], found["packages"]
    where = f"{device['name']}, {device['threads']} threads" if device["type"] == "cpu" else device["name"]
    measured = (
        f"Measured by `rlhf reproduce`: recipe {found['recipe']} {found['version']} ({found['recipe_sha256'][:12]}), "
        f"{where}, commit {found['code']['commit'][:12]}, torch {packages['torch']}, "
        f"transformers {packages['transformers']}, trl {packages['trl']}, peft {packages['peft']}."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{measured}\n"


def rows(by_seed: Sequence[Sequence[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """One row per target: what it asks, each seed's value, mean ± sample standard deviation; and each stage's time."""
    found = []
    for summaries in zip(*by_seed, strict=True):
        stage = summaries[0]["stage"]
        for targets in zip(*(summary["targets"] for summary in summaries), strict=True):
            values = [target["measured"] for target in targets]
            span = console.span(*targets[0]["published"])
            found.append((stage, targets[0]["name"], span, *map(console.number, values), spread(values)))
        walls = [summary["wall_seconds"] for summary in summaries]
        seconds = [f"{wall:.0f}" for wall in (*walls, statistics.mean(walls))]
        found.append((stage, "wall time, s", "", *seconds))
    return found


def spread(values: Sequence[float | None]) -> str:
    """`mean ± sd` of the values that are there."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "-"
    deviation = f" ± {console.number(statistics.stdev(known))}" if len(known) > 1 else ""
    return console.number(statistics.mean(known)) + deviation


def root(out: Path, seed: int) -> Path:
    return out / f"seed-{seed}"
