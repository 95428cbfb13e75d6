"""Sections that are tables and lists: figures with verdicts, findings, provenance."""

from collections.abc import Sequence
from typing import NamedTuple

from rlhf.observe import console
from rlhf.recipe import published
from rlhf.recipe.published import DIFFERS, Figure, Verdict
from rlhf.report.parts import Cell, Charts, Section, table
from rlhf.report.runs import RunRecords
from rlhf.run import reader, records


def verdicts(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Every target or published figure, and what was measured."""
    rows: list[tuple[object, ...]] = []
    for run in runs:
        for stage, summary in run.summaries.items():
            for entry in summary["targets"]:
                is_peak = entry.get("metric") == "peak_vram_gb"
                predicted = summary.get("predicted_peak_vram_bytes") if is_peak else None
                figure = published.recorded(entry)
                row = _compared(figure, entry["measured"], published.verdict_of(entry), predicted)
                rows.append((run.name, stage, *row))
        for figure, value, verdict in published.totals(run.summaries, run.price):
            rows.append((run.name, "all", *_compared(figure, value, verdict, None)))
    guided = any(entry.get("guide") for run in runs for s in run.summaries.values() for entry in s["targets"])
    asked = "published" if guided or any(row[1] == "all" for row in rows) else "target"
    columns = ("run", "stage", "figure", asked, "predicted", "measured", "verdict")
    title = "Published figures and what was measured" if asked == "published" else "Targets and what was measured"
    shown = table(columns, rows, len(runs) > 1, numbers=(4, 5))
    return [Section(title, "table.html", shown)] if shown else []


def _compared(figure: Figure, value: float | None, verdict: Verdict, predicted: int | None) -> tuple[object, ...]:
    """Return the cells of a figure: name, what it says, predicted GB, measured, and the verdict."""
    expected = f"{predicted / published.GB:.2f}" if predicted else ""
    kind = {DIFFERS: "warn"} | dict.fromkeys(published.GOOD, "good") | dict.fromkeys(published.BAD, "bad")
    verdict_cell = Cell(str(verdict), kind.get(verdict.word, ""))
    return (figure.title, console.figure_text(figure, in_full=True), expected, console.number(value), verdict_cell)


class Finding(NamedTuple):
    """What a check found while a stage trained, and settings to try."""

    text: str
    remedies: str


class Findings(NamedTuple):
    found: list[Finding]
    watched: bool  # all stages, to their ends


def findings(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """What the checks found while the stages trained."""
    found = []
    for run in runs:
        for stage in run.manifests:
            for row in reader.read_lines(run.path / stage / "findings.jsonl", records.FindingLine):
                remedies = ", ".join(f"{key}={value}" for key, value in row["remedies"].items())
                where = f"{run.name}, {stage}" if len(runs) > 1 else stage
                found.append(Finding(f"{where}, step {row['step']}: {row['seen']}. {row['cause']}.", remedies))
    watched = all("findings" in summary for run in runs for summary in run.summaries.values())
    done = all(run.summaries.keys() == run.manifests.keys() for run in runs)
    title = "What looked wrong while it trained"
    return [Section(title, "findings.html", Findings(found, watched and done))]


def provenance(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """What each stage was made by and from."""
    rows = []
    for run in runs:
        for stage, manifest in run.manifests.items():
            data = manifest.get("data") or {}
            facts = {
                "recipe": f"{manifest['recipe']} {manifest['version']}, sha256 {manifest['recipe_sha256'][:12]}",
                "changed": ", ".join(f"{key}={value}" for key, value in manifest["overrides"].items()) or "nothing",
                "seed": manifest["seed"],
                "code": f"{manifest['code']['commit']}{' with changes' if manifest['code']['dirty'] else ''}",
                "device": manifest["device"]["name"],
                "data": f"{data.get('pairs', 0):,} pairs, {data.get('examples', 0):,} instructions, "
                f"{data.get('documents', 0):,} texts, sha256 {str(data.get('sha256'))[:12]}",
                "parents from": ", ".join(f"{k}: {v}" for k, v in manifest.get("parents_from", {}).items())
                or "this run",
                "packages": ", ".join(f"{name} {version}" for name, version in manifest["packages"].items()),
                "state": "done" if stage in run.summaries else "not finished",
            }
            rows.append((run.name, stage, "; ".join(f"{key}: {value}" for key, value in facts.items())))
    shown = table(("run", "stage", "what it was made by"), rows, len(runs) > 1)
    return [Section("Provenance", "table.html", shown)]
