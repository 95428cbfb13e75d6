"""The table of all sets: `sets/` has what others measured, the file that a set names has what was predicted for it.

Rules by which rows are left out, each before any figure is compared:

- A published figure below what weights, gradients and optimizer states of the run's own settings take is impossible:
  the run was another one. `trained_parameters` times `bytes_each` is that bound, from the settings alone.
- A row with `left_out` says why it cannot be compared, for example that it ran with torch.compile.
- A row that ran out of memory counts as right if the prediction is above the card (`card_bytes`), and is in no error.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
FIGURES = {
    "peak_allocated": "allocated",
    "peak_reserved": "reserved",
    "allocated_after_step": "allocated after a step",
    "average_reserved": "reserved on average",
    "process": "process",
}
VERSIONS = {
    "matched": "the run's",
    "read": "later, sources compared",
    "other": "others than the run's",
}
PAGE = """# Predictions beside what others measured

`python -m peakmem.validation` makes this page from `sets/` (measured by the people named there) and from the files of
predictions. A set is blind if its predictions were committed before anybody here had seen the measured figures; such a
file is never changed, and a correction is a second file. An error is predicted over measured, minus 1.

| set | card | versions | blind | figure | runs | median | worst | within 5 % | others on these runs: median, worst |
| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |
{rows}

Versions: *the run's* are those that ran on the card; *later, sources compared* are later releases, whose code was read
where memory is concerned; *others than the run's* are known to allocate otherwise.

## Rows that are left out
By a rule that comes before the comparison:

{left_out}

## Out of memory
{memory}

## Notes
{notes}
"""


class Row(NamedTuple):
    """A run that is compared: {figure: bytes} predicted, measured, and of other estimators."""

    group: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    rivals: Mapping[str, Mapping[str, float]]


def sets() -> list[dict[str, Any]]:
    """Return all sets by their names, each with its predictions under `predicted`."""
    found = [json.loads(path.read_text()) for path in sorted((FOLDER / "sets").glob("*.json"))]
    for one in found:
        one["predicted"] = json.loads((FOLDER / one["predictions"]).read_text())
    return found


def left_out(one: Mapping[str, Any]) -> dict[str, str]:
    """Return the runs of a set that no rule lets be compared, with the reason, by id."""
    refused = {run["id"]: run["refused"] for run in one["predicted"]["runs"] if "refused" in run}
    reasons = {}
    for run in one["runs"]:
        least = run.get("trained_parameters", 0) * run.get("bytes_each", 0)
        measured = run.get("measured", {}).get("peak_allocated", 0) * one["unit_bytes"]
        if 0 < measured < least:
            reasons[run["id"]] = f"{measured / 1e9:.2f} GB are published, and its states alone take {least / 1e9:.2f}"
        elif reason := run.get("left_out") or refused.get(run["id"]):
            reasons[run["id"]] = reason
    return reasons


def compared(one: Mapping[str, Any]) -> list[Row]:
    """Return the runs of a set that have both a prediction and a figure."""
    predictions = {run["id"]: run for run in one["predicted"]["runs"]}
    out = left_out(one)
    rows = []
    for run in one["runs"]:
        if run["id"] in out or "measured" not in run or run["id"] not in predictions:
            continue
        rows.append(Row(run.get("group", ""), predictions[run["id"]], run["measured"], run.get("rivals", {})))
    return rows


def errors(rows: Sequence[Row], figure: str, rival: str = "") -> list[float]:
    """Return predicted over measured, minus 1, of each row that has this figure."""
    found = []
    for row in rows:
        values = row.rivals.get(rival, {}) if rival else row.predicted
        if figure in row.measured and values.get(figure) is not None:
            found.append(values[figure] / row.measured[figure] - 1)
    return found


def spread(found: Sequence[float]) -> str:
    """Return the median size of some errors, and the largest with its sign."""
    return f"{median(map(abs, found)):.2%}, {max(found, key=abs):+.1%}"


def _rows(one: Mapping[str, Any]) -> Iterator[str]:
    rows = compared(one)
    linked = one["source"].startswith("https:")
    what = f"[{one['what']}]({one['source']})" if linked else f"{one['what']} ({one['source']})"
    for group in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == group]
        versions = VERSIONS[one["versions"][group if group in one["versions"] else ""]]
        for figure, words in FIGURES.items():
            if not (found := errors(mine, figure)):
                continue
            rivals = sorted({name for row in mine for name in row.rivals})
            others = [
                f"{name}: {spread(theirs)} ({len(theirs)})" for name in rivals if (theirs := errors(mine, figure, name))
            ]
            within = sum(abs(error) <= 0.05 for error in found) / len(found)
            cells = [
                f"{what}{': ' * bool(group)}{group}",
                one["card"],
                versions,
                "yes" if one["blind"] else "no",
                words,
                str(len(found)),
                *spread(found).split(", "),
                f"{within:.0%}",
                "; ".join(others) or "–",
            ]
            yield f"| {' | '.join(cells)} |"


def _left_out(one: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each reason, with the runs that it is of."""
    by_reason: dict[str, list[str]] = {}
    for name, why in left_out(one).items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        yield f"- {one['set']}, {', '.join(names) if len(names) < 10 else f'{len(names)} runs'}: {why}"


def _memory(one: Mapping[str, Any]) -> Iterator[str]:
    predictions = {run["id"]: run for run in one["predicted"]["runs"]}
    full = [run["id"] for run in one["runs"] if run.get("out_of_memory")]
    if full and "card_bytes" in one:
        sizes = {name: predictions[name].get("peak_allocated", 0) * one["unit_bytes"] for name in full}
        below = [f"{name} ({size / 1e9:.1f} GB)" for name, size in sizes.items() if size <= one["card_bytes"]]
        yield f"- {one['set']}: {len(full) - len(below)} of {len(full)} are predicted above the card" + (
            f"; below it are {', '.join(below)}." if below else "."
        )


def page() -> str:
    """Return the page."""
    every = sorted(sets(), key=lambda one: not one["blind"])
    return PAGE.format(
        rows="\n".join(row for one in every for row in _rows(one)),
        left_out="\n".join(line for one in every for line in _left_out(one)),
        memory="\n".join(line for one in every for line in _memory(one)),
        notes="\n".join(f"- {one['set']}: {note}" for one in every for note in one["notes"]),
    )
