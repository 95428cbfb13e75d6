"""Tables and lists of a report: figures with verdicts, costs, policies, findings, provenance."""

import datetime
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf.recipe import as_yaml, published
from rlhf.recipe.pinned import EDITED
from rlhf.recipe.published import Figure, Verdict
from rlhf.recipe.stages import EVALUATE, STAGES
from rlhf.report.records import TITLES, RunRecords
from rlhf.run import comparisons, reader
from rlhf.run.layout import FINDINGS
from rlhf.run.records import DataRead, FindingLine, Manifest, Summary
from rlhf.terminal import wording


class Cell(NamedTuple):
    """A cell of a table. One that judges has a `kind`: good or bad."""

    text: str
    kind: str = ""


class Table(NamedTuple):
    """A table: its heading, its rows, and from which column on cells are numbers, aligned at the right."""

    columns: Sequence[str]
    rows: list[list[Cell]]
    numbers: int = 99


def table(columns: Sequence[str], rows: Sequence[Sequence[str | Cell]], numbers: int = 99) -> Table | None:
    """Return a table without empty columns; None without rows."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i].text for row in cells)]
    numbers -= sum(i < numbers for i in range(len(columns)) if i not in kept)
    return Table([columns[i] for i in kept], [[row[i] for i in kept] for row in cells], numbers) if rows else None


def figures(summaries: Mapping[str, Summary], price: float | None) -> Table | None:
    """Return targets and published figures beside measured values; `price` is in dollars per hour of one card."""
    rows = [_figure(TITLES[stage], *compared) for stage, summary in summaries.items() for compared in summary.figures]
    rows += [_figure("all", *total) for total in comparisons.totals(summaries, price)]
    is_published = any(compared.figure.guide for summary in summaries.values() for compared in summary.figures)
    heading = "published" if is_published else "target"
    return table(("stage", "figure", heading, "measured", "verdict"), rows)


def _figure(stage: str, figure: Figure, value: float | None, verdict: Verdict) -> list[str | Cell]:
    """Return the cells of a figure."""
    kind = "good" if verdict.word in published.GOOD else "bad" if verdict.word in published.BAD else ""
    return [stage, figure.title, figure.text(), wording.number(value), Cell(str(verdict), kind)]


def costs(run: RunRecords) -> Table | None:
    """Return memory, time and speed of each finished stage, measured beside predicted and published."""
    rows = []
    for stage, summary in run.summaries.items():
        phases = sorted(summary.phase_seconds.items(), key=lambda item: -item[1])
        most = ", ".join(f"{name} {seconds / summary.wall_seconds:.0%}" for name, seconds in phases if "/" not in name)
        for index, cost in enumerate(comparisons.costs(summary)):
            rows.append([*(("", "") if index else (TITLES[stage], most)), *cost])
    return table(("stage", "where the time went", "", "measured", "predicted", "published"), rows, numbers=3)


def policies(summaries: Mapping[str, Summary]) -> Table | None:
    """Return the metrics of every policy, and of the reward models, with 95 % intervals in brackets."""
    metrics: Mapping[str, float | None] = summaries[EVALUATE].metrics if EVALUATE in summaries else {}
    owners = [*dict.fromkeys(key.partition("/")[0] for key in metrics if "/" in key)]
    names = wording.without_ends(dict.fromkeys(key.partition("/")[2] for key in metrics if "/" in key))
    rows = [
        [wording.metric(name), *(wording.estimate(metrics, f"{owner}/{name}") for owner in owners)] for name in names
    ]
    return table(("metric", *owners), rows, numbers=1)


def findings(run: RunRecords) -> tuple[list[str], str]:
    """Return what checks found while stages trained with what to try, and what was not checked to its end, in words."""
    found, unchecked = [], []
    for stage in (stage for stage in STAGES if stage in run.manifests):
        title = TITLES[stage]
        if stage not in run.summaries or run.summaries[stage].findings is None:
            unchecked.append(title)
        for line in reader.read_lines(run.directory / stage / FINDINGS, FindingLine):
            found.append(f"{title}, step {line.step}: {line.seen}. {line.cause}.")
    return found, f"not checked to the end: {', '.join(unchecked)}" if unchecked else ""


def settings(values: Mapping[str, object]) -> list[str]:
    """Return keys and values of a recipe as they follow `--set`."""
    return [f"{key}={as_yaml(value)}" for key, value in values.items()]


def provenance(run: RunRecords) -> Table | None:
    """Return what the stages were made from: what all share once, and what differs by stage."""
    facts = {stage: _facts(manifest) for stage, manifest in run.manifests.items()}
    rows: list[tuple[str, str, str]] = []
    for name in next(iter(facts.values())):
        values = {TITLES[stage]: of_stage[name] for stage, of_stage in facts.items() if of_stage[name]}
        for value in dict.fromkeys(values.values()):
            of = [title for title, other in values.items() if other == value]
            rows.append((name, "" if len(of) == len(facts) else ", ".join(of), value))
    return table(("", "stages", "value"), rows)


def _facts(manifest: Manifest) -> dict[str, str]:
    """Return what a stage was made from, by name."""
    return {
        "recipe": f"{manifest.recipe} {manifest.version}, sha256 {manifest.recipe_sha256[:12]}",
        "changed": ", ".join([EDITED] * bool(manifest.released_sha256) + [*settings(manifest.overrides)]),
        "seed": str(manifest.seed),
        "code": (manifest.code.commit or "no commit known") + " with changes" * bool(manifest.code.dirty),
        "device": manifest.device.text(),
        "data": _data(manifest.data) if manifest.data else "",
        "packages": ", ".join(f"{name} {version}" for name, version in manifest.packages.items()),
        "started": manifest.started or "",
        "command": " ".join(manifest.argv),
    }


def _data(data: DataRead) -> str:
    """Return the numbers of rows that a stage read, and their hash."""
    counts = {"pairs": data.pairs, "demonstrations": data.examples, "prompts": data.prompts, "texts": data.documents}
    rows = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return f"{rows}, sha256 {data.sha256[:12]}"


def duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds; a record may hold more than Python can count."""
    return str(datetime.timedelta(seconds=min(round(seconds), 10**13)))
