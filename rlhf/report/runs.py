"""The records of runs that a report is made from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from rlhf.errors import UserError
from rlhf.recipe import STAGES, StageName
from rlhf.run import reader
from rlhf.run.layout import MANIFEST, METRICS, SUMMARY
from rlhf.run.outcomes import Details
from rlhf.run.records import Manifest, MetricsLine, Record, Summary
from rlhf.terminal import wording

RecordT = TypeVar("RecordT", bound=Record)


class RunRecords(NamedTuple):
    """The records in the run directory of one recipe version, by stage.

    `price` is in dollars per hour of one card. `problems` says which records could not be read.
    """

    name: str
    run_directory: Path
    manifests: dict[str, Manifest]
    summaries: dict[str, Summary]
    price: float | None = None
    problems: tuple[str, ...] = ()


def load(run_directory: Path) -> RunRecords:
    """Read the records of a run. Raises UserError if none can be read."""
    problems: list[str] = []
    manifests = _of_stages(run_directory, MANIFEST, Manifest, problems)
    summaries = _of_stages(run_directory, SUMMARY, Summary, problems)
    if not manifests:
        missing = f"{run_directory}: no run there; it should hold folders named {', '.join(STAGES[:3])} …"
        raise UserError(problems[0] if problems else missing)
    readable = {stage: summary for stage, summary in summaries.items() if stage in manifests}
    return RunRecords(
        "/".join(run_directory.resolve().parts[-3:]), run_directory, manifests, readable, problems=tuple(problems)
    )


def _of_stages(run_directory: Path, name: str, kind: type[RecordT], problems: list[str]) -> dict[str, RecordT]:
    """Return the record `name` of each stage that has one. Files that cannot be read are added to `problems`."""
    by_stage: dict[str, RecordT] = {}
    for stage in STAGES:
        try:
            record = reader.read(run_directory / stage / name, kind)
        except UserError as error:
            problems.append(str(error))
            continue
        if record is not None:
            by_stage[stage] = record
    return by_stage


def metrics(run: RunRecords, stage: StageName) -> list[MetricsLine]:
    """Return the lines of a stage's metrics.jsonl."""
    return reader.read_lines(run.run_directory / stage / METRICS, MetricsLine)


def details(run: RunRecords) -> Details:
    """Return the evaluation's details.json, without content if there is none."""
    return reader.read(run.run_directory / "evaluate" / "details.json", Details) or Details()


def suffix(run: RunRecords, runs: Sequence[RunRecords]) -> str:
    """Return the end of a title that names the run, if there are several."""
    return f": {run.name}" if len(runs) > 1 else ""


def with_interval(metrics: Mapping[str, float | None], policy: str, metric: str) -> str:
    """Return a policy's metric as text, with its interval if there is one; "" without such a metric."""
    value, low, high = (metrics.get(f"{policy}/{metric}{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f" ({wording.number(low)} to {wording.number(high)})"
    return "" if value is None else wording.number(value) + interval
