"""Parts of a report's sections: tables, charts and dialogues. Templates render them as HTML."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rlhf.errors import UserError
from rlhf.rating.pairs import turns
from rlhf.recipe.stages import STAGE_TABLE

Trace = dict[str, Any]  # a curve, bars or axes of a chart: plotly's keys, values of any type
MARKED = 20  # points of a line up to which each is marked: one point has no line, and few ones look like more
LINE_COLOURS = ("#2f7ed8", "#d9822b", "#2e9d5b", "#b24fb5", "#7a8794", "#c23b3b", "#19a3a3", "#8c6d31")
STAGE_TITLES: dict[str, str] = {stage: row.title for stage, row in STAGE_TABLE.items()}


class Cell(NamedTuple):
    """A cell of a table. One that judges has a `kind`: good, bad and warn colour its text, "" does not."""

    text: str
    kind: str | None = None
    number: bool = False


class Table(NamedTuple):
    """The cells of a table: its heading and its rows."""

    columns: list[Cell]
    rows: list[list[Cell]]


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], several: bool, numbers: Sequence[int] = ()
) -> Table | None:
    """Return a table of the columns that are not empty, or None without rows.

    The first column names the run and is shown only if there are `several`. A cell is a Cell or a plain value.
    `numbers` are the columns that are aligned at the right.
    """
    if not rows:
        return None
    cells = [[cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in row] for row in rows]
    visible = [i for i in range(len(columns)) if (i or several) and any(row[i].text for row in cells)]
    head = [Cell(columns[i], number=i in numbers) for i in visible]
    return Table(head, [[row[i]._replace(number=i in numbers) for i in visible] for row in cells])


class Chart(NamedTuple):
    """The place of a chart on the page."""

    id: str
    title: str
    tall: bool


class Section(NamedTuple):
    """A section of the page: a template and its data, or the reason why the section is missing."""

    title: str
    template: str
    data: object  # what the template shows; None if the section is missing
    problem: str = ""

    @property
    def anchor(self) -> str:
        """Return the id of the section, which links name."""
        return re.sub(r"[^a-z]+", "-", self.title.lower()).strip("-")


class Charts:
    """The charts that the page's script draws, each with its own place on the page."""

    def __init__(self) -> None:
        self.all: list[Trace] = []

    def add(self, title: str, data: Sequence[Trace], tall: bool = False, **layout: Any) -> Chart:
        """Add a chart: `data` and `layout` are plotly's."""
        chart = Chart(f"chart-{len(self.all)}", title, tall)
        heading: Trace = {"title": {"text": title, "font": {"size": 13}}}
        self.all.append({"id": chart.id, "data": data, "layout": heading | layout})
        return chart


def sections_or_problem(topic: str, build: Callable[[], list[Section]], charts: Charts) -> list[Section]:
    """Return the sections that `build` makes, or one that says why they are missing.

    UserError alone means a damaged file; any other exception is a bug of ours and is raised. Charts of missing sections
    are dropped.
    """
    count = len(charts.all)
    try:
        return build()
    except UserError as error:
        del charts.all[count:]
        return [Section("", "", None, problem=f"{topic}: {error}")]


def line(name: str, x: Sequence[float | None], y: Sequence[float | None], number: int, count: int) -> Trace:
    """Return line `number` of a chart with `count` lines; several lines are named in the legend, few points marked."""
    style: Trace = {"line": {"color": LINE_COLOURS[number % len(LINE_COLOURS)]}, "showlegend": count > 1}
    return {"x": x, "y": y, "name": name, "mode": "lines+markers" if len(x) <= MARKED else "lines"} | style


def level(y: float) -> Trace:
    """Return a dotted line across a chart at the height `y`."""
    style = {"dash": "dot", "color": "#9a6700", "width": 1}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": style}


def middles(edges: Sequence[float]) -> list[float]:
    """Return the middle of each bin of a histogram."""
    return [(low + high) / 2 for low, high in itertools.pairwise(edges)]


class Turn(NamedTuple):
    """A turn of a dialogue: speaker and text. `shade` is a CSS class: "said prompt" is dimmer than "said"."""

    speaker: str
    text: str
    shade: str = "said"


def dialogue(prompt: str, messages: Sequence[object] = ()) -> list[Turn]:
    """Return a prompt turn by turn, from its messages if there are any."""
    return [Turn(speaker, text, "said prompt") for speaker, text in turns(prompt, messages)]
