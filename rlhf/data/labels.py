"""Labels of answers that are judged good or bad one by one (KTO)."""

import math


def label_of(row: dict[str, object]) -> bool | None:
    """Return whether a row's answer is labelled good (KTO); None where it has no such label.

    Tables hold labels as text, or as numbers with a decimal point.
    """
    good, bad = ("true", "1", "1.0"), ("false", "0", "0.0")
    value = _label_text(row)
    return value in good if value in (*good, *bad) else None


def unclear_label(row: dict[str, object]) -> str:
    """Return a label that may mean good or bad and says neither; "" without a label, and for a clear one."""
    return "" if label_of(row) is not None else _label_text(row)


def _label_text(row: dict[str, object]) -> str:
    """Return the label in lower case; "" where it is missing: null, NaN or an empty cell."""
    value = row.get("label")
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return "" if missing else str(value).strip().lower()
