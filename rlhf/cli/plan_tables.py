"""Tables of a plan on the console, or the plan as JSON."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence

import click

from rlhf.errors import UserError
from rlhf.plan import published_figures
from rlhf.plan.buying import BreakEven
from rlhf.plan.fit import Fit
from rlhf.plan.machine import LIBRARIES
from rlhf.plan.phases import PeakPart, StepOperations
from rlhf.plan.plan import Plan, PlannedPhase, StageTime
from rlhf.plan.predict import card_needed_bytes
from rlhf.plan.published_figures import ComparedFigure
from rlhf.plan.strategies import StrategyCost
from rlhf.recipe import PinnedRecipe, TrainingName, as_yaml, totals
from rlhf.terminal import screen
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb

# Components that the table adds up.
OTHERS: tuple[PeakPart, ...] = ("quantization", "heads", "buffers", "kernels", "workspace")
# Those with a column of their own.
SHOWN: tuple[PeakPart, ...] = (
    "base",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "kv_cache",
    "temporaries",
)
PHASE_COLUMNS = ("stage", "phase", "peak", "base", "adapt", "grads", "optim", "activ", "logits", "KV", "temp", "other")
FULL_WIDTH = 112  # of a terminal that has room for all columns
ROOMY = 0.7  # share of a card below which faster settings are worth a look
SHORT = 0.1  # hours; fewer have two decimals
MOST = 2  # components that a narrow terminal has room for


def phase_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each phase: stage, phase, its peak and the components of the peak in GB."""
    rows = []
    for stage, name, phase in _phases(plan):
        parts = phase.components
        cells = [gb(parts.get(part, 0)) for part in SHOWN]
        rows.append((stage, name, gb(phase.peak_bytes), *cells, gb(sum(parts.get(part, 0) for part in OTHERS))))
    return rows


def narrow_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each phase: stage, phase, its peak and the largest components of the peak in GB."""
    rows: list[tuple[str, ...]] = []
    for stage, name, phase in _phases(plan):
        largest = sorted(phase.components.items(), key=lambda part: -part[1])[:MOST]
        parts = ", ".join(f"{part} {gb(size)}" for part, size in largest)
        rows.append((stage, name, gb(phase.peak_bytes), parts))
    return rows


def _phases(plan: Plan) -> Iterator[tuple[str, str, PlannedPhase]]:
    """Yield each phase with its stage, which is named once, and its numbers.

    A phase that has the numbers of one of its parts is left out: of `evaluate` and `evaluate/prefill` the latter stays.
    """
    for stage, planned in plan.stages.items():
        phases = planned.phases
        shown = [
            name
            for name, phase in phases.items()
            if not any(part.startswith(f"{name}/") and phases[part] == phase for part in phases)
        ]
        for position, name in enumerate(shown):
            yield "" if position else stage, name, phases[name]


STAGE_COLUMNS = (
    "stage",
    "peak",
    "needs",
    "published",
    "verdict",
    "fewest hours",
    "hours projected",
    "cost",
)
WIDE_ONLY = ("published", "fewest hours")  # columns that a narrow terminal has no room for
CARD_ONLY = ("needs",)  # on a CPU it would be the peak
WITHOUT_CARD = {"cuda": "no card named", "cpu": "on the CPU", "host": "in the host's memory"}  # verdict on memory
EXPLAINED = {
    "peak": "what torch allocates",
    "needs": "what the card must have: peak, gaps, paged states and the driver",
    "verdict": "fits the card or not; better or worse than the published peak",
    "fewest hours": "at the card's nominal rates, which no run reaches",
    "hours projected": "(from-to) as other runs reach those rates (docs/memory.md)",
}

OF_ANY_DEVICE = ("peak",)  # columns whose explanation holds on a CPU too


def stage_table(plan: Plan, wide: bool) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of stages: no empty ones and, if not `wide`, none of WIDE_ONLY."""
    rows = stage_rows(plan)
    on_card = any(planned.in_memory_of == "cuda" for planned in plan.stages.values())
    left_out = {*(() if wide else WIDE_ONLY), *(() if on_card else CARD_ONLY)}
    by_column = dict(zip(STAGE_COLUMNS, zip(*rows, strict=True), strict=True))
    empty = {column for column, cells in by_column.items() if {*cells} <= {"-", ""}}
    kept = [index for index, column in enumerate(STAGE_COLUMNS) if column not in left_out | empty]
    return [STAGE_COLUMNS[index] for index in kept], [[row[index] for index in kept] for row in rows]


def stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each stage: peak, need, published range, verdict, hours, cost; and one for the chain."""
    rows: list[tuple[str, ...]] = []
    for stage, planned in plan.stages.items():
        ranges = ("-".join(dict.fromkeys(gb(x, 0) for x in ends if x)) for ends in planned.published_bytes or ())
        published = ", ".join(dict.fromkeys(ranges)) or "-"
        verdict = {True: "fits", False: "DOES NOT FIT", None: WITHOUT_CARD[planned.in_memory_of]}[planned.fits]
        verdict += f", {planned.verdict}" if planned.verdict else ""
        sizes = gb(planned.peak_bytes), gb(planned.card_needed_bytes)
        rows.append((stage, *sizes, published, verdict, *_time_cells([planned.time])))
    chain = [plan.stages[stage].time for stage in totals.CHAIN if stage in plan.stages]
    if len(chain) == len(totals.CHAIN) and None not in chain:
        rows.append((", ".join(totals.CHAIN), "", "", "", "", *_time_cells(chain)))
    return rows


def _time_cells(stages: Sequence[StageTime | None]) -> tuple[str, str, str]:
    """Return sums over stages: hours at the limit, projected hours with their interval, `3.2 (2.4-5.1)`, dollars."""
    times = [time for time in stages if time is not None]
    if not times:
        return "-", "-", "-"
    costs = [time.projected_cost for time in times if time.projected_cost is not None]
    low, high = (sum(time.projected_hours_range[end] for time in times) for end in (0, 1))
    hours, limit = sum(time.projected_hours for time in times), sum(time.limit_hours for time in times)
    digits = 1 if hours >= SHORT else 2
    projected = f"{hours:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
    return f"{limit:.{digits}f}", projected, f"${sum(costs):.2f}" if costs else "-"


BETWEEN_COLUMNS = ("stage", "gradients, GB", "layers, GB", "at the link's limit", "scaling")


def between_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each stage: the GB that a rank receives in a step, the seconds that takes, and the scaling.

    The GB are those of gradients and of layers, the seconds those at the link's nominal rate. Scaling: the share of n
    times the speed that n cards reach, from no message hidden behind computing to all that can be.
    """
    rows = []
    for stage, planned in plan.stages.items():
        if planned.time and (traffic := planned.time.between_ranks):
            sizes = [gb(size, 3) for size in (traffic.gradient_bytes_per_step, traffic.weight_bytes_per_step)]
            scaling = " to ".join(f"{share:.0%}" for share in traffic.projected_scaling)
            rows.append((stage, *sizes, f"{traffic.seconds_per_step:.3f} s", scaling))
    return rows


def step_lines(plan: Plan) -> list[str]:
    """Return lines on what a decoding step of a rollout launches, and what of it no graph can hold."""
    roles = next((planned.decoding_step for planned in plan.stages.values() if planned.decoding_step), None)
    if not roles:
        return []
    counts = ", ".join(f"{role} {n.total:,} ({_in_layers(n)})" for role, n in roles.items())
    unsafe = dict.fromkeys(reason for n in roles.values() for reason in n.unsafe)
    return [f"operations of a decoding step, each at least one kernel: {counts}"] + [
        f"a captured graph cannot hold {reason}" for reason in unsafe
    ]


def _in_layers(role: StepOperations) -> str:
    if role.per_plain_layer in (None, role.per_layer):
        return f"{role.per_layer} a layer"
    return f"{role.per_layer} a layer with adapters, {role.per_plain_layer} without"


def time_lines(plan: Plan) -> list[str]:
    """Return lines on projected hours: where the lengths of rows come from, and why stages have none."""
    lines = []
    if any(planned.time for planned in plan.stages.values()):
        lines.append(f"hours: lengths of rows {plan.row_lengths}; peaks are those of the longest rows admitted")
        if plan.speed:
            lines.append(f"hours: while nothing else runs, from rates measured here: {plan.speed}")
    reasons = dict.fromkeys(planned.no_time for planned in plan.stages.values() if planned.no_time)
    for reason in reasons:
        stages = ", ".join(stage for stage, planned in plan.stages.items() if planned.no_time == reason)
        lines.append(f"no hours for {stages}: {reason}")
    return lines


def answer(plan: Plan) -> str:
    """Return the first line: whether all fits, what needs most, and the hours and the cost of all stages."""
    parts = []
    on_card = {stage: planned for stage, planned in plan.stages.items() if planned.in_memory_of == "cuda"}
    if plan.card_bytes and on_card:
        needs = {stage: p.card_needed_bytes + p.server_bytes + p.reward_bytes for stage, p in on_card.items()}
        largest = max(needs, key=lambda stage: needs[stage])
        said = "fits" if all(planned.fits for planned in on_card.values()) else "does not fit"
        room = "; --fastest looks for settings that use the rest" if needs[largest] < ROOMY * plan.card_bytes else ""
        parts.append(f"{said} the card: {largest} needs most, {gb(needs[largest])} of {gb(plan.card_bytes)} GB{room}")
    if plan.free_bytes is not None:
        said = "fits" if all(planned.fits for planned in plan.stages.values()) else "does not fit"
        parts.append(
            f"{said}: {gb(plan.free_bytes)} GB are {plan.free_words}, of which each process takes {gb(LIBRARIES)} GB "
            "for libraries, beside its peak"
        )
    times = {stage: planned.time for stage, planned in plan.stages.items() if planned.time}
    if times:
        _, hours, cost = _time_cells([*times.values()])
        of = f" of {', '.join(times)}" if len(times) > 1 else ""
        untimed = [stage for stage, planned in plan.stages.items() if planned.no_time]
        without = f" without {', '.join(untimed)}" if untimed else ""
        parts.append(f"projected hours{of}{without}: {hours}" + (f", {cost}" if cost != "-" else ""))
    return ". ".join(parts)


def hints(plan: Plan) -> list[str]:
    """Return closing lines: what a server takes, and how to name a price."""
    lines = [
        f"{stage}: its vLLM server takes {gb(planned.server_bytes)} GB of the card beside this"
        for stage, planned in plan.stages.items()
        if planned.server_bytes
    ]
    lines += [
        f"{stage}: reward models of others take {gb(planned.reward_bytes)} GB beside this while they score (estimated)"
        for stage, planned in plan.stages.items()
        if planned.reward_bytes
    ]
    if plan.price_per_hour is None and any(planned.time for planned in plan.stages.values()):
        lines.append("--price, dollars for an hour of a card, adds the cost")
    return lines


def show(plan: Plan, as_json: bool, buying: BreakEven | None = None) -> None:
    """Print a plan, as tables or as one JSON object, with the break-even of buying a card where it is known."""
    if as_json:
        content = plan.as_json() | {"buying": buying.as_json() if buying else None}
        click.echo(json.dumps(content, indent=2))
        return
    name = f"{plan.recipe} {plan.version}" + (", modified" if plan.modified else "")
    if said := answer(plan):
        screen.OUT.print(f"{name}: {said}")
    wide = screen.OUT.width >= FULL_WIDTH
    columns, rows = (PHASE_COLUMNS, phase_rows) if wide else (("stage", "phase", "peak", "most of it"), narrow_rows)
    rows_table(f"{name}: predicted peak of each phase, GB", columns, rows(plan))
    cards = f"each of {plan.cards} cards" if plan.cards > 1 else "card"
    card = f", {cards} {gb(plan.card_bytes)} GB" if plan.card_bytes else ""
    if between := between_rows(plan):
        rows_table(f"{name}: between {plan.cards} cards, projected", BETWEEN_COLUMNS, between)
    for line in step_lines(plan):
        screen.OUT.print(line)
    shown, stages = stage_table(plan, wide)
    timed = ", time" if any(column.startswith("hours") for column in shown) else ""
    rows_table(f"{name}: predicted memory in GB{timed}{card}", shown, stages, whole=True)
    on_card = any(planned.in_memory_of == "cuda" for planned in plan.stages.values())
    for column in (column for column in shown if column in EXPLAINED and (on_card or column in OF_ANY_DEVICE)):
        screen.OUT.print(f"{column}: {EXPLAINED[column]}", style="dim")
    for line in time_lines(plan):
        screen.OUT.print(line, style="dim")
    if buying:
        screen.OUT.print(buying.in_words())
    if on_card:
        screen.OUT.print("These are predictions; docs/memory.md says how near they came on cards.", style="dim")
    for line in hints(plan):
        screen.OUT.print(line)


def show_strategies(
    loaded: PinnedRecipe, costs: Mapping[TrainingName, Mapping[str, StrategyCost]], as_json: bool
) -> None:
    """Print what each strategy changes in each stage, beside what is published."""
    if as_json:
        by_stage = {stage: {name: cost._asdict() for name, cost in rows.items()} for stage, rows in costs.items()}
        click.echo(json.dumps(by_stage, indent=2))
        return
    rows = []
    for stage, strategies in costs.items():
        without = strategies["none"].peak_bytes
        for position, (name, cost) in enumerate(strategies.items()):
            saved = without - cost.peak_bytes
            saves = f"{gb(saved)} ({saved / without:.0%})" if name != "none" else ""
            published = "; ".join(published_figures.of_strategy(loaded, name))
            rows.append(
                (
                    "" if position else stage,
                    name,
                    gb(cost.peak_bytes),
                    saves,
                    f"x {cost.flops:.2f}",
                    published,
                )
            )
    columns = ("stage", "strategy alone", "peak, GB", "saves", "operations", "published")
    rows_table(f"{loaded.name} {loaded.version}: predicted effect of each strategy", columns, rows)


def show_fits(
    loaded: PinnedRecipe,
    settings: Fit,
    limit: int,
    as_json: bool,
    hours: tuple[float, float] | None = None,
    price: float | None = None,
) -> None:
    """Print the settings that fit, and the projected hours of training before and with them, with their cost.

    `price` is in dollars for an hour of one card.

    Raises UserError where a stage needs more than `limit` bytes with all of them.
    """
    needs = {stage: card_needed_bytes(predicted.whole) for stage, predicted in settings.stages.items()}
    if as_json:
        stages = {
            stage: {
                "peak_bytes": predicted.whole.peak_bytes,
                "card_needed_bytes": needs[stage],
                "fits": needs[stage] <= limit,
            }
            for stage, predicted in settings.stages.items()
        }
        content = {"limit_bytes": limit, "set": settings.changes, "stages": stages}
        if hours and price is not None:
            content["projected_cost"] = _costs(loaded, hours, price)[1]
        click.echo(json.dumps(content, indent=2))
    else:
        rows = [
            (
                stage,
                gb(predicted.whole.peak_bytes),
                gb(needs[stage]),
                "DOES NOT FIT" if stage in settings.too_large else "fits",
            )
            for stage, predicted in settings.stages.items()
        ]
        title = f"{loaded.name} {loaded.version}: fastest settings predicted to need at most {gb(limit)} GB"
        rows_table(title, ("stage", "peak, GB", "needs, GB", ""), rows)
    if settings.too_large:
        raise UserError(
            f"{', '.join(settings.too_large)}: no settings fit {gb(limit)} GB; the smallest settings tried need "
            f"{gb(max(needs[stage] for stage in settings.too_large))} GB: allow more memory, or shorten the rows: "
            "--set STAGE.max_length=N, or max_prompt_length and response_length"
        )
    if as_json:
        return
    changes = loaded.with_changes(settings.changes).overrides
    if not changes:
        costs = f": ${_costs(loaded, hours, price)[1]:.2f}, projected" if hours and price is not None else ""
        screen.OUT.print(f"these are the recipe's own settings: there is nothing to change{costs}")
        return
    chain = "for every stage alike, so that they build on each other" if len(settings.stages) > 1 else "to be set"
    screen.OUT.print(f"{chain}:")
    words = [f"--set {shlex.quote(f'{key}={as_yaml(value)}')}" for key, value in changes.items()]
    screen.OUT.print(f"  {' '.join(words)}", soft_wrap=True)
    if hours:
        before, after = hours
        screen.OUT.print(f"projected hours of training: {before:.2f} as the recipe is, {after:.2f} with these settings")
        if price is not None:
            before, after = _costs(loaded, hours, price)
            screen.OUT.print(
                f"projected cost of training: ${before:.2f} as the recipe is, ${after:.2f} with these settings"
            )


def _costs(loaded: PinnedRecipe, hours: tuple[float, float], price: float) -> tuple[float, float]:
    """Return the dollars of hours before and with the settings that fit, of all cards."""
    before, after = (loaded.recipe.hardware.count * price * number for number in hours)
    return before, after


def show_published(loaded: PinnedRecipe, rows: Sequence[ComparedFigure], as_json: bool) -> None:
    """Print the published figures beside their predictions."""
    if as_json:
        click.echo(json.dumps([row.as_json() for row in rows], indent=2))
        return
    cells = []
    for row in rows:
        value = "" if row.predicted is None else str(row.predicted)
        judgement = f"{row.basis}: {row.verdict}" if row.basis else str(row.verdict)
        published = row.figure.text(in_full=True)
        cells.append((row.figure.stage, row.figure.title, published, value, judgement))
    columns = ("stage", "figure", "published", "predicted", "verdict")
    rows_table(f"{loaded.name} {loaded.version}: published figures and what is predicted", columns, cells)
