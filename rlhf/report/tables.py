"""Sections of tables and lists: figures with verdicts, findings, provenance."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf.errors import UserError
from rlhf.observe import watch
from rlhf.recipe import StageName, as_yaml, published
from rlhf.recipe.published import Figure, Verdict
from rlhf.recipe.released import difference
from rlhf.recipe.stages import STAGES
from rlhf.report.parts import Cell, Charts, Section, table
from rlhf.report.runs import RunRecords, metrics, trusted_summaries
from rlhf.run import reader, records
from rlhf.run.evidence import gains_over_start
from rlhf.run.finished import totals
from rlhf.run.layout import FINDINGS
from rlhf.stages.online.reward_functions import FIGURE_TITLES
from rlhf.terminal import wording
from rlhf.terminal.wording import GB


def sections_of_verdicts(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the table of targets or published figures beside the measured values."""
    rows: list[tuple[object, ...]] = []
    for run in runs:
        for stage, summary in run.summaries.items():
            for target in summary.targets:
                predicted = summary.predicted_peak_vram_bytes if target.metric == "peak_vram_gb" else None
                rows.append(
                    (run.name, stage, *_figure_cells(target.figure, target.measured, target.outcome, predicted))
                )
        for figure, value, verdict in totals(run.summaries, run.price):
            rows.append((run.name, "all", *_figure_cells(figure, value, verdict, None)))
    has_guide = any(target.guide for run in runs for summary in run.summaries.values() for target in summary.targets)
    is_published = has_guide or any(row[1] == "all" for row in rows)
    columns = ("run", "stage", "figure", "published" if is_published else "target", "predicted", "measured", "verdict")
    title = "Published figures and what was measured" if is_published else "Targets and what was measured"
    verdict_table = table(columns, rows, len(runs) > 1, numbers=(4, 5))
    return [Section(title, "table.html", verdict_table)] if verdict_table else []


def _figure_cells(figure: Figure, value: float | None, verdict: Verdict, predicted: float | None) -> tuple[object, ...]:
    """Return the cells of a figure: its name and range, the predicted GB, the measured value and the verdict."""
    expected = f"{predicted / GB:.2f}" if predicted else ""
    kinds = {published.MISSED: "bad"} | dict.fromkeys(published.GOOD, "good")
    verdict_cell = Cell(str(verdict), kinds.get(verdict.word, ""))
    return (figure.title, figure.text(in_full=True), expected, wording.number(value), verdict_cell)


def sections_of_rewards(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return what the named rewards counted, such as the calls of a judge and what they cost."""
    rows: list[tuple[object, ...]] = [
        (run.name, stage, title, wording.number(value))
        for run in runs
        for stage, summary in run.summaries.items()
        for name, title in FIGURE_TITLES.items()
        if (value := summary.metrics.get(name)) is not None
    ]
    counted = table(("run", "stage", "what", "in the run"), rows, len(runs) > 1, numbers=(3,))
    return [Section("What the rewards counted", "table.html", counted)] if counted else []


class FindingText(NamedTuple):
    """A finding of a check while a stage trained, as the page shows it, and settings to try."""

    text: str
    remedies: str


class Findings(NamedTuple):
    """All findings; `watched` if every stage was checked to its end.

    `short` names the checks of each finished stage that had too few logged rows to tell anything.
    """

    findings: list[FindingText]
    watched: bool
    short: list[str]


def sections_of_findings(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the findings of the checks while the stages trained."""
    rows, short = [], []
    for run in runs:
        gains = {gain.stage: gain for gain in gains_over_start(trusted_summaries(run))}
        for stage in (stage for stage in STAGES if stage in run.manifests):
            stage_name = f"{run.name}, {stage}" if len(runs) > 1 else stage
            if stage in run.summaries and (unused := _unused_checks(run, stage)):
                short.append(f"{stage_name}: {', '.join(unused)}")
            for line in reader.read_lines(run.run_directory / stage / FINDINGS, records.FindingLine):
                said = f"{stage_name}, step {line.step}: {line.seen}."
                if watch.refuted(line.check, gain := gains.get(stage)) and gain:
                    rows.append(FindingText(f"{said} It has learned since: {gain.name} {gain.in_words()}.", ""))
                    continue
                rows.append(FindingText(f"{said} {line.cause}.", " or ".join(_settings(line.remedies))))
    watched = all(summary.findings is not None for run in runs for summary in run.summaries.values())
    finished = all(run.summaries.keys() == run.manifests.keys() for run in runs)
    title = "Findings during training"
    return [Section(title, "findings.html", Findings(rows, watched and finished, short))]


def _unused_checks(run: RunRecords, stage: StageName) -> list[str]:
    """Return the checks that a stage has logged too few rows for; none if its log cannot be read, which is said."""
    try:
        lines = metrics(run, stage)
    except UserError:
        return []
    trained = [line for line in lines if any(not key.startswith("eval/") for key in line.values)]
    return watch.unused_checks(stage, len(trained))


def sections_of_provenance(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the recipe, code, data and packages that each stage was made from."""
    rows = []
    for run in runs:
        for stage, manifest in run.manifests.items():
            facts = {
                "recipe": f"{manifest.recipe} {manifest.version}, sha256 {manifest.recipe_sha256[:12]}",
                "changed": changes(manifest),
                "seed": manifest.seed,
                "code": (manifest.code.commit or "no commit known") + " with changes" * bool(manifest.code.dirty),
                "device": manifest.device.name,
                "data": _data_text(manifest.data) if manifest.data else "none",
                "parents from": ", ".join(f"{k}: {v}" for k, v in manifest.parents_from.items()) or "this run",
                "packages": ", ".join(f"{name} {version}" for name, version in manifest.packages.items()),
                "state": run.state(stage),
            }
            rows.append((run.name, stage, "; ".join(f"{key}: {value}" for key, value in facts.items())))
    provenance_table = table(("run", "stage", "provenance"), rows, len(runs) > 1)
    return [Section("Provenance", "table.html", provenance_table)]


def changes(manifest: records.Manifest) -> str:
    """Return what of a stage's recipe was changed: its file after the release, and keys by options; or "nothing"."""
    edited = difference(manifest.recipe_sha256, manifest.released_sha256)
    of_file = [f"the recipe's file, which {edited}"] if edited else []
    return ", ".join((*of_file, *_settings(manifest.overrides))) or "nothing"


def _settings(values: Mapping[str, object]) -> list[str]:
    """Return keys and values of a recipe as they follow `--set`."""
    return [f"{key}={as_yaml(value)}" for key, value in values.items()]


def _data_text(data: records.DataRead) -> str:
    """Return the numbers of rows that a stage read, and their hash."""
    rows = f"{data.pairs:,} pairs, {data.examples:,} demonstrations, {data.prompts:,} prompts, {data.documents:,} texts"
    return f"{rows}, sha256 {data.sha256[:12]}"
