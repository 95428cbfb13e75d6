"""`python -m bench.results`: write results/README.md from the records beside it."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.clocks import clock_of
from bench.paths import RESULTS
from bench.records import device_name
from rlhf.cli import guarded
from rlhf.errors import UserError
from rlhf.recipe.published import MET, MISSED, NOT_COMPARABLE, NOT_MEASURED, count
from rlhf.run import reader
from rlhf.run.finished import totals
from rlhf.run.outcomes import Reproduction

# Contenders of bench.peer that are the same design on both sides: ours, TRL's. Headlines compare no others.
ALIKE = (
    ("ours, critic with an adapter", "TRL, value model through LoRA"),
    ("ours, activations kept", "TRL, activations kept"),
    ("ours, activations recomputed", "TRL, activations recomputed"),
)

HEAD = """# Results

Measured, each with its commit, recipe hash, package versions, device and seeds. Predictions stand beside the recipes
(`predicted.json`); only records that compare them with measurements have predictions too. Beside TRL, "times" means how
many times as fast ours is. For PPO, RLOO and GRPO both sides have the same design in the headline;
[speed.md](../docs/speed.md#compared-with-trl) and [groups.md](../docs/groups.md#compared-with-trl) show the others,
with the lean trunk and adapters in upper layers. This page is made by `make results-index` and checked by the tests.

| record | what | device | date | commit | headline |
| --- | --- | --- | --- | --- | --- |
"""


def page(root: Path = RESULTS) -> str:
    """Return the page: one line for each record, newest first within its folder."""
    files = sorted(root.rglob("*.json"), key=lambda file: (str(file.parent), file.name), reverse=True)
    return HEAD + "".join(_line(file, root) for file in files)


def _line(file: Path, root: Path) -> str:
    with reader.reading(file):
        record = json.loads(file.read_text(encoding="utf-8"))
    path = file.relative_to(root)
    kinds = {"seeds": _reproduced, "stages": _bench, "phases": _memory, "stages_beside": _beside, "figures": _peer}
    kinds |= {"gpu_item": _gpu, "outside": _outside, "adapters_in": _layers}
    describe = next((describe for key, describe in kinds.items() if key in record), None)
    if describe is None:
        raise UserError(f"{file}: not a record of a measurement; it should have one of the keys {', '.join(kinds)}")
    subject, headline = describe(record)
    commit = (record["code"]["commit"] or "unknown")[:8]
    date = re.search(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", file.name)
    cells = (f"[{path}]({path})", subject, device_name(record), date[0] if date else "", commit, headline)
    return f"| {' | '.join(cells)} |\n"


def _reproduced(record: Mapping[str, Any]) -> tuple[str, str]:
    reproduction = reader.check(record, Reproduction, "a record of seeds")
    seeds = reproduction.seeds
    summaries = [summary for stages in seeds.values() for summary in stages.values()]
    verdicts = [target.outcome for summary in summaries for target in summary.targets]
    for stages in seeds.values():
        verdicts += [verdict for *_, verdict in totals(stages, reproduction.price_per_hour)]
    compared = [verdict for verdict in verdicts if verdict.word not in (NOT_COMPARABLE, NOT_MEASURED)]
    noun = "targets" if any(verdict.word in (MET, MISSED) for verdict in compared) else "figures:"
    return f"the chain, {len(seeds)} seeds", count(compared, noun)


def _bench(record: Mapping[str, Any]) -> tuple[str, str]:
    speeds = (
        f"{stage} {row['tokens_per_second']:,.0f}"
        for stage, row in record["stages"].items()
        if "tokens_per_second" in row
    )
    return (
        f"a few steps, {record['shape']} rows",
        f"tokens per {clock_of(record['stages'].values())} second: {', '.join(speeds)}",
    )


def _memory(record: Mapping[str, Any]) -> tuple[str, str]:
    errors = sorted((abs(row["error"]), f"{row['stage']}/{row['phase']}") for row in record["phases"])
    close = sum(error < 0.005 for error, _ in errors)
    worst, phase = errors[-1]
    return "predicted memory beside real", f"{close} of {len(errors)} phases within 0.5 %, worst {worst:.1%} ({phase})"


def _beside(record: Mapping[str, Any]) -> tuple[str, str]:
    ours = {stage: sides["ours"] for stage, sides in record["stages_beside"].items()}
    peer = record["peer"].partition(" at ")[0]
    settings = [f"{key}={value}" for key, value in record["overrides"].items()]
    subject = ", ".join([f"steps beside {peer}", *settings, f"{clock_of(ours.values())} seconds"])
    ratios = (
        f"{stage} {row['times_faster']:.2f} times TRL's defaults"
        + (f", {row['times_faster_tuned']:.2f} times tuned" if "times_faster_tuned" in row else "")
        for stage, row in ours.items()
    )
    return subject, "; ".join(ratios)


def _peer(record: Mapping[str, Any]) -> tuple[str, str]:
    figures = record["figures"]
    method = record.get("method", "ppo").upper()  # records from before the key are of PPO
    ratios = [
        f"{ours}: {figures[theirs]['seconds_per_step'] / figures[ours]['seconds_per_step']:.2f} times {theirs}"
        for ours, theirs in ALIKE
        if all("seconds_per_step" in figures.get(name, {}) for name in (ours, theirs))
    ]
    subject = f"a step of {method} beside {record['peer']}, {clock_of(figures.values())} seconds"
    return subject, "; ".join(ratios) or "like designs did not fit both"


def _layers(record: Mapping[str, Any]) -> tuple[str, str]:
    gains = (f"{layers.replace('_', ' ')} {row['true_gain']:.2f} sd" for layers, row in record["summary"].items())
    return "PPO with adapters in all or in upper layers", "true gain: " + ", ".join(gains)


def _outside(record: Mapping[str, Any]) -> tuple[str, str]:
    errors = sorted(abs(row["error"]["reserved_max"]) for row in record["rows"] if "error" in row)
    text = f"maximum reserved of {len(errors)} runs: median error {median(errors):.2%}, worst {errors[-1]:.1%}"
    return f"predicted memory beside {record['outside']['hardware']}s of {record['outside']['repository']}", text


def _gpu(record: Mapping[str, Any]) -> tuple[str, str]:
    state = record["verdict"] or ("not decided" if record["outcome"] == "done" else record["outcome"])
    text = f"{state}: {record['why']}" if record["why"] else state
    return f"GPU, {record['gpu_item']}: {record['claim']}", text.replace("|", "\\|")


@click.command()
@click.option("--check", is_flag=True, help="Only say whether the page is up to date.")
def main(check: bool) -> None:
    """Write results/README.md."""
    file = RESULTS / "README.md"
    if check:
        current = file.read_text(encoding="utf-8") == page()
        sys.exit(0 if current else "results/README.md is out of date: `make results-index`")
    file.write_text(page(), encoding="utf-8")
    print(f"written to {file}")


if __name__ == "__main__":
    guarded(main)
