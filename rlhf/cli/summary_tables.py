"""Tables of `rlhf run` on stdout: of a finished stage, and of the chain so far."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from rlhf.recipe import published
from rlhf.recipe.pinned import difference
from rlhf.recipe.published import Verdict
from rlhf.recipe.stages import EVALUATE, OF_REWARD_MODELS, REWARD_MODELS, STAGE_TABLE
from rlhf.run.comparisons import Cost, costs, totals
from rlhf.run.evidence import HELDOUT_PROMPTS, gains_over_start, of_prompts
from rlhf.run.records import Comparison, Summary
from rlhf.terminal import screen, wording
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import estimate, number, without_ends


def summary_table(summary: Summary) -> None:
    """Print the table of a finished stage: figures and targets first, then all other metrics and costs."""
    title = f"{summary.recipe} {summary.version}: {summary.stage}, seed {summary.seed}"
    table = Table(title=title + _changes(summary), title_justify="left")
    columns: tuple[tuple[str, JustifyMethod], ...] = (
        ("metric", "left"),
        (_figures_heading(summary.targets), "left"),
        ("measured", "right"),
        ("verdict", "left"),
    )
    for column, alignment in columns:
        table.add_column(column, justify=alignment)
    for target in summary.targets:
        figure, outcome = target.figure, _verdict(target.outcome)
        table.add_row(figure.title, figure.text(in_full=True), number(target.measured), outcome)
    listed = {key for target in summary.targets for key in (target.name, target.metric)}
    is_evaluation = summary.stage == EVALUATE  # policies and reward model have tables of their own
    for name in () if is_evaluation else without_ends(summary.metrics):
        if name not in listed:
            table.add_row(
                Text(wording.metric(name)) + _better(name), "", estimate(summary.metrics, name, "\n") or "-", ""
            )
    screen.OUT.print(table)
    kept = [name for name in Cost._fields if any(getattr(cost, name) for cost in costs(summary))]
    rows_table("", ("", *kept[1:]), [[getattr(cost, name) for name in kept] for cost in costs(summary)], numbers=True)
    if is_evaluation:
        _side_by_side(summary.metrics)
    gains = gains_over_start({summary.stage: summary})
    for one in gains:
        style = {"good": "green", "bad": "red"}.get(one.kind, "")
        text = f"{one.title}: {one.name} {number(one.start)} → {number(one.end)}, {one.in_words()}"
        screen.OUT.print(text, style=style)
    if summary.findings:
        screen.OUT.print(f"findings: {', '.join(summary.findings)} (findings.jsonl says what to try)")


def targets_table(summaries: Sequence[Summary], price: float | None = None) -> None:
    """Print a line for each figure of a recipe's finished stages, then the figures of all stages together.

    `price` is in dollars per hour of one card.
    """
    chain_figures = totals({summary.stage: summary for summary in summaries}, price)
    targets = [target for summary in summaries for target in summary.targets]
    heading = "published" if chain_figures else _figures_heading(targets)
    edited = next((_changes(summary) for summary in summaries if summary.released_sha256), "")
    table = Table(title=f"the chain so far{edited}", title_justify="left")
    for column in ("stage", "metric", heading, "measured", "verdict", "wall"):
        table.add_column(column, justify="right" if column in ("measured", "wall") else "left")
    for summary in summaries:
        cells: list[tuple[str | Text, ...]] = [
            (target.figure.title, target.figure.text(), number(target.measured), _verdict(target.outcome))
            for target in summary.targets
        ]
        for index, row in enumerate(cells or [("",) * 4]):
            table.add_row("" if index else summary.stage, *row, "" if index else f"{summary.wall_seconds:.0f} s")
    for index, (figure, value, outcome) in enumerate(chain_figures):
        table.add_row("" if index else "all", figure.title, figure.text(), number(value), _verdict(outcome), "")
    screen.OUT.print(table)


def _side_by_side(metrics: Mapping[str, float | None]) -> None:
    """Print metrics named `<policy>/<metric>`: a column for each policy and a row for each metric.

    Those of reward models get a table of their own. Brackets are 95 % intervals.
    """
    columns = list(dict.fromkeys(name.partition("/")[0] for name in metrics))
    models = [column for column in columns if column in REWARD_MODELS]
    policies = [column for column in columns if column not in models]
    prompts = next((int(n) for policy in policies if (n := metrics.get(f"{policy}/{HELDOUT_PROMPTS}"))), None)
    every = dict.fromkeys(name.partition("/")[2] for name in metrics if not name.startswith(OF_REWARD_MODELS))
    measures = [name for name in without_ends(every) if name != HELDOUT_PROMPTS]
    rows = [
        (wording.metric(name), *(estimate(metrics, f"{policy}/{name}", "\n") for policy in policies))
        for name in measures
    ]
    title = of_prompts(prompts).strip() or "on held-out prompts"
    title += " (brackets: 95 %)" if len(without_ends(every)) < len(every) else ""
    rows_table(title, ("", *policies), rows, numbers=True)
    if models:
        of_models = dict.fromkeys(name.partition("/")[2] for name in metrics if name.startswith(OF_REWARD_MODELS))
        body = [
            (wording.metric(name), *(estimate(metrics, f"{model}/{name}") for model in models))
            for name in without_ends(of_models)
        ]
        title = " and ".join(STAGE_TABLE[stage].title for stage in REWARD_MODELS if stage in models)
        rows_table(f"{title} on held-out pairs", ("", *models), body, numbers=True)


def _changes(summary: Summary) -> str:
    """Return what a title adds about a recipe that was changed: by options, or in its file after its release."""
    if edited := difference(summary.recipe_sha256, summary.released_sha256):
        return f", modified recipe ({edited})"
    return ", modified recipe" if summary.modified else ""


def _figures_heading(targets: Iterable[Comparison]) -> str:
    """Return the heading of the column of figures: published, or target."""
    return "published" if any(target.guide for target in targets) else "target"


def _verdict(outcome: Verdict) -> Text:
    """Return a verdict in its colour."""
    colour = "green" if outcome.word in published.GOOD else "red" if outcome.word in published.BAD else ""
    return Text(str(outcome), style=colour)


def _better(metric: str) -> Text:
    """Return which way a metric is better, to follow its name; empty if neither is."""
    if metric in published.LESS:
        return Text(" (lower is better)", style="dim")
    return Text(" (higher is better)" if metric in published.MORE else "", style="dim")
