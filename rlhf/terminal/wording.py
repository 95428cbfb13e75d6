"""Numbers and ranges as text, the same in tables, reports and messages."""

import math

GB = 1e9  # bytes


def number(value: object) -> str:
    """Return a value as text: 4 significant digits, whole numbers with separators, - for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (math.isfinite(value) and abs(value) >= 1000 and value == int(value)):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def span(low: float | None, high: float | None) -> str:
    """Return a range in words: `≤ 5`, `≥ 0.6`, `0.05 – 0.3`."""
    if low is not None and low == high:
        return number(low)
    if low is not None and high is not None:
        return f"{number(low)} – {number(high)}"
    return f"≥ {number(low)}" if low is not None else f"≤ {number(high)}" if high is not None else "-"


def gb(size: float, digits: int = 2) -> str:
    """Return a size in bytes as GB of 10^9 bytes; `-` for none."""
    return f"{size / GB:.{digits}f}" if size else "-"
