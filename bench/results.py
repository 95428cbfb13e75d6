"""`python -m bench.results`: write results/README.md from the records there, and recipes/README.md."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from bench import options, recipe_index
from bench.clocks import clock_of
from bench.gpu.record import GpuRecord
from bench.kinds import (
    AblationRecord,
    Contender,
    MemoryRecord,
    PeerRecord,
    PlantedRecord,
    SameRecord,
    SideFigures,
    StepsRecord,
    SupervisedRecord,
)
from bench.paths import RESULTS, ROOT
from bench.peer.figures import ALIKE, ratios_of
from bench.provenance import device_text
from bench.reading import check, read
from bench.records import Origin
from rlhf.cli import guarded
from rlhf.errors import UserError
from rlhf.recipe import as_yaml
from rlhf.recipe.published import NOT_COMPARED, count
from rlhf.run import reader
from rlhf.run.finished import totals
from rlhf.run.outcomes import Reproduction

CLOSE = 0.005  # share of the measured peak within which a predicted one counts as near

# Commits of records whose tokens of TRL are the mean of all steps. Ours, and later code's, are of timed steps alone.
TOKENS_OF_WARM_UP = ("d0fceebf", "fc82bc4d", "ec2acf72")

HEAD = """# Results

This page lists every measurement that is kept, with its commit; [studies](../studies/README.md) keep theirs
themselves. Records of the chain also have recipe hash, package versions, device and seeds; the oldest do not name the
processor. Predictions stand next to the recipes (`predicted.json`); only records that compare them with measurements
have predictions too. Records below `against/` test the benchmark itself: a commit beside itself, and regressions that
were planted. This page is made by `make results-index` and checked by the tests.

In comparisons with TRL, "1.10 times" means that ours is 1.10 times as fast. For PPO, RLOO and GRPO both sides have the
same design in the headline; [speed.md](../docs/speed.md#compared-with-trl) and
[groups.md](../docs/groups.md#compared-with-trl) show the others, with the lean trunk and adapters in upper layers.

\\* These ratios are not exact: TRL's tokens are counted with those of its warm-up, whose seconds are left out
([speed.md](../docs/speed.md#sft-reward-model-and-dpo)). The newest record of the same comparison is exact.

The two records of the chain of `cpu-tiny` v1 are of one recipe and two commits of the code. Sampling was rewritten
between them, before the first release, so their figures of PPO and DPO differ.

| record | what | device | date | commit | headline |
| --- | --- | --- | --- | --- | --- |
"""


def page(root: Path = RESULTS) -> str:
    """Return the page: one line for each record, by folder, and the last by name first within one."""
    newest_first = sorted(root.rglob("*.json"), key=lambda file: file.name, reverse=True)
    # What the chain and its peers measured stands first, and what tests the benchmarks themselves last.
    files = sorted(newest_first, key=lambda file: ("against" in file.relative_to(root).parts, str(file.parent)))
    lines = "".join(_line(file, root) for file in files)
    return HEAD + lines


def _line(file: Path, root: Path) -> str:
    content = read(file, dict[str, object])
    describe = next((describe for key, describe in DESCRIBED_BY.items() if key in content), None)
    if describe is None:
        listing = ", ".join(DESCRIBED_BY)
        raise UserError(f"{file}: not a record of a measurement; it should have one of the keys {listing}")
    subject, headline = describe(content, str(file))
    record = check(content, Origin, str(file))
    commit = (record["code"]["commit"] or "unknown")[:8]
    date = re.search(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", file.name)
    device = device_text(record.get("device"), str(file))
    path = file.relative_to(root)
    cells = (f"[{path}]({path})", subject, device, date[0] if date else "", commit, headline)
    return f"| {' | '.join(cells)} |\n"


def _reproduced(content: object, source: str) -> tuple[str, str]:
    reproduction = reader.check(content, Reproduction, source)
    seeds = reproduction.seeds
    summaries = [summary for stages in seeds.values() for summary in stages.values()]
    verdicts = [target.outcome for summary in summaries for target in summary.targets]
    for stages in seeds.values():
        verdicts += [verdict for *_, verdict in totals(stages, reproduction.price_per_hour)]
    compared = [verdict for verdict in verdicts if verdict.word != NOT_COMPARED]
    files = "".join(f", rows of {file.name}" for file in reproduction.rows)
    return f"the chain, {len(seeds)} seeds{files}", count(
        compared, "targets"
    ) or "not compared with the recipe's targets"


def _steps(content: object, source: str) -> tuple[str, str]:
    record = check(content, StepsRecord, source)
    speeds = (
        f"{stage} {row['tokens_per_second']:,.0f}"
        for stage, row in record["stages"].items()
        if "tokens_per_second" in row
    )
    return (
        f"a few steps, {record['shape']} rows",
        f"tokens per {clock_of(record['stages'].values())} second: {', '.join(speeds)}",
    )


def _memory(content: object, source: str) -> tuple[str, str]:
    record = check(content, MemoryRecord, source)
    errors = sorted((abs(row["error"]), f"{row['stage']}/{row['phase']}") for row in record["phases"])
    close = sum(error < CLOSE for error, _ in errors)
    worst, phase = errors[-1]
    unmatched = len(record.get("unmatched", []))
    more = f", {unmatched} only predicted or only measured" if unmatched else ""
    return (
        "predicted memory compared with real",
        f"{close} of {len(errors)} phases within {100 * CLOSE:g} %, worst {worst:.1%} ({phase}){more}",
    )


def _supervised(content: object, source: str) -> tuple[str, str]:
    record = check(content, SupervisedRecord, source)
    ours = {stage: sides["ours"] for stage, sides in record["stages_beside"].items()}
    peer = record["peer"].partition(" at ")[0]
    settings = [f"{key}={as_yaml(value)}" for key, value in record.get("overrides", {}).items()]
    mark = r" \*" if str(record["code"]["commit"])[:8] in TOKENS_OF_WARM_UP else ""
    model = ["the recipe's model"] if "weights" in record else []
    subject = ", ".join([f"steps compared with {peer}", *model, *settings, f"{clock_of(ours.values())} seconds"])
    ratios = (_beside(stage, sides) for stage, sides in record["stages_beside"].items())
    return subject, "; ".join(ratios) + mark


def _beside(stage: str, sides: Mapping[str, SideFigures]) -> str:
    """Return the ratios of a stage of ours to TRL's two, which stand first among the others; some have one."""
    words = {"trl": "TRL's defaults", "trl, tuned": "tuned"}
    first, second, *_ = [*(words.get(name, name) for name in sides if not name.startswith("ours")), ""]
    faster, than_tuned, _, of_tuned = ratios_of(sides["ours"])
    known = [(faster, f"times {first}"), (than_tuned, f"times {second}"), (of_tuned, f"of the memory of {second}")]
    return f"{stage} {', '.join(f'{ratio} {of}' for ratio, of in known if ratio != '–')}"


def _ablation(content: object, source: str) -> tuple[str, str]:
    record = check(content, AblationRecord, source)
    rows = record["strategies"]
    none = rows["none"]
    if none.get("out_of_memory"):
        return f"ways to save memory in {record['stage']}", "without any it does not fit"
    factors = (
        f"{name} x {row['step_seconds']['median'] / none['step_seconds']['median']:.2f}"
        for name, row in rows.items()
        if name != "none" and "step_seconds" in row
    )
    return f"ways to save memory in {record['stage']}", f"time of a step: {', '.join(factors)}"


def _peer(content: object, source: str) -> tuple[str, str]:
    record = check(content, PeerRecord, source)
    figures = record["figures"]
    method = record.get("method", "ppo").upper()  # records from before the key are of PPO
    ratios = [
        f"{ours}: {_ratio(figures[ours], figures[theirs], theirs)}"
        for ours, theirs in ALIKE
        if all("seconds_per_step" in figures.get(name, {}) for name in (ours, theirs))
    ]
    subject = f"a step of {method} compared with {record['peer']}, {clock_of(figures.values())} seconds"
    return subject, "; ".join(ratios) or "like designs did not fit both"


def _ratio(ours: Contender, theirs: Contender, name: str) -> str:
    """Return how many times as fast ours is, by median steps; where the ranges of all steps overlap, that is said."""
    ratio = theirs["seconds_per_step"] / ours["seconds_per_step"]
    (low, high), (their_low, their_high) = ours["seconds_range"], theirs["seconds_range"]
    overlap = " (ranges of steps overlap)" if low <= their_high and their_low <= high else ""
    return f"{ratio:.2f} times {name}{overlap}"


def _gpu(content: object, source: str) -> tuple[str, str]:
    record = check(content, GpuRecord, source)
    state = record["verdict"] or ("not decided" if record["outcome"] == "done" else record["outcome"])
    text = f"{state}: {record['why']}" if record["why"] else state
    return f"GPU, {record['gpu_item']}: {record['claim']}", text.replace("|", "\\|")


def _planted(content: object, source: str) -> tuple[str, str]:
    rows = check(content, PlantedRecord, source)["planted"].values()
    largest = max((row["worse"][0]["ratio"] - 1 for row in rows if row["worse"]), default=0.0)
    found = sum(bool(row["worse"]) for row in rows)
    return (
        "regressions planted for `make bench-against`",
        f"{found} of {len(rows)} found, the largest at {largest:+.1%}",
    )


def _same(content: object, source: str) -> tuple[str, str]:
    rows = check(content, SameRecord, source)["same"]
    alarms = sum(bool(row["worse"]) for row in rows)
    loads = [row["load"] for row in rows]
    text = f"{alarms} alarms in {len(rows)} comparisons at load averages of {min(loads):.1f} to {max(loads):.1f}"
    return "a commit beside itself by `make bench-against`", text


# The key by which a kind of record is known -> its subject and headline, of a content that is checked there.
DESCRIBED_BY: dict[str, Callable[[object, str], tuple[str, str]]] = {
    "seeds": _reproduced,
    "stages": _steps,
    "phases": _memory,
    "strategies": _ablation,
    "stages_beside": _supervised,
    "figures": _peer,
    "gpu_item": _gpu,
    "planted": _planted,
    "same": _same,
}


@options.command()
@click.option("--check", is_flag=True, help="Only say whether the pages are up to date.")
def main(check: bool) -> None:
    """Write results/README.md and recipes/README.md."""
    recipes = ROOT / "recipes"
    pages = {RESULTS / "README.md": page(RESULTS), recipes / "README.md": recipe_index.page(recipes)}
    for file, text in pages.items():
        name = os.path.relpath(file, ROOT)
        if not check:
            file.write_text(text, encoding="utf-8")
            print(f"written to {name}")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{name} is out of date: `make results-index`")


if __name__ == "__main__":
    guarded(main)
