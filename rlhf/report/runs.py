"""The records of runs that a report is made from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.errors import UserError
from rlhf.observe import console
from rlhf.recipe import STAGES
from rlhf.run import reader, records


class RunRecords(NamedTuple):
    """What a run directory of one recipe version holds, by stage, and why a record of it could not be read."""

    name: str
    path: Path
    manifests: dict[str, dict[str, Any]]
    summaries: dict[str, dict[str, Any]]
    price: float | None = None  # dollars for an hour of one card
    problems: tuple[str, ...] = ()


def load(root: Path) -> RunRecords:
    """Read the records of a run. Raises UserError where there is none that can be read."""
    problems = []

    def of(name: str, kind: type[records.Record]) -> dict[str, dict[str, Any]]:
        found = {}
        for stage in STAGES:
            try:
                content = reader.read(root / stage / name, kind)
            except UserError as error:
                problems.append(str(error))
                continue
            if content is not None:
                found[stage] = content
        return found

    manifests, summaries = of("manifest.json", records.Manifest), of("summary.json", records.Summary)
    if not manifests:
        missing = f"{root}: no run there; it should hold folders named {', '.join(STAGES[:3])} …"
        raise UserError(problems[0] if problems else missing)
    known = {stage: summary for stage, summary in summaries.items() if stage in manifests}
    return RunRecords("/".join(root.resolve().parts[-3:]), root, manifests, known, problems=tuple(problems))


def metrics(run: RunRecords, stage: str) -> list[dict[str, Any]]:
    """Return the lines of a stage's metrics.jsonl."""
    return reader.read_lines(run.path / stage / "metrics.jsonl", records.MetricsLine)


def details(run: RunRecords) -> dict[str, Any]:
    """Return the evaluation's details.json, {} without one."""
    return reader.read(run.path / "evaluate" / "details.json", records.Details) or {}


def suffix(run: RunRecords, runs: Sequence[RunRecords]) -> str:
    """Return the end of a title that names the run, where there are several."""
    return f": {run.name}" if len(runs) > 1 else ""


def with_interval(metrics: Mapping[str, Any], policy: str, metric: str) -> str:
    """Return a policy's metric, with its interval where there is one; "" where it has no such metric."""
    value, low, high = (metrics.get(f"{policy}/{metric}{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f" ({console.number(low)} to {console.number(high)})"
    return "" if value is None else console.number(value) + interval
