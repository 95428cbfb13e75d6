"""Tables of a plan on the console."""

import json
from collections.abc import Iterator, Sequence

import click

from rlhf.errors import UserError
from rlhf.plan.fit import Fit
from rlhf.plan.machine import LIBRARIES
from rlhf.plan.phases import PredictedPhase
from rlhf.plan.plan import Plan, PlannedStage, StageTime
from rlhf.plan.predict import card_needed_bytes
from rlhf.plan.published_figures import ComparedFigure
from rlhf.process.cuda import CONTEXT_BYTES, CONTEXT_SEEN
from rlhf.recipe import PinnedRecipe, as_yaml
from rlhf.recipe.published import CHAIN
from rlhf.terminal import screen
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb, number

STAGE_COLUMNS = ("stage", "peak", "needs", "published", "verdict", "hours projected", "cost")
WITHOUT_CARD = {"cuda": "no card named", "cpu": "on the CPU", "host": "in the host's memory"}  # verdict on memory
EXPLAINED = {
    "peak": "what torch allocates",
    "needs": "what the card must have: peak, gaps, paged states and the driver",
    "hours projected": "(from-to) as other runs reach the card's nominal rates",
}
SHORT = 0.1  # hours; fewer have two decimals


def show(plan: Plan, phases: bool) -> None:
    """Print the answer, the table of stages and, where wanted, what each phase holds at its peak."""
    name = f"{plan.recipe} {plan.version}" + (", modified" if plan.modified else "")
    screen.OUT.print(f"{name}: {answer(plan)}")
    shown, stages = stage_table(plan)
    cards = f"each of {plan.cards} cards" if plan.cards > 1 else "card"
    card = f", {cards} {gb(plan.card_bytes)} GB" if plan.card_bytes else ""
    rows_table(f"{name}: predicted memory in GB, projected time{card}", shown, stages, whole=True)
    for column in (column for column in shown if column in EXPLAINED):
        screen.OUT.print(f"{column}: {EXPLAINED[column]}", style="dim")
    if between := between_rows(plan):
        columns = ("stage", "gradients, GB", "layers, GB", "at the link's limit", "scaling")
        rows_table(f"{name}: between {plan.cards} cards, projected", columns, between)
    if phases:
        rows_table(f"{name}: predicted peak of each phase, GB", ("stage", "phase", "peak", "holds"), phase_rows(plan))
    for line in notes(plan):
        screen.OUT.print(line, style="dim")


def answer(plan: Plan) -> str:
    """Return the first line: whether all fits, what needs most, and the hours and the cost of all stages."""
    parts = []
    on_card = {stage: planned for stage, planned in plan.stages.items() if planned.in_memory_of == "cuda"}
    if plan.card_bytes and on_card:
        needs = {stage: p.card_needed_bytes + p.server_bytes + p.reward_bytes for stage, p in on_card.items()}
        largest = max(needs, key=lambda stage: needs[stage])
        said = "fits" if all(planned.fits for planned in on_card.values()) else "does not fit"
        parts.append(f"{said} the card: {largest} needs most, {gb(needs[largest])} of {gb(plan.card_bytes)} GB")
    if plan.free_bytes is not None:
        said = "fits" if all(planned.fits for planned in plan.stages.values()) else "does not fit"
        parts.append(f"{said}: {gb(plan.free_bytes)} GB are {plan.free_words}, {gb(LIBRARIES)} GB go to libraries")
    times = {stage: planned.time for stage, planned in plan.stages.items() if planned.time}
    if times:
        hours, cost = _time_cells([*times.values()])
        parts.append(f"projected hours of {', '.join(times)}: {hours}" + (f", {cost}" if cost != "-" else ""))
    return ". ".join(parts)


def stage_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of stages without empty columns; on a CPU the need is the peak."""
    rows = stage_rows(plan)
    on_card = any(planned.in_memory_of == "cuda" for planned in plan.stages.values())
    by_column = dict(zip(STAGE_COLUMNS, zip(*rows, strict=True), strict=True))
    empty = {column for column, cells in by_column.items() if {*cells} <= {"-", ""}}
    if not on_card:
        empty.add("needs")
    kept = [index for index, column in enumerate(STAGE_COLUMNS) if column not in empty]
    return [STAGE_COLUMNS[index] for index in kept], [[row[index] for index in kept] for row in rows]


def stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each stage: peak, need, published range, verdict, hours, cost; and one for the chain."""
    rows: list[tuple[str, ...]] = []
    for stage, planned in plan.stages.items():
        ranges = ("-".join(dict.fromkeys(gb(x, 0) for x in ends if x)) for ends in planned.published_bytes or ())
        published = ", ".join(dict.fromkeys(ranges)) or "-"
        fits = "tight" if _is_tight(plan, planned) else "fits"
        verdict = {True: fits, False: "DOES NOT FIT", None: WITHOUT_CARD[planned.in_memory_of]}[planned.fits]
        verdict += f", {planned.verdict}" if planned.verdict else ""
        sizes = gb(planned.peak_bytes), gb(planned.card_needed_bytes)
        rows.append((stage, *sizes, published, verdict, *_time_cells([planned.time])))
    chain = [plan.stages[stage].time for stage in CHAIN if stage in plan.stages]
    if len(chain) == len(CHAIN) and None not in chain:
        rows.append((", ".join(CHAIN), "", "", "", "", *_time_cells(chain)))
    return rows


def _is_tight(plan: Plan, planned: PlannedStage) -> bool:
    """Return whether a stage would not fit if the driver took as much of the card as beside the card measured."""
    needs = planned.card_needed_bytes + planned.server_bytes + planned.reward_bytes
    on_card = planned.in_memory_of == "cuda" and plan.card_bytes is not None
    return on_card and needs + CONTEXT_SEEN - CONTEXT_BYTES > (plan.card_bytes or 0)


def _time_cells(stages: Sequence[StageTime | None]) -> tuple[str, str]:
    """Return sums over stages: projected hours with their interval, `3.2 (2.4-5.1)`, and dollars."""
    times = [time for time in stages if time is not None]
    if not times:
        return "-", "-"
    costs = [time.projected_cost for time in times if time.projected_cost is not None]
    low, high = (sum(time.projected_hours_range[end] for time in times) for end in (0, 1))
    hours = sum(time.projected_hours for time in times)
    digits = 1 if hours >= SHORT else 2
    projected = f"{hours:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
    return projected, f"${sum(costs):.2f}" if costs else "-"


def between_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each stage of several processes: what a rank receives in a step, its seconds, the scaling.

    GB are those of gradients and of layers, seconds those at the link's nominal rate. Scaling: the share of n times the
    speed that n cards reach, from no message hidden behind computing to all that can be.
    """
    rows = []
    for stage, planned in plan.stages.items():
        if planned.time and (traffic := planned.time.between_ranks):
            sizes = [gb(size, 3) for size in (traffic.gradient_bytes_per_step, traffic.weight_bytes_per_step)]
            scaling = " to ".join(f"{share:.0%}" for share in traffic.projected_scaling)
            rows.append((stage, *sizes, f"{traffic.seconds_per_step:.3f} s", scaling))
    return rows


def phase_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield each phase with its stage, which is named once: its peak and the components of the peak in GB.

    A phase that has the numbers of one of its parts is left out: of `evaluate` and `evaluate/prefill` the latter stays.
    """
    for stage, planned in plan.stages.items():
        phases, named = planned.phases, ""
        for name, phase in phases.items():
            inner = [part for at, part in phases.items() if at.startswith(f"{name}/")]
            if any((part.peak_bytes, part.components) == (phase.peak_bytes, phase.components) for part in inner):
                continue
            yield "" if named else stage, name, gb(phase.peak_bytes), _holds(phase)
            named = stage


def _holds(phase: PredictedPhase) -> str:
    parts = sorted(phase.components.items(), key=lambda part: -part[1])
    return ", ".join(f"{part} {gb(size)}" for part, size in parts if gb(size) != gb(0))


def notes(plan: Plan) -> Iterator[str]:
    """Yield closing lines: where hours come from, why stages have none, and what lies beside a stage."""
    if any(planned.time for planned in plan.stages.values()):
        yield f"hours: lengths of rows {plan.row_lengths}; peaks are those of the longest rows admitted"
        if plan.speed:
            yield f"hours: while nothing else runs, from rates measured here: {plan.speed}"
    for reason in dict.fromkeys(planned.no_time for planned in plan.stages.values() if planned.no_time):
        stages = ", ".join(stage for stage, planned in plan.stages.items() if planned.no_time == reason)
        yield f"no hours for {stages}: {reason}"
    for stage, planned in plan.stages.items():
        if planned.server_bytes:
            yield f"{stage}: its vLLM server takes {gb(planned.server_bytes)} GB of the card beside this"
        if planned.reward_bytes:
            yield f"{stage}: reward models of others take {gb(planned.reward_bytes)} GB beside this (estimated)"


def show_fits(
    loaded: PinnedRecipe,
    settings: Fit,
    limit: int,
    as_json: bool,
    hours: tuple[float, float] | None = None,
    price: float | None = None,
) -> None:
    """Print the settings that fit, and the projected hours of training before and with them, with their cost.

    `price` is in dollars for an hour of one card. Raises UserError where a stage needs more than `limit` bytes with all
    of them.
    """
    needs = {stage: card_needed_bytes(predicted.whole) for stage, predicted in settings.stages.items()}
    changes = loaded.with_changes(settings.changes).overrides
    costs = [loaded.recipe.hardware.count * price * one for one in hours] if hours and price is not None else None
    if as_json:
        stages = {
            stage: {"peak_bytes": p.whole.peak_bytes, "card_needed_bytes": needs[stage], "fits": needs[stage] <= limit}
            for stage, p in settings.stages.items()
        }
        content: dict[str, object] = {"limit_bytes": limit, "set": settings.changes, "stages": stages}
        click.echo(json.dumps(content | ({"projected_cost": costs[1]} if costs else {}), indent=2))
    else:
        rows = [
            (stage, gb(p.whole.peak_bytes), gb(needs[stage]), "NO" if stage in settings.too_large else "fits")
            for stage, p in settings.stages.items()
        ]
        title = f"{loaded.name} {loaded.version}: settings predicted to need at most {gb(limit)} GB"
        rows_table(title, ("stage", "peak, GB", "needs, GB", ""), rows)
    if settings.too_large:
        raise UserError(
            f"--fit: {', '.join(settings.too_large)} needs {gb(max(needs[stage] for stage in settings.too_large))} GB "
            f"with the smallest settings, more than {gb(limit)}: allow more, or shorten rows: --set STAGE.max_length=N"
        )
    if as_json:
        return
    screen.OUT.print("for every stage alike, so that they build on each other:" if changes else "nothing to change")
    if changes:
        words = " ".join(f"--set {key}={as_yaml(value)}" for key, value in changes.items())
        screen.OUT.print(f"  {words}", soft_wrap=True)
    if hours:
        cost = f", ${costs[0]:.2f} and ${costs[1]:.2f}" if costs else ""
        screen.OUT.print(f"projected hours: {hours[0]:.2f} as the recipe is, {hours[1]:.2f} with these settings{cost}")


def show_published(loaded: PinnedRecipe, rows: Sequence[ComparedFigure], as_json: bool) -> None:
    """Print the published figures beside their predictions."""
    if as_json:
        click.echo(json.dumps([row.as_json() for row in rows], indent=2))
        return
    cells = []
    for row in rows:
        value = "" if row.predicted is None else number(float(f"{row.predicted:.3g}"))
        cells.append((row.figure.stage, row.figure.title, row.figure.text(in_full=True), value, str(row.verdict)))
    columns = ("stage", "figure", "published", "predicted", "verdict")
    rows_table(f"{loaded.name} {loaded.version}: published figures and what is predicted", columns, cells)
