"""The section about the data: signs of bad data, and the lengths of the texts."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

from rlhf import stats
from rlhf.data import formats
from rlhf.data.prepare import Preparation
from rlhf.data.quality import check as quality
from rlhf.data.quality import spread
from rlhf.errors import UserError
from rlhf.files import sha256, write_json
from rlhf.recipe.choices import DataFormat, RatedPairs
from rlhf.recipe.stages import PRETRAIN
from rlhf.report.parts import Cell, Chart, Charts, Section, Table, Trace, table
from rlhf.report.runs import RunRecords, suffix
from rlhf.run import reader
from rlhf.run.finished import data_file
from rlhf.run.layout import MODEL
from rlhf.run.outcomes import Quality
from rlhf.run.packages import hash_of_modules
from rlhf.run.records import DataSettings, Manifest
from rlhf.terminal.progress import working


class DataCheck(NamedTuple):
    """The result of a check of a run's data, or the reason why there is none."""

    signs: Table | None
    dropped: str
    lengths: list[Chart]
    problem: str = ""


def sections_of_data(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the result of the check of each run's data."""
    checks = []
    for run in runs:
        result = quality_of(run)
        if isinstance(result, str):
            checks.append(DataCheck(None, "", [], f"{run.name}: {result}"))
        elif result is not None:
            checks.append(_data_check(run, result, runs, charts))
    return [Section("Data quality", "data.html", checks)] if checks else []


def _data_check(run: RunRecords, result: Quality, runs: Sequence[RunRecords], charts: Charts) -> DataCheck:
    """Return the table of signs, the numbers of dropped rows and the charts of lengths."""
    marks = {"error": "bad", "warning": "warn"}
    rows = [
        (run.name, line.name, line.value, Cell(line.hint, marks.get(line.severity, "")))
        for line in result.table
        if line.value != "0"
    ]
    signs = table(("run", "sign", "found", "hint"), rows, len(runs) > 1)
    manifest = _manifest_with_data(run)
    dropped = manifest.data.dropped if manifest and manifest.data else {}
    dropped_text = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in dropped.items())
    length_charts = []
    for part, lengths in result.lengths.items():
        bars = {"type": "bar", "x": [f"≤ {end:,}" for end in lengths.upto], "y": lengths.counts}
        title = f"{result.unit} per {part}{suffix(run, runs)}"
        axes: Trace = {"xaxis": {"title": {"text": result.unit}}, "yaxis": {"title": {"text": "texts"}}}
        length_charts.append(charts.add(title, [bars | {"showlegend": False}], bargap=0.05, **axes))
    return DataCheck(signs, dropped_text, length_charts)


def _manifest_with_data(run: RunRecords) -> Manifest | None:
    """Return the manifest of the first stage that read data, or None."""
    return next((m for m in run.manifests.values() if m.data and m.settings.data), None)


def quality_of(run: RunRecords) -> Quality | str | None:
    """Check a run's data once and keep the result beside the run.

    Returns the result, or the reason why there is none, or None for stand-in data. Lengths are in tokens if the run has
    a tokenizer of its own, otherwise in words.
    """
    manifest = _manifest_with_data(run)
    if manifest is None or manifest.data is None or manifest.settings.data is None:
        return None
    settings, facts = manifest.settings.data, manifest.data
    if settings.source == "lengths":
        return None
    file = run.run_directory / "data" / "quality.json"
    tokenizer = run.run_directory / PRETRAIN / MODEL
    count, unit = (spread.tokens(tokenizer), "tokens") if tokenizer.is_dir() else (spread.words, "words")
    split = {"seed": manifest.seed, "fraction": settings.heldout_fraction}
    # What reads the data and checks it.
    code = {"code": hash_of_modules(Path(formats.__file__).parent), "statistics": sha256(Path(stats.__file__))}
    inputs = {"data": facts.sha256, "unit": unit, **code, **split}
    stored = None
    with suppress(UserError):  # a damaged result, or one of another version, is replaced
        stored = reader.read(file, Quality)
    if stored and stored.made_from == inputs:
        return stored
    with working(f"{run.name}: checking its data"):
        try:
            rows = _rows(settings, [str(data_file(run.run_directory, entry.name)) for entry in facts.files])
        except (UserError, OSError) as error:
            return f"its data cannot be checked any more: {error}"
        if [entry.sha256 for entry in rows.report.files] != [entry.sha256 for entry in facts.files]:
            return "its data has changed since; what it was trained on cannot be checked any more"
        report = quality.check(
            rows, seed=manifest.seed, fraction=settings.heldout_fraction, count=count, unit=unit
        ).to_dict() | {"made_from": inputs}
    try:
        file.parent.mkdir(exist_ok=True)
        write_json(file, report)
    except OSError:
        pass  # the directory cannot be written: the data is checked again each time
    return reader.check(report, Quality, str(file))


def _rows(settings: DataSettings, files: list[str]) -> formats.ParsedRows:
    """Read the rows of a run again."""
    format = cast(DataFormat, settings.format)
    rated = cast(RatedPairs, settings.rated or "best_worst")
    preparation = Preparation(settings.rename or {}, settings.ignore or (), rated, settings.rating)
    if settings.source == "hub":
        assert settings.name and settings.revision  # required by the recipe
        return formats.read_hub(
            settings.name,
            settings.revision,
            split=settings.split,
            data_dir=settings.data_dir,
            on_bad_row="skip",
            kind=format,
            preparation=preparation,
        )
    return formats.read(files, on_bad_row="skip", kind=format, preparation=preparation)
