"""HTML of a report: sections, tables and texts that cannot take over the page."""

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.observe import console
from rlhf.observe.console import harmless

LONGEST = 2000  # characters of a text that is shown


def section(title: str, content: str) -> str:
    name = re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
    return f'<section id="{name}"><h2>{html.escape(title)}</h2>{content}</section>' if content else ""


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    runs: Sequence[Any],
    safe: Sequence[int] = (),
    numbers: Sequence[int] = (),
) -> str:
    """Columns with something in them; the first, which names the run, only where there are several.

    `safe` columns hold HTML of ours, all others text.
    """
    if not rows:
        return ""
    shown = [i for i in range(len(columns)) if (i or len(runs) > 1) and any(row[i] for row in rows)]
    head = "".join(f"<th{' class=number' if i in numbers else ''}>{html.escape(columns[i])}</th>" for i in shown)
    body = []
    for row in rows:
        texts = {i: row[i] if i in safe else text(str(row[i])) for i in shown}
        cells = [
            f'<td{" class=number" if i in numbers else ""} data-label="{html.escape(columns[i])}">{cell}</td>'
            for i, cell in texts.items()
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def text(raw: str) -> str:
    """Escaped, without what could take over the page, cut where it is very long."""
    return html.escape(harmless(raw[:LONGEST])) + ("…" if len(raw) > LONGEST else "")


def left_out(why: str) -> str:
    """A line in place of what cannot be shown."""
    return f'<p class="warn">Left out: {text(why)}</p>'


def with_interval(metrics: Mapping[str, Any], who: str, what: str) -> str:
    """A policy's metric, with its interval where there is one; empty where it has no such metric."""
    value, low, high = (metrics.get(f"{who}/{what}{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f" ({console.number(low)} to {console.number(high)})"
    return "" if value is None else console.number(value) + interval
