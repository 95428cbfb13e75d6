"""What sections of a report consist of: tables, charts, dialogues. Python prepares them, templates write the HTML."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.rating.pairs import turns

COLOURS = ("#2f7ed8", "#d9822b", "#2e9d5b", "#b24fb5", "#7a8794", "#c23b3b", "#19a3a3", "#8c6d31")


class Section(NamedTuple):
    """A part of the page: a template and what it shows, or the reason why it is missing."""

    title: str
    template: str
    data: Any
    problem: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z]+", "-", self.title.lower()).strip("-")


class Cell(NamedTuple):
    """A cell of a table. With a `kind` it is marked: good, bad, warn or, as "", not at all."""

    text: str
    kind: str | None = None
    number: bool = False


class Table(NamedTuple):
    columns: list[Cell]
    rows: list[list[Cell]]


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], several: bool, numbers: Sequence[int] = ()
) -> Table | None:
    """Return a table of the columns with something in them, None without rows.

    The first column names the run and is shown only where there are `several`. A cell is a Cell or a plain value;
    `numbers` are the columns that are aligned as such.
    """
    if not rows:
        return None
    cells = [[cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in row] for row in rows]
    shown = [i for i in range(len(columns)) if (i or several) and any(row[i].text for row in cells)]
    head = [Cell(columns[i], number=i in numbers) for i in shown]
    return Table(head, [[row[i]._replace(number=i in numbers) for i in shown] for row in cells])


class Chart(NamedTuple):
    """The place of a chart on the page."""

    id: str
    title: str
    tall: bool


class Charts:
    """What the page's script draws. Each chart gets a place of its own."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def add(self, title: str, data: list[dict[str, Any]], tall: bool = False, **layout: Any) -> Chart:
        """Add a chart: `data` and `layout` are plotly's."""
        chart = Chart(f"chart-{len(self.all)}", title, tall)
        heading = {"title": {"text": title, "font": {"size": 13}}}
        self.all.append({"id": chart.id, "data": data, "layout": heading | layout})
        return chart


def line(name: str, x: list[Any], y: list[Any], number: int, count: int) -> dict[str, Any]:
    """Return a line of a chart, in the colour of its number; named in the legend where there are several."""
    colour = COLOURS[number % len(COLOURS)]
    return {"x": x, "y": y, "name": name, "mode": "lines", "line": {"color": colour}, "showlegend": count > 1}


def level(y: float) -> dict[str, Any]:
    """Return a dotted line across a chart."""
    style = {"dash": "dot", "color": "#9a6700", "width": 1}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": style}


def middles(edges: Sequence[float]) -> list[float]:
    """Return the middle of each bin of a histogram."""
    return [(low + high) / 2 for low, high in itertools.pairwise(edges)]


class Turn(NamedTuple):
    """Who speaks, and what. `shade` is a class of the page's style: "said prompt" is dimmer than "said"."""

    who: str
    text: str
    shade: str = "said"


def dialogue(row: Mapping[str, Any]) -> list[Turn]:
    """Return the prompt of a sample, turn by turn."""
    return [Turn(who, text, "said prompt") for who, text in turns(row)]
