"""What a guide publishes, what is predicted for its settings and for ours, and what cards measured, in one table.

`rlhf plan --published`, `make bench` and README.md show the same lines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rlhf import recipe as recipes
from rlhf.plan import prediction_file, published_figures
from rlhf.plan.plan import Plan, plan_of
from rlhf.plan.published_figures import Predicted
from rlhf.recipe import StageName, published, totals
from rlhf.recipe.folders import guide_of, is_default
from rlhf.recipe.published import Figure, VerdictWord, verdict_of
from rlhf.recipe.stages import STAGES, stage_name
from rlhf.run import reader
from rlhf.run.records import Record
from rlhf.terminal import screen
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import GB, number

Quantity = Literal["peak_vram_gb", "hours"]
ALL: Literal["all"] = "all"  # SFT, reward model and PPO together
Place = StageName | Literal["all"]
QUANTITIES: tuple[Quantity, ...] = ("peak_vram_gb", "hours")
TITLES = {"peak_vram_gb": "published, predicted and measured peak memory", "hours": "the same for time"}
COLUMNS: Mapping[Quantity, tuple[str, ...]] = {
    "peak_vram_gb": (
        *("recipe", "stage", "published, GB", "predicted: guide's settings", "ours"),
        *("measured", "verdict", "on card, date"),
    ),
    "hours": (
        *("recipe", "stage", "published, hours", "projected: guide's settings", "ours"),
        *("by measured steps", "tokens/s", "verdict", "on card, date"),
    ),
}
NOTE = (
    "The verdict is on what was measured; where nothing was, on what is predicted for the guide's settings. A worse "
    "projection whose range reaches the published one overlaps it."
)
NONE = "–"


class Measured(NamedTuple):
    """What a card measured of a stage; hours follow from the mean of some steps."""

    value: float
    version: str
    card: str
    date: str  # ISO 8601
    tokens_per_second: float | None = None
    record: Path | None = None  # None for what was measured just now


Found = Mapping[tuple[StageName, Quantity], Measured]


class Line(NamedTuple):
    """One quantity of a stage, or of SFT, reward model and PPO together (`all`), of a recipe that follows a guide."""

    recipe: str
    stage: Place
    quantity: Quantity
    figures: Sequence[Figure]  # a guide may have several that disagree
    of_guide: Predicted | None  # with the guide's settings
    ours: Predicted | None  # with those of the version that HW= takes; None where that is the guide's
    measured: Measured | None

    @property
    def verdict(self) -> VerdictWord:
        """Return the most favourable verdict by the figures: on the measured value, or else on `of_guide`."""
        one, guide = self.measured, self.of_guide
        value, ends = (one.value, None) if one else (guide.value, guide.ends) if guide else (None, None)
        return published.best(verdict_of(figure, value, ends).word for figure in self.figures) or published.NOT_COMPARED

    def cells(self, linked: bool = False) -> tuple[str, ...]:
        """Return the line's cells under COLUMNS; `linked` makes a Markdown link of the record."""
        found = self.measured
        stage = ", ".join(totals.CHAIN) if self.stage == ALL else self.stage
        ends = " or ".join(dict.fromkeys(figure.text().removesuffix(f" {figure.unit}") for figure in self.figures))
        place = f"{found.card.removeprefix('NVIDIA ')}, {found.date}" if found else NONE
        if linked and found and found.record:
            place = f"[{place}]({found.record.as_posix()})"
        speed = number(round(found.tokens_per_second)) if found and found.tokens_per_second else NONE
        return (
            self.recipe,
            stage,
            ends,
            *(NONE if value is None else str(value) for value in (self.of_guide, self.ours)),
            f"{number(float(f'{found.value:.3g}'))} ({found.version})" if found else NONE,
            *([speed] if self.quantity == "hours" else []),
            self.verdict,
            place,
        )


def lines(recipes_root: Path, results: Path, name: str | None = None, here: Found | None = None) -> list[Line]:
    """Return the lines of every recipe below `recipes_root` that follows a guide, or of the one called `name`.

    `results` is the folder of records, which need not exist; `here` was measured just now. Nothing is rehearsed:
    predictions are those pinned beside the recipes. Raises UserError for a damaged file.
    """
    firsts: dict[Path, Path] = {}
    for directory in recipes.available(recipes_root):
        if name in (None, directory.parent.name) and (found := guide_of(directory)):
            firsts[directory.parent] = found[0]
    return [line for first in firsts.values() for line in _of_recipe(first, results, here or {})]


def _of_recipe(first: Path, results: Path, here: Found) -> Iterator[Line]:
    """Yield the lines of the recipe whose guide's settings are in the version `first`."""
    root = first.parents[1]
    taken = [d for d in recipes.available(root) if d.parent == first.parent and is_default(d, root)]
    versions = list(dict.fromkeys((first, *taken)))  # the guide's settings, then ours where they differ
    plans = [_pinned_plan(directory) for directory in versions]
    figures = {directory.name: recipes.load(directory).figures for directory in versions}
    known = [here, *(measured(results / first.parent.name / directory.name) for directory in versions)]
    for quantity in QUANTITIES:
        for stage in (*STAGES, ALL):
            shown = [
                f for f in figures[first.name] if (f.stage, f.metric) == (stage, quantity) and not f.not_comparable
            ]
            if not shown:
                continue
            values = [published_figures.predicted(made, shown[0], quantity) if made else None for made in plans]
            found = next(filter(None, (_total(stage, quantity, one) for one in known)), None)
            judged = figures.get(found.version, ()) if found else shown  # what is expected differs by version
            of_version = [f for f in judged if (f.stage, f.metric) == (stage, quantity) and not f.not_comparable]
            ours = values[1] if len(values) > 1 else None
            yield Line(first.parent.name, stage, quantity, of_version or shown, values[0], ours, found)


def _pinned_plan(directory: Path) -> Plan | None:
    """Return the plan by predicted.json; None where nothing is pinned."""
    pinned = prediction_file.read(directory)
    return plan_of(recipes.load(directory), prediction_file.stages_of(pinned)) if pinned else None


def _total(stage: Place, quantity: Quantity, found: Found) -> Measured | None:
    """Return what was measured of a stage; of `all` the highest peak, or the sum of hours, once each is measured."""
    if stage != ALL:
        return found.get((stage, quantity))
    parts = [found[name, quantity] for name in totals.CHAIN if (name, quantity) in found]
    if len(parts) < len(totals.CHAIN):
        return None
    values = [part.value for part in parts]
    return parts[-1]._replace(value=max(values) if quantity == "peak_vram_gb" else sum(values), tokens_per_second=None)


class _Steps(Record):
    """A stage's row of a record of steps."""

    hours: float | None = None
    tokens_per_second: float | None = None
    peak_vram_bytes: int | None = None


class _Phase(Record):
    """A phase's row of a record of memory."""

    stage: StageName
    measured_bytes: int


class _OnCard(Record):
    """What all records of a recipe on a card share; what they measured is below `measured`, or beside these keys."""

    date: str
    version: str
    device: dict[str, object]


def measured(folder: Path) -> Found:
    """Return what the records below a version's folder of results measured on cards.

    Of peaks the highest is kept, because a stage's peak is that of its longest rows; of hours the newest. Raises
    UserError for a damaged record.
    """
    found: dict[tuple[StageName, Quantity], Measured] = {}
    for file in sorted(folder.rglob("*.json"), key=lambda file: file.name):
        content = reader.read(file, Record)
        for key, value in of_record(content.plain() if content else {}, str(file), file).items():
            if key[1] == "hours" or key not in found or value.value > found[key].value:
                found[key] = value
    return found


def of_record(content: Mapping[str, object], source: str, file: Path | None = None) -> Found:
    """Return what one record measured on a card; nothing of a record of a CPU, or of another kind."""
    device = content.get("device")
    if not isinstance(device, Mapping) or device.get("type") != "cuda":
        return {}
    record = reader.check(content, _OnCard, source)
    cap = record.device.get("memory_cap")
    card = f"{record.device['name']}{f' held to {cap}' if cap else ''}"
    place = Measured(0.0, record.version, card, record.date[:10], None, file)
    inner = content.get("measured", content)
    assert isinstance(inner, Mapping)
    phases, stages = inner.get("phases"), inner.get("stages")
    found: dict[tuple[StageName, Quantity], Measured] = {}
    for row in phases if isinstance(phases, list) else ():
        phase = reader.check(row, _Phase, source)
        before = found.get((phase.stage, "peak_vram_gb"), place).value
        peak = max(before, phase.measured_bytes / GB)
        found[phase.stage, "peak_vram_gb"] = place._replace(value=peak)
    for name, row in stages.items() if isinstance(stages, Mapping) else ():
        steps, stage = reader.check(row, _Steps, source), stage_name(name)
        if steps.hours is not None:
            found[stage, "hours"] = place._replace(value=steps.hours, tokens_per_second=steps.tokens_per_second)
        if steps.peak_vram_bytes and inner.get("shape") == "longest":
            found[stage, "peak_vram_gb"] = place._replace(value=steps.peak_vram_bytes / GB)
    return found


def show(shown: Sequence[Line]) -> None:
    """Print both tables, and nothing without lines."""
    for quantity in QUANTITIES:
        if cells := [line.cells() for line in shown if line.quantity == quantity]:
            rows_table(TITLES[quantity], COLUMNS[quantity], _named_once(cells))
    if shown:
        screen.OUT.print(NOTE, style="dim")


def _named_once(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table with a recipe's name in the first of its rows only."""
    above = None
    for name, *cells in rows:
        yield ("" if name == above else name, *cells)
        above = name


def markdown(shown: Iterable[Line], root: Path) -> str:
    """Return both tables as Markdown, with links to the records relative to `root`."""
    every, tables = list(shown), []
    for quantity in QUANTITIES:
        rows = []
        for line in (line for line in every if line.quantity == quantity):
            found = line.measured
            record = found.record.relative_to(root) if found and found.record else None
            rows.append(line._replace(measured=found and found._replace(record=record)).cells(linked=True))
        head = [COLUMNS[quantity], ("---",) * 2 + ("---:",) * (len(COLUMNS[quantity]) - 4) + ("---",) * 2]
        tables.append("\n".join(f"| {' | '.join(row)} |" for row in (*head, *_named_once(rows))))
    return "\n\n".join(tables)
