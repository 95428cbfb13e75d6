"""What `rlhf run` prints of a finished stage, and of the chain so far."""

from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text

from rlhf.recipe import published
from rlhf.recipe.published import Verdict
from rlhf.recipe.stages import EVALUATE, REWARD_MODELS
from rlhf.run.comparisons import Cost, costs, totals
from rlhf.run.evidence import gains_over_start
from rlhf.run.records import Comparison, Summary
from rlhf.terminal import screen, wording
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import estimate, number, without_ends


def summary_table(summary: Summary) -> None:
    """Print the table of a finished stage: figures and targets first, then all other metrics and costs."""
    rows: list[tuple[str | Text, ...]] = [
        (target.figure.title, target.figure.text(in_full=True), number(target.measured), _verdict(target.outcome))
        for target in summary.targets
    ]
    listed = {key for target in summary.targets for key in (target.name, target.metric)}
    if summary.stage != EVALUATE:  # whose policies and reward models have tables of their own
        others = [name for name in without_ends(summary.metrics) if name not in listed]
        rows += [(wording.metric(name), "", estimate(summary.metrics, name, "\n") or "-", "") for name in others]
    title = f"{summary.recipe} {summary.version}: {summary.stage}, seed {summary.seed}{_changes(summary)}"
    rows_table(title, ("metric", _aim(summary.targets), "measured", "verdict"), rows)
    rows_table("", ("", *Cost._fields[1:]), costs(summary), numbers=True)
    if summary.stage == EVALUATE:
        _side_by_side(summary.metrics)
    for one in gains_over_start({summary.stage: summary}):
        style = {"good": "green", "bad": "red"}.get(one.kind, "")
        text = f"{one.title}: {one.name} {number(one.start)} → {number(one.end)}, {one.in_words()}"
        screen.OUT.print(text, style=style)
    if summary.findings:
        screen.OUT.print(f"findings: {', '.join(summary.findings)} (findings.jsonl says what to try)")


def targets_table(summaries: Sequence[Summary]) -> None:
    """Print a line for each figure of a recipe's finished stages, then the figures of all stages together."""
    rows: list[tuple[str | Text, ...]] = []
    for summary in summaries:
        cells: list[tuple[str | Text, ...]] = [
            (target.figure.title, target.figure.text(), number(target.measured), _verdict(target.outcome))
            for target in summary.targets
        ]
        wall = f"{summary.wall_seconds:.0f} s"
        rows += [(summary.stage, *row, wall) for row in cells or [("", "", "", "")]]
    for figure, value, outcome in totals({summary.stage: summary for summary in summaries}):
        rows.append(("all", figure.title, figure.text(), number(value), _verdict(outcome), ""))
    changed = next((_changes(summary) for summary in summaries if summary.released_sha256), "")
    aim = _aim(target for summary in summaries for target in summary.targets)
    rows_table(f"the chain so far{changed}", ("stage", "metric", aim, "measured", "verdict", "wall"), rows)


def _side_by_side(metrics: Mapping[str, float | None]) -> None:
    """Print metrics named `<policy>/<metric>`, a column for each policy, and those of reward models likewise."""
    columns: dict[str, dict[str, float | None]] = {}
    for key, value in metrics.items():
        column, _, name = key.partition("/")
        columns.setdefault(column, {})[name] = value
    models = {column: found for column, found in columns.items() if column in REWARD_MODELS}
    policies = {column: found for column, found in columns.items() if column not in REWARD_MODELS}
    for title, shown in (("held-out prompts", policies), ("held-out pairs", models)):
        names = without_ends(dict.fromkeys(name for found in shown.values() for name in found))
        rows = [(wording.metric(name), *(estimate(found, name, "\n") for found in shown.values())) for name in names]
        if rows:
            rows_table(f"on {title} (brackets: 95 %)", ("", *shown), rows, numbers=True)


def _changes(summary: Summary) -> str:
    """Return what a title adds about a recipe that was changed, by options or in its file after its release."""
    return ", modified recipe" if summary.modified or summary.released_sha256 else ""


def _aim(targets: Iterable[Comparison]) -> str:
    """Return the heading of the column of figures: those of a guide are published, ours are targets."""
    return "published" if any(target.guide for target in targets) else "target"


def _verdict(outcome: Verdict) -> Text:
    """Return a verdict in its colour."""
    colour = "green" if outcome.word in published.GOOD else "red" if outcome.word in published.BAD else ""
    return Text(str(outcome), style=colour)
