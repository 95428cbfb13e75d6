"""The table of a comparison, with a row for each phase, and those of the records about the comparison itself."""

from collections.abc import Sequence
from pathlib import Path

from bench.against.judge import CARD_PEAK, COUNTED, CPU, HELD, PEAK, PROCESS, RATE, WALL, Change
from bench.kinds import PlantedRecord, PlantRow, SameRecord
from bench.reading import read
from rlhf.terminal import screen
from rlhf.terminal.tables import rows_table

COLUMNS = (CPU, WALL, RATE, *COUNTED.values(), PEAK, HELD, CARD_PEAK, PROCESS)
NOTE = (
    "Ratios of new to old; above 1 is worse, = is exactly equal. Seconds: the median of pairs and their interval. "
    "Operations, bytes, launches, host reads and memory are counted; what the process held so far is not judged. "
    "! is worse than allowed, beyond its interval."
)


def rows(changes: Sequence[Change]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells; figures that nothing has are left out, and phases inside others if equal."""
    columns = [what for what in COLUMNS if any(change.what == what for change in changes)]
    stages = dict.fromkeys(change.stage for change in changes)
    places: dict[str, dict[str, Change]] = {}
    for change in sorted(changes, key=lambda change: list(stages).index(change.stage)):
        places.setdefault(change.place, {})[change.what] = change
    shown = {
        place: cells
        for place, cells in places.items()
        if any(c.worse or c.phase.count("/") == 0 for c in cells.values())
    }
    return ["", *columns], [[place, *(_cell(cells.get(what)) for what in columns)] for place, cells in shown.items()]


def _cell(change: Change | None) -> str:
    if change is None:
        return ""
    if change.old == change.new:
        return "="
    interval = f" [{change.low:.2f}, {change.high:.2f}]" if change.what == CPU else ""
    return f"{change.ratio:.{2 if change.low != change.high else 4}f}{interval}{' !' if change.worse else ''}"


def show(title: str, changes: Sequence[Change]) -> None:
    """Print the table."""
    columns, cells = rows(changes)
    rows_table(title, columns, cells)
    screen.OUT.print(NOTE, style="dim")


def markdown(title: str, changes: Sequence[Change], verdicts: Sequence[str]) -> str:
    """Return the table and the verdicts as Markdown."""
    columns, cells = rows(changes)
    lines = [columns, ["---"] * len(columns), *cells]
    listing = "\n".join(f"- worse: {line}" for line in verdicts) or "Nothing is worse."
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines) + f"\n\n{listing}\n\n{NOTE}\n"


def planted(folder: Path) -> str:
    """Return the table of what was planted and which change found it, the largest one, as Markdown.

    It has the newest row of each plant in the records of a folder, because a record may have some of them.
    """
    rows: dict[str, PlantRow] = {}
    for file in sorted(folder.glob("planted_*.json")):  # names begin with date and time
        rows |= read(file, PlantedRecord)["planted"]
    lines = ["| planted | what it does | found by | load average |", "| --- | --- | --- | --- |"]
    for name, row in rows.items():
        found = "nothing"
        if row["worse"]:
            largest, *others = row["worse"]
            more = f" (and {len(others)} more)" if others else ""
            found = f"{largest['place']}: {largest['what']} {largest['ratio'] - 1:+.1%}{more}"
        lines.append(f"| {name} | {row['does']} | {found} | {row['load']:.1f} |")
    return "\n".join(lines)


def same(records: Sequence[SameRecord]) -> str:
    """Return the table of comparisons of a commit with itself, a row for each record, as Markdown."""
    lines = ["| date | stages | timed pairs in each | load average | comparisons | alarms |", "| --- " * 6 + "|"]
    for record in records:
        loads = [row["load"] for row in record["same"]]
        alarms = sum(bool(row["worse"]) for row in record["same"])
        cells = (
            record["date"].replace("T", " "),
            ", ".join(record["stages_compared"]),
            str(record["rounds"]),
            f"{min(loads):.1f} to {max(loads):.1f}",
            str(len(loads)),
            str(alarms),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
