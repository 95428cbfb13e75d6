"""The history of each benchmark: a chart of its records below results/, with a line for each machine."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from bench import compare
from bench.clocks import clock_of
from bench.kinds import StepsRecord
from bench.reading import read
from bench.svg import picture
from rlhf.recipe import StageName

NAME = "history.svg"
WIDE, PANEL, LEFT, RIGHT, TOP, LEGEND = 640, 120, 74, 20, 24, 18  # pixels; a panel is as high as PANEL
COLOURS = ("#1f6feb", "#cf222e", "#1a7f37", "#8250df", "#bf8700", "#57606a")


class Point(NamedTuple):
    """A stage's real tokens per second in a record."""

    machine: str
    date: str
    record: int  # its place among the records of the chart, the oldest first
    rate: float


def records_of(root: Path) -> dict[Path, list[Path]]:
    """Return the records of each chart by its file: one for each folder of `make bench`, and shape of rows in it."""
    files: dict[Path, list[Path]] = {}
    for file in sorted(root.glob("*/*/*/bench/*.json")):
        shape = file.stem.rpartition("_")[2]
        files.setdefault(file.parent / f"{shape}-{NAME}", []).append(file)
    return files


def charts(root: Path) -> dict[Path, str]:
    """Return each chart by its file. Raises UserError for a record that is damaged."""
    return {chart: drawn([read(file, StepsRecord) for file in group]) for chart, group in records_of(root).items()}


def drawn(records: Sequence[StepsRecord]) -> str:
    """Return a chart as SVG: a panel for each stage, over the records from the oldest to the newest.

    Records are equally far from each other. Those that can be compared are joined by a line and have one colour.
    """
    machines = list(dict.fromkeys(machine_of(record) for record in records))
    stages = list(dict.fromkeys(stage for record in records for stage in record["stages"]))
    high = TOP + PANEL * len(stages) + LEGEND * (len(machines) + 1) + 10
    parts: list[str] = []
    for number, stage in enumerate(stages):
        parts += _panel(stage, [*points(records, stage)], machines, len(records), TOP + PANEL * number)
    bottom = TOP + PANEL * len(stages) + 10
    parts.append(f'<text x="{LEFT}" y="{bottom}" fill="#666">real tokens per second, by date of record</text>')
    for number, machine in enumerate(machines, 1):
        down, colour = bottom + LEGEND * number, COLOURS[(number - 1) % len(COLOURS)]
        parts.append(f'<circle cx="{LEFT + 4}" cy="{down - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 16}" y="{down}">{escape(machine)}</text>')
    return picture(WIDE, high, parts)


def machine_of(record: StepsRecord) -> str:
    """Return the machine with its threads and the clock: records of others are not compared."""
    threads, clock = compare.threads(record), clock_of(record["stages"].values())
    words = f", {threads} thread{'s' * (threads > 1)}" if threads else ""
    return f"{compare.machine(record)}{words}, {clock} seconds"


def points(records: Sequence[StepsRecord], stage: StageName) -> Iterator[Point]:
    """Yield a stage's rates; a record without the stage, or in which it did not fit, has none."""
    for place, record in enumerate(records):
        row = record["stages"].get(stage, {})
        if "tokens_per_second" in row:
            yield Point(machine_of(record), record["date"], place, row["tokens_per_second"])


def _panel(stage: str, rates: Sequence[Point], machines: Sequence[str], records: int, top: float) -> list[str]:
    """Return the axis of a stage, from 0, and the points of each machine, joined by a line."""
    most = 1.15 * max((point.rate for point in rates), default=1.0)
    base, height = top + PANEL - 30, PANEL - 46

    def x(point: Point) -> float:
        return LEFT + (point.record + 0.5) / records * (WIDE - LEFT - RIGHT)

    def y(rate: float) -> float:
        return base - rate / most * height

    parts = [
        f'<text x="{LEFT}" y="{top}" font-weight="bold">{stage}</text>',
        f'<path d="M{LEFT} {base:.1f}H{WIDE - RIGHT}" stroke="#888"/>',
        f'<text x="{LEFT - 8}" y="{base + 4:.1f}" text-anchor="end">0</text>',
    ]
    for number, machine in enumerate(machines):
        own = [point for point in rates if point.machine == machine]
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x(point):.1f},{y(point.rate):.1f}" for point in own)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for point in own:
            title = f"{machine}, {point.date}: {point.rate:,.0f}"
            parts.append(
                f'<circle cx="{x(point):.1f}" cy="{y(point.rate):.1f}" r="4" fill="{colour}">'
                f"<title>{escape(title)}</title></circle>"
                f'<text x="{x(point):.1f}" y="{y(point.rate) - 7:.1f}" text-anchor="middle">{point.rate:,.0f}</text>'
                f'<text x="{x(point):.1f}" y="{base + 15:.1f}" text-anchor="middle" fill="#666">{point.date}</text>'
            )
    return parts
