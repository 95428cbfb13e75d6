"""docs/images/outside.svg: predicted over measured memory, made from a record of `python -m bench.outside`."""

from collections.abc import Sequence
from pathlib import Path

from bench.kinds import OutsideRecord, OutsideRow


def plot(rows: Sequence[OutsideRow]) -> str:
    """Return the predicted over measured maximum of reserved memory as SVG, one dot for each run, with the diagonal."""
    wide, high, left, bottom = 560, 360, 60, 46
    low, top = 18.0, 38.0  # GiB

    def x(size: float) -> float:
        return left + (size / 2**30 - low) / (top - low) * (wide - left - 14)

    def y(size: float) -> float:
        return high - bottom - (size / 2**30 - low) / (top - low) * (high - bottom - 14)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for tick in range(20, 38, 4):
        at = tick * 2**30
        parts.append(f'<path d="M{x(at):.1f} {y(low * 2**30):.1f}V{y(top * 2**30):.1f}" stroke="#ddd"/>')
        parts.append(f'<path d="M{x(low * 2**30):.1f} {y(at):.1f}H{x(top * 2**30):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(at):.1f}" y="{high - bottom + 16}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="{left - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{tick}</text>')
    ends = low * 2**30, top * 2**30
    line = f"M{x(ends[0]):.1f} {y(ends[0]):.1f}L{x(ends[1]):.1f} {y(ends[1]):.1f}"
    parts.append(f'<path d="{line}" stroke="#888" stroke-dasharray="4 3"/>')
    for row in rows:
        measured, predicted = row["measured"]["reserved_max"], row["predicted"]["reserved_max"]
        title = f"{row['name']}: {row['error']['reserved_max']:+.2%}"
        parts.append(
            f'<circle cx="{x(measured):.1f}" cy="{y(predicted):.1f}" r="3.5" fill="#1f6feb" fill-opacity="0.6">'
            f"<title>{title}</title></circle>"
        )
    middle = (left + wide) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{high - 10}" text-anchor="middle">measured on an L40S, GiB reserved</text>'
    )
    parts.append(
        f'<text transform="translate(16 {high / 2:.0f}) rotate(-90)" text-anchor="middle">predicted, no GPU</text>'
    )
    return "\n".join([*parts, "</svg>\n"])


def write(record: OutsideRecord, docs: Path) -> None:
    """Write docs/images/outside.svg."""
    rows = [row for row in record["rows"] if "error" in row]
    (docs / "images" / "outside.svg").write_text(plot(rows), encoding="utf-8")
