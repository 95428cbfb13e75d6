"""A recipe once per seed, in fresh processes, and what the seeds agree on."""

import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.observe import console
from rlhf.process import endings
from rlhf.recipe import POLICIES, STAGES, Loaded, parents, published
from rlhf.recipe.published import NOT_COMPARABLE, NOT_MEASURED, Figure, Verdict, compare
from rlhf.run import reader, records
from rlhf.run.finished import read_manifest, read_summary


def chain(loaded: Loaded, until: Sequence[str]) -> list[str]:
    """The stages of a recipe that lead to `until`, in order."""
    wanted = {*until, *(parent for stage in until for parent in parents(loaded.recipe, stage))}
    return [stage for stage in STAGES if stage in wanted]


def final_stages(loaded: Loaded) -> list[str]:
    """Return the stages that train a policy, and evaluate where one of the recipe's targets is about it."""
    policies = [stage for stage in POLICIES if loaded.recipe.section(stage) is not None]
    return [*policies, *(["evaluate"] if any(target.stage == "evaluate" for target in loaded.targets) else [])]


def run_seeds(stages: Sequence[str], seeds: Sequence[int], out: Path, options: Sequence[str]) -> None:
    """`rlhf run` for every seed and stage; what is done is kept, what was interrupted is resumed."""
    for seed in seeds:
        for stage in stages:
            arguments = ["run", stage, "--if-needed", "--resume", "--seed", str(seed), "--out", str(root(out, seed))]
            if endings.run_child([sys.executable, "-m", "rlhf.cli", *arguments, *options]):
                again = shlex.join(["rlhf", *arguments, *options])
                raise UserError(
                    f"seed {seed} stopped in {stage}; nothing is lost: mend it and run this again ({again})"
                )


def record(
    loaded: Loaded, stages: Sequence[str], seeds: Sequence[int], out: Path, price: float | None = None
) -> dict[str, Any]:
    """Every seed's summaries with what they were measured on; also written to `<out>/<recipe>-<version>.json`.

    `price`: dollars for an hour of one card.

    Raises UserError when the stages were not all run by the same code, packages and device.
    """
    folders = {seed: root(out, seed) / loaded.name / loaded.version for seed in seeds}
    manifests = [read_manifest(folder / stage) for folder in folders.values() for stage in stages]
    measured_on = [{key: m.get(key) for key in ("code", "packages", "python", "device")} for m in manifests]
    if any(found != measured_on[0] for found in measured_on):
        raise UserError(f"{out}: not all stages were run by the same code, packages and device; choose another --out")
    found = {
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "modified": loaded.modified,
        **measured_on[0],
        "price_per_hour": price,
        "seeds": {
            str(seed): {stage: read_summary(folder / stage) for stage in stages} for seed, folder in folders.items()
        },
    }
    write_json(out / f"{loaded.name}-{loaded.version}.json", found)
    return found


def show(found: dict[str, Any], out: Path) -> None:
    """Print the table of a record, and where `record` has written it below `out`."""
    title = f"{found['recipe']} {found['version']}, seeds {' '.join(found['seeds'])}"
    columns, *body = rows(found)
    console.rows_table(title, columns, body)
    file = out / f"{found['recipe']}-{found['version']}.json"
    console.OUT.print(f"written to {file}", style="dim", markup=False)


def table_of(file: Path) -> str:
    """The Markdown table of a record that `record` wrote. Raises UserError where the file is none."""
    found = reader.read(file, records.Reproduced)
    if found is None or not found["seeds"]:
        raise UserError(f"{file}: not a record of `rlhf reproduce`, or one without seeds")
    return markdown(found)


def markdown(found: dict[str, Any]) -> str:
    """The same table for a document, with what it was measured on."""
    columns, *body = rows(found)
    lines = [columns, ("---",) * len(columns), *body]
    device, packages = found["device"], found["packages"]
    where = f"{device['name']}, {device.get('threads', '?')} thread(s)" if device["type"] == "cpu" else device["name"]
    measured = (
        f"Measured by `rlhf reproduce`: recipe {found['recipe']} {found['version']} ({found['recipe_sha256'][:12]}), "
        f"{where}, commit {(found['code']['commit'] or 'unknown')[:12]}, torch {packages['torch']}, "
        f"transformers {packages['transformers']}, trl {packages['trl']}, peft {packages['peft']}."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{measured}\n"


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Header; then for each figure what it asks, each seed's value, mean ± sample deviation, verdict; and the times.

    Figures of all stages together come last.
    """
    seeds = list(found["seeds"])
    runs = list(found["seeds"].values())
    of_all = [published.totals(run, found.get("price_per_hour")) for run in runs]
    guided = any(entry.get("guide") for run in runs for summary in run.values() for entry in summary["targets"])
    asking = "published" if guided or of_all[0] else "target"
    table: list[tuple[str, ...]] = [
        ("stage", "metric", asking, *(f"seed {seed}" for seed in seeds), "mean ± sd", "verdict")
    ]
    walls = []
    for summaries in zip(*(run.values() for run in runs), strict=True):
        stage = summaries[0]["stage"]
        for entries in zip(*(summary["targets"] for summary in summaries), strict=True):
            figure = published.recorded(entries[0])
            values = [entry["measured"] for entry in entries]
            table.append(_row(stage, figure, values, [compare(figure, value) for value in values]))
        walls.append([summary["wall_seconds"] for summary in summaries])
        table.append(
            (stage, "wall time, s", "", *(f"{w:.0f}" for w in walls[-1]), f"{statistics.mean(walls[-1]):.0f}", "")
        )
    for compared in zip(*of_all, strict=True):
        values, verdicts = [value for _, value, _ in compared], [verdict for *_, verdict in compared]
        table.append(_row("all", compared[0][0], values, verdicts))
    totals = [sum(times) for times in zip(*walls, strict=True)]
    table.append(("all", "wall time, s", "", *(f"{t:.0f}" for t in totals), f"{statistics.mean(totals):.0f}", ""))
    return table


def _row(stage: str, figure: Figure, values: Sequence[float | None], verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    ask, verdict = judged(figure, values, verdicts)
    return (stage, figure.title, ask, *map(console.number, values), spread(values), verdict)


def judged(figure: Figure, values: Sequence[float | None], verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """What a figure asks of each seed and of their mean; how many seeds reach it, and whether the mean does."""
    ask = console.asked(figure)
    if figure.range_of_mean:
        ask += f"; mean {console.span(*figure.range_of_mean)}"
    if all(verdict.word in (NOT_COMPARABLE, NOT_MEASURED) for verdict in verdicts):
        return ask, str(verdicts[0])
    verdict = published.count(verdicts)
    if None not in values and (figure.guide or figure.range_of_mean):
        mean = statistics.mean(value for value in values if value is not None)
        of_mean = figure.model_copy(update={"range": figure.range_of_mean or figure.range})
        found = compare(of_mean, mean)
        verdict += f", mean {found.with_distance if figure.guide and found.detail else found.word}"
    return ask, verdict


def spread(values: Sequence[float | None]) -> str:
    """`mean ± sd` of the values that are there."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "-"
    deviation = f" ± {console.number(statistics.stdev(known))}" if len(known) > 1 else ""
    return console.number(statistics.mean(known)) + deviation


def root(out: Path, seed: int) -> Path:
    return out / f"seed-{seed}"
