"""The pictures of the page: predicted over measured memory on an L40S, and errors beside a peer's on a T4."""

from collections.abc import Sequence

from bench.paths import ROOT
from bench.svg import Axes, picture
from studies.kinds import OutsideRecord, OutsideRow
from studies.outside.adapter_page import PEER, Compared, compared

IMAGE = ROOT / "docs" / "images" / "outside.svg"
ERRORS = ROOT / "docs" / "images" / "outside-errors.svg"


def plot(rows: Sequence[OutsideRow]) -> str:
    """Return the predicted over measured maximum of reserved memory as SVG, one dot for each run, with the diagonal."""
    low, high = 18.0, 38.0  # GiB
    axes = Axes(560, 360, 60, 14, 14, 62, *[lambda size: (size - low) / (high - low)] * 2)
    ticks = {float(tick): str(tick) for tick in range(20, 38, 4)}
    parts = [*axes.grid(ticks, ticks), axes.line([(low, low), (high, high)], "#888")]
    for row in rows:
        point = (row["measured"]["reserved_max"] / 2**30, row["predicted"]["reserved_max"] / 2**30)
        parts.append(axes.dot(point, "#1f6feb", f"{row['name']}: {row['error']['reserved_max']:+.2%}", opacity=0.6))
    parts += axes.titles("measured on an L40S, GiB reserved", "predicted, no GPU", "line: equal")
    return picture(axes.wide, axes.high, parts)


def errors(runs: Sequence[Compared]) -> str:
    """Return signed errors on a T4 as SVG: for each figure a row of dots of ours above one of the peer's."""
    wide, left, step, most = 640, 150, 26, 30  # pixels; percent at either end
    sides = (("this project", "#1f6feb"), ("fitcheck-llm", "#d9822b"))
    rows: list[tuple[str, str, list[tuple[str, float]]]] = []
    for figure, key in PEER.items():
        # Runs without a published error of the peer are in neither row.
        both = [run for run in runs if run.peer.get(key) is not None and run.error(figure) is not None]
        ours = [(run.name, 100 * (run.error(figure) or 0.0)) for run in both]
        for (side, colour), dots in zip(sides, (ours, [(run.name, run.peer[key]) for run in both]), strict=True):
            rows.append((f"{figure.removeprefix('peak_')}, {side}", colour, dots))
    high = step * len(rows) + 54

    def x(percent: float) -> float:
        return left + (percent + most) / (2 * most) * (wide - left - 30)

    parts: list[str] = []
    for tick in range(-most, most + 1, 10):
        colour = "#888" if tick == 0 else "#ddd"
        parts.append(f'<path d="M{x(tick):.1f} 8V{high - 40}" stroke="{colour}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{high - 26}" text-anchor="middle">{tick} %</text>')
    for place, (label, colour, dots) in enumerate(rows):
        y = 8 + step * (place + 0.5)
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        for name, percent in dots:
            parts.append(
                f'<circle cx="{x(percent):.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.45">'
                f"<title>{name}: {percent:+.2f} %</title></circle>"
            )
    middle = (left + wide) / 2
    parts.append(f'<text x="{middle:.0f}" y="{high - 8}" text-anchor="middle">predicted over measured, minus 1</text>')
    return picture(wide, high, parts)


def write(record: OutsideRecord) -> None:
    """Write both pictures."""
    rows = [row for row in record["rows"] if "error" in row]
    IMAGE.write_text(plot(rows), encoding="utf-8")
    ERRORS.write_text(errors(compared()), encoding="utf-8")
