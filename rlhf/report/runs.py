"""The records of runs that a report is made from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from rlhf.errors import UserError
from rlhf.recipe import StageName
from rlhf.recipe.stages import EVALUATE, STAGES
from rlhf.run import reader
from rlhf.run.evidence import HELDOUT_PROMPTS
from rlhf.run.finished import finished_evaluation
from rlhf.run.layout import MANIFEST, METRICS, SAMPLES, SUMMARY
from rlhf.run.outcomes import Details, SampleLine, by_prompt
from rlhf.run.records import Manifest, MetricsLine, Record, Summary

RecordT = TypeVar("RecordT", bound=Record)


class RunRecords(NamedTuple):
    """The records in the run directory of one recipe version, by stage.

    `price` is in dollars per hour of one card. `problems` says which records could not be read. `unreadable` are the
    stages whose summary.json is one of them: they may be done.
    """

    name: str
    run_directory: Path
    manifests: dict[str, Manifest]
    summaries: dict[str, Summary]
    price: float | None = None
    problems: tuple[str, ...] = ()
    unreadable: frozenset[str] = frozenset()

    def state(self, stage: str) -> str:
        """Return in words whether a stage is done."""
        if stage in self.summaries:
            return "done"
        return "summary.json cannot be read" if stage in self.unreadable else "not finished"


def load(run_directory: Path) -> RunRecords:
    """Read the records of a run. Raises UserError if none can be read."""
    manifests, damaged_manifests = _of_stages(run_directory, MANIFEST, Manifest)
    summaries, damaged_summaries = _of_stages(run_directory, SUMMARY, Summary)
    problems = (*damaged_manifests.values(), *damaged_summaries.values())
    if not manifests:
        missing = f"{run_directory}: no run there; `rlhf run STAGE` makes one: folders named {', '.join(STAGES[:3])} …"
        raise UserError(problems[0] if problems else missing)
    return RunRecords(
        name="/".join(run_directory.resolve().parts[-3:]),
        run_directory=run_directory,
        manifests=manifests,
        summaries={stage: summary for stage, summary in summaries.items() if stage in manifests},
        problems=problems,
        unreadable=frozenset(damaged_summaries),
    )


def _of_stages(run_directory: Path, name: str, kind: type[RecordT]) -> tuple[dict[str, RecordT], dict[str, str]]:
    """Return the record `name` of each stage that has one, and for each one that cannot be read the reason."""
    by_stage: dict[str, RecordT] = {}
    problems: dict[str, str] = {}
    for stage in STAGES:
        try:
            record = reader.read(run_directory / stage / name, kind)
        except UserError as error:
            problems[stage] = str(error)
            continue
        if record is not None:
            by_stage[stage] = record
    return by_stage, problems


def metrics(run: RunRecords, stage: StageName) -> list[MetricsLine]:
    """Return the lines of a stage's metrics.jsonl."""
    return reader.read_lines(run.run_directory / stage / METRICS, MetricsLine)


def check_evaluation(run: RunRecords) -> None:
    """Raise UserError if a finished evaluation, or a stage that it was made from, has changed since.

    An evaluation that is not finished is not checked: nothing says what belongs to it.
    """
    if EVALUATE in run.summaries:
        finished_evaluation(run.run_directory)


def trusted_summaries(run: RunRecords) -> Mapping[str, Summary]:
    """Return the summaries of a run without that of an evaluation that has changed, which other sections report.

    Its policies' figures have the number of their prompts, also where the evaluation is older than that metric.
    """
    try:
        check_evaluation(run)
    except UserError:
        return {stage: summary for stage, summary in run.summaries.items() if stage != EVALUATE}
    if EVALUATE not in run.summaries or any(key.endswith(HELDOUT_PROMPTS) for key in run.summaries[EVALUATE].metrics):
        return run.summaries
    lines = reader.read_lines(run.run_directory / EVALUATE / SAMPLES, SampleLine)
    counts = {f"{name}/{HELDOUT_PROMPTS}": len(by_prompt(lines)) for line in lines[:1] for name in line.answers}
    evaluated = run.summaries[EVALUATE]
    return {**run.summaries, EVALUATE: evaluated.model_copy(update={"metrics": evaluated.metrics | counts})}


def details(run: RunRecords) -> Details:
    """Return the evaluation's details.json, without content if there is none."""
    return reader.read(run.run_directory / EVALUATE / "details.json", Details) or Details()


def suffix(run: RunRecords, runs: Sequence[RunRecords]) -> str:
    """Return the end of a title that names the run, if there are several."""
    return f": {run.name}" if len(runs) > 1 else ""
