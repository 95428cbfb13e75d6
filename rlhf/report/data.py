"""The section about the data: signs of bad data in what the runs were trained on, and how long its texts are."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.data import formats
from rlhf.data.quality import check as quality
from rlhf.data.quality import spread
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.observe import console
from rlhf.report.parts import Cell, Chart, Charts, Section, Table, table
from rlhf.report.runs import RunRecords, suffix
from rlhf.run import reader, records
from rlhf.run.finished import data_file
from rlhf.run.provenance import code_version


class Checked(NamedTuple):
    """What a check of a run's data says, or why there is none."""

    signs: Table | None
    dropped: str
    lengths: list[Chart]
    problem: str = ""


def data(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """What a check of each run's data says."""
    shown = []
    for run in runs:
        found = checked(run)
        if isinstance(found, str):
            shown.append(Checked(None, "", [], f"{run.name}: {found}"))
        elif found is not None:
            shown.append(_checked(run, found, runs, charts))
    return [Section("Data quality", "data.html", shown)] if shown else []


def _checked(run: RunRecords, found: Mapping[str, Any], runs: Sequence[RunRecords], charts: Charts) -> Checked:
    marks = {"error": "bad", "warning": "warn"}
    rows = [
        (run.name, line["name"], line["value"], Cell(line["hint"], marks.get(line["severity"], "")))
        for line in found["table"]
        if line["value"] != "0"
    ]
    signs = table(("run", "sign", "found", "hint"), rows, len(runs) > 1)
    dropped = (next(iter(run.manifests.values())).get("data") or {}).get("dropped") or {}
    left = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in dropped.items())
    drawn = []
    for part, lengths in found["lengths"].items():
        bars = {"type": "bar", "x": [f"≤ {end:,}" for end in lengths["upto"]], "y": lengths["counts"]}
        title = f"{found['unit']} per {part}{suffix(run, runs)}"
        drawn.append(charts.add(title, [bars | {"showlegend": False}], bargap=0.05))
    return Checked(signs, left, drawn)


def checked(run: RunRecords) -> dict[str, Any] | str | None:
    """What a check of the run's data says, made once and kept beside it, or why there is none; None for stand-ins.

    Lengths are in tokens where the run has a tokenizer of its own, otherwise in words.
    """
    manifest = next((m for m in run.manifests.values() if m.get("data") and m["settings"].get("data")), None)
    if manifest is None or manifest["settings"]["data"]["source"] == "lengths":
        return None
    file, facts, settings = run.path / "data" / "quality.json", manifest["data"], manifest["settings"]
    tokenizer = run.path / "pretrain" / "model"
    count, unit = (spread.tokens(tokenizer), "tokens") if tokenizer.is_dir() else (spread.words, "words")
    split = {"seed": manifest["seed"], "fraction": settings["data"]["heldout_fraction"]}
    made_from = {"data": facts["sha256"], "unit": unit, "code": code_version()["commit"], **split}
    known = reader.read(file, records.Quality)
    if known and known["made_from"] == made_from:
        return known
    with console.working(f"{run.name}: checking its data"):
        try:
            rows = _rows(settings["data"], [str(data_file(run.path, entry["name"])) for entry in facts["files"]])
        except (UserError, OSError) as error:
            return f"its data cannot be checked any more: {error}"
        if [entry.sha256 for entry in rows.report.files] != [entry["sha256"] for entry in facts["files"]]:
            return "its data has changed since; what it was trained on cannot be checked any more"
        found = quality.check(rows, **split, count=count, unit=unit).to_dict() | {"made_from": made_from}
    try:
        file.parent.mkdir(exist_ok=True)
        write_json(file, found)
    except OSError:
        pass  # a page about a run that cannot be written to is checked anew each time
    return found


def _rows(data: Mapping[str, Any], files: list[str]) -> formats.Rows:
    """What a run read, read again."""
    if data["source"] == "hub":
        where = {"data_dir": data.get("data_dir"), "format": data.get("format", "auto")}
        return formats.read_hub(data["name"], data["revision"], on_bad_row="skip", **where)
    return formats.read(files, on_bad_row="skip", format=data.get("format", "auto"))
