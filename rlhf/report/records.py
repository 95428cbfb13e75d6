"""The records of a run that its report is made from."""

from pathlib import Path
from typing import NamedTuple, TypeVar

from rlhf.errors import UserError
from rlhf.recipe.stages import EVALUATE, POLICIES, SFT, STAGE_TABLE, STAGES, StageName
from rlhf.run import reader
from rlhf.run.finished import finished_evaluation
from rlhf.run.layout import MANIFEST, METRICS, SAMPLES, SUMMARY
from rlhf.run.records import Manifest, MetricsLine, Record, SampleLine, Summary

TITLES: dict[str, str] = {stage: row.title for stage, row in STAGE_TABLE.items()}
RecordT = TypeVar("RecordT", bound=Record)


class RunRecords(NamedTuple):
    """The records in a run directory, by stage; `problems` names what could not be read, or has changed since."""

    directory: Path
    manifests: dict[str, Manifest]
    summaries: dict[str, Summary]
    samples: list[SampleLine]  # of the evaluation, or else the newest of a policy
    problems: list[str]

    @property
    def title(self) -> str:
        """Return the recipe's name and version."""
        manifest = next(iter(self.manifests.values()))
        return f"{manifest.recipe} {manifest.version}"

    def metrics(self, stage: str) -> list[MetricsLine]:
        """Return the lines of a stage's metrics.jsonl."""
        return reader.read_lines(self.directory / stage / METRICS, MetricsLine)


def load(directory: Path) -> RunRecords:
    """Read the records of a run; one that is damaged, or an evaluation that has changed since, is left out and named.

    Raises UserError if there is no run, or if none of its records can be read.
    """
    problems: list[str] = []
    manifests = _of_stages(directory, MANIFEST, Manifest, problems)
    found = _of_stages(directory, SUMMARY, Summary, problems)
    if not manifests:
        raise UserError(problems[0] if problems else f"{directory}: no run there; `rlhf run STAGE` makes one")
    summaries = {stage: summary for stage, summary in found.items() if stage in manifests}
    samples: list[SampleLine] = []
    try:
        if EVALUATE in summaries:
            finished_evaluation(directory)
        stages: tuple[StageName, ...] = (EVALUATE, *POLICIES, SFT)
        logs = (reader.read_lines(directory / stage / SAMPLES, SampleLine) for stage in stages)
        samples = next(filter(None, logs), [])
    except UserError as error:
        problems.append(str(error))
        summaries.pop(EVALUATE, None)
    newest = max((line.step for line in samples), default=0)
    samples = [line for line in samples if line.step == newest]
    return RunRecords(directory, manifests, summaries, samples, problems)


def _of_stages(directory: Path, name: str, kind: type[RecordT], problems: list[str]) -> dict[str, RecordT]:
    """Return the record `name` of each stage that has one; why one cannot be read is added to `problems`."""
    by_stage: dict[str, RecordT] = {}
    for stage in STAGES:
        try:
            record = reader.read(directory / stage / name, kind)
        except UserError as error:
            problems.append(str(error))
            continue
        if record is not None:
            by_stage[stage] = record
    return by_stage
