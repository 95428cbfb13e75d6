"""Numbers, ranges, figures and verdicts as text, the same in tables, reports and messages."""

from rich.markup import escape

from rlhf.recipe import published
from rlhf.recipe.published import Figure, Verdict


def number(value: object) -> str:
    """Return a value as text: 4 significant digits, whole numbers with separators, - for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and value == int(value)):
        return f"{int(value):,}"
    return f"{value:.4g}"


def span(low: float | None, high: float | None) -> str:
    """Return a range in words: `≤ 5`, `≥ 0.6`, `0.05 – 0.3`."""
    if low is not None and low == high:
        return number(low)
    if low is not None and high is not None:
        return f"{number(low)} – {number(high)}"
    return f"≥ {number(low)}" if low is not None else f"≤ {number(high)}" if high is not None else "-"


def figure_text(figure: Figure, in_full: bool = False) -> str:
    """Return a figure's range in words: `about 61 GB`, `≤ 5`, `18 – 24 GB`; `in_full` adds every unit."""
    text = ("about " if figure.about else "") + span(*figure.printed)
    return f"{text} {figure.unit}" if in_full or figure.unit in ("GB", "hours", "USD") else text


def verdict(outcome: Verdict) -> str:
    """Return a verdict as markup, with its colour."""
    colour = "green" if outcome.word in published.GOOD else "red" if outcome.word in published.BAD else ""
    return f"[{colour}]{escape(str(outcome))}[/]" if colour else escape(str(outcome))
