"""Numbers and ranges as text, the same in tables, reports and messages."""

import math
from collections.abc import Iterable, Mapping

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


def estimate(metrics: Mapping[str, float | None], key: str, between: str = " ") -> str:
    """Return a metric as text; "" without it.

    If `metrics` has `<key>_low` and `<key>_high`, `between` and this interval follow.
    """
    value, low, high = (metrics.get(f"{key}{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f"{between}({number(low)} to {number(high)})"
    return "" if value is None else number(value) + interval


def without_ends(keys: Iterable[str]) -> list[str]:
    """Return the keys of metrics without the ends and half-widths of intervals that `estimate` shows beside them."""
    every = list(keys)
    shown = {key for key in every if {f"{key}_low", f"{key}_high"} <= set(every)}
    return [key for key in every if not any(key == f"{of}{end}" for of in shown for end in ("_low", "_high", "_ci95"))]


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
