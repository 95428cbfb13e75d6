"""`rlhf plan`: memory, time and cost of a recipe before anything is started."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import click

from rlhf import terminal
from rlhf.cli.choice import PRICE, RUN, Choice, chooses_recipe
from rlhf.cli.outcome import show_table
from rlhf.errors import UserError
from rlhf.plan import plan as planning
from rlhf.plan import published_figures
from rlhf.plan.fit import USABLE
from rlhf.plan.fit import fit as fitting
from rlhf.plan.own_rows import read_rows
from rlhf.plan.phases import ON_HOST
from rlhf.plan.plan import Plan, PlannedStage, StageTime
from rlhf.plan.predict import Predictor, card_needed_bytes, predicted_stages
from rlhf.plan.published_figures import ComparedFigure
from rlhf.process.memory import CONTEXT_BYTES, CONTEXT_SEEN
from rlhf.recipe import PinnedRecipe, StageName, as_yaml
from rlhf.recipe.published import CHAIN
from rlhf.recipe.stages import PRETRAIN, STAGES
from rlhf.report.tables import table
from rlhf.terminal import screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb, number, size_in_bytes

COLUMNS = ("stage", "peak", "needs", "verdict", "hours projected", "cost")
UNDECIDED = {"cuda": "no card named", "cpu": "on the CPU", "host": "in the host's memory"}  # verdict on memory
SHORT = 0.1  # hours; fewer have two decimals


@click.command()
@RUN
@chooses_recipe
@click.option("--stage", type=click.Choice([s for s in STAGES if s != PRETRAIN]), help="Plan only this stage.")
@click.option("--fit", metavar="12GB|card", help="Search for settings that need at most this, or the recipe's card.")
@click.option("--phases", is_flag=True, help="Show what each phase of a stage holds at its peak.")
@click.option("--published", is_flag=True, help="Show every published figure beside its prediction.")
@PRICE
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(
    choice: Choice,
    stage: StageName | None,
    price: float | None,
    fit: str | None,
    phases: bool,
    published: bool,
    as_json: bool,
) -> None:
    """Predict memory, time and cost of a recipe without a GPU.

    Nothing is started. The exit code is 1 if the recipe does not fit its card, or on a CPU this machine.
    """
    if sum(map(bool, (fit, published, as_json))) > 1:
        raise click.UsageError("--fit, --published and --json answer different questions: ask one at a time")
    if fit and fit != "card" and size_in_bytes(fit) is None:
        raise click.BadParameter(f"{fit!r}: a size with its unit, such as 12GB, or card", param_hint="--fit")
    loaded = choice.load(stage)
    if "model.name" in loaded.overrides and not any(key.startswith("model.arch") for key in loaded.overrides):
        terminal.say("memory is predicted for model.architecture, still that of the recipe's own model: set it too")
    stages = predicted_stages(loaded.recipe)
    planned = [stage] if stage else stages
    if fit:
        limit = size_in_bytes(fit) or round(USABLE * planning.card_bytes(loaded))
        _show_fits(loaded, planned, limit)
        return
    with Predictor() as predictor, working("rehearsing the stages") as say:
        made = planning.make_plan(predictor, loaded, stages if published else planned, price, say)
    if published:
        figures = tuple(figure for figure in loaded.figures if stage in (None, figure.stage))
        _show_published(loaded, published_figures.compare(loaded._replace(figures=figures), made))
        return
    if as_json:
        click.echo(json.dumps(asdict(made), indent=2))
    else:
        _show(made, phases)
    if any(row.fits is False for row in made.stages.values()):
        what = "this machine" if made.free_bytes is not None else "its card"
        raise UserError(f"the recipe does not fit {what}: --fit card looks for settings that do")


def _show(made: Plan, phases: bool) -> None:
    """Print the table of stages and, where wanted, what each phase holds at its peak; then why hours are missing."""
    name = f"{made.recipe} {made.version}" + (", modified" if made.modified else "")
    limit = made.card_bytes or made.free_bytes
    limited = f", of {gb(limit)} GB{' that are free here' if made.free_bytes else ''}" if limit else ""
    show_table(f"{name}: predicted GB{limited}", table(COLUMNS, stage_rows(made)))
    if phases:
        rows_table(f"{name}: predicted peak of each phase, GB", ("stage", "phase", "peak", "holds"), _phase_rows(made))
    if any(planned.time for planned in made.stages.values()):
        screen.OUT.print(f"hours: lengths of rows {made.row_lengths}", style="dim")
    for stage, planned in made.stages.items():
        if planned.no_time:
            screen.OUT.print(f"no hours for {stage}: {planned.no_time}", style="dim")


def stage_rows(made: Plan) -> list[tuple[str, ...]]:
    """Return a row for each stage, cells as COLUMNS name them, and one for SFT, reward model and PPO together.

    What a stage needs is its peak, gaps, paged states and the driver's context; with servers and models beside it.
    """
    rows: list[tuple[str, ...]] = []
    for stage, planned in made.stages.items():
        needs = gb(_needs(planned)) if planned.in_memory_of == "cuda" else ""
        rows.append((stage, gb(planned.peak_bytes), needs, _verdict(made, planned), *_time_cells([planned.time])))
    chain = [made.stages[stage].time for stage in CHAIN if stage in made.stages]
    if len(chain) == len(CHAIN) and None not in chain:
        rows.append((", ".join(CHAIN), "", "", "", *_time_cells(chain)))
    return rows


def _needs(planned: PlannedStage) -> int:
    return planned.card_needed_bytes + planned.beside_bytes


def _verdict(made: Plan, planned: PlannedStage) -> str:
    """Return whether a stage fits.

    It is tight where it would not fit if the driver took as much of the card as the card measured beside it.
    """
    on_card = made.card_bytes if planned.in_memory_of == "cuda" else None
    tight = on_card is not None and _needs(planned) + CONTEXT_SEEN - CONTEXT_BYTES > on_card
    if planned.fits is None:
        return UNDECIDED[planned.in_memory_of]
    return "DOES NOT FIT" if not planned.fits else "tight" if tight else "fits"


def _time_cells(stages: Sequence[StageTime | None]) -> tuple[str, str]:
    """Return sums over stages: projected hours with their interval, `3.2 (2.4-5.1)`, and dollars."""
    times = [time for time in stages if time is not None]
    if not times:
        return "", ""
    costs = [time.projected_cost for time in times if time.projected_cost is not None]
    low, high = (sum(time.projected_hours_range[end] for time in times) for end in (0, 1))
    hours = sum(time.projected_hours for time in times)
    digits = 1 if hours >= SHORT else 2
    return f"{hours:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})", f"${sum(costs):.2f}" if costs else ""


def _phase_rows(made: Plan) -> Iterator[tuple[str, ...]]:
    """Yield each phase: its stage, its peak and the components of the peak in GB, the largest first."""
    for stage, planned in made.stages.items():
        for name, phase in planned.phases.items():
            parts = sorted(phase.components.items(), key=lambda part: -part[1])
            holds = ", ".join(f"{part} {gb(size)}" for part, size in parts if gb(size) != gb(0))
            yield stage, name, gb(phase.peak_bytes), holds


def _show_fits(loaded: PinnedRecipe, stages: Sequence[StageName], limit: int) -> None:
    """Search for settings with which the stages need at most `limit` bytes, and print them.

    Raises UserError where a stage needs more with all of them.
    """
    on_card = [stage for stage in stages if stage not in ON_HOST]
    if not on_card:
        raise click.UsageError(f"{stages[0]} uses the host's memory and none of the card's: there is nothing to fit")
    with Predictor() as predictor, working("looking for settings that fit") as say:
        found = fitting(predictor.predict, loaded, on_card, limit, say)
    needs = {stage: card_needed_bytes(predicted.whole) for stage, predicted in found.stages.items()}
    rows = [(stage, gb(need), "NO" if stage in found.too_large else "fits") for stage, need in needs.items()]
    title = f"{loaded.name} {loaded.version}: settings predicted to need at most {gb(limit)} GB"
    rows_table(title, ("stage", "needs, GB", ""), rows)
    if found.too_large:
        raise UserError(
            f"--fit: {', '.join(found.too_large)} needs {gb(max(needs[stage] for stage in found.too_large))} GB "
            f"with the smallest settings, more than {gb(limit)}: allow more, or shorten rows: --set STAGE.max_length=N"
        )
    changed = loaded.with_changes(found.changes)
    words = " ".join(f"--set {key}={as_yaml(value)}" for key, value in changed.overrides.items())
    screen.OUT.print(f"for every stage alike: {words or 'nothing to change'}", soft_wrap=True)
    made = planning.plan_of(changed, found.stages, own=read_rows(loaded.recipe, found.stages))
    if hours := [planned.time.projected_hours for planned in made.stages.values() if planned.time]:
        screen.OUT.print(f"projected hours with these settings: {sum(hours):.2f}")


def _show_published(loaded: PinnedRecipe, rows: Sequence[ComparedFigure]) -> None:
    """Print the published figures beside their predictions."""
    cells = []
    for row in rows:
        value = "" if row.predicted is None else number(float(f"{row.predicted:.3g}"))
        cells.append((row.figure.stage, row.figure.title, row.figure.text(), value, str(row.verdict)))
    columns = ("stage", "figure", "published", "predicted", "verdict")
    rows_table(f"{loaded.name} {loaded.version}: published figures and what is predicted", columns, cells)
