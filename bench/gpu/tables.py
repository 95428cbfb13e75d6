"""What `python -m bench.gpu` prints: the plan, a line for each item, the decisions and the bounds."""

from collections.abc import Iterable, Sequence

import click

from bench.gpu import record
from bench.gpu.plan import GpuItem
from bench.gpu.record import GpuRecord
from rlhf.errors import UserError
from rlhf.terminal.tables import rows_table


def line_of(row: GpuRecord) -> str:
    """Return a record in one line."""
    decision = row["verdict"] or "not decided"
    detail = row["error"] or row["why"]
    state = row["outcome"] if row["outcome"] != "done" else decision
    return f"{row['gpu_item']}: {state}{f' ({detail})' if detail else ''}, {row['seconds'] or 0:.0f} s"


def show_plan(items: Iterable[GpuItem]) -> None:
    """Print the items with the minutes that each may take, the minutes until its end, and its claim."""
    total, rows = 0.0, []
    for item in items:
        total += item.minutes
        rows.append((item.name, f"{item.minutes:g}", f"{total:g}", item.recipe or "", item.claim))
    rows_table("bench.gpu", ("item", "minutes", "in all", "recipe", "decides whether"), rows)


def show_records(rows: Sequence[GpuRecord]) -> None:
    """Print what the items decided, and how near measured phases are to their bounds."""
    table = [
        (
            row["gpu_item"],
            row["outcome"],
            f"{row['seconds'] or 0:.0f}",
            row["verdict"] or "-",
            row["error"] or row["why"],
        )
        for row in rows
    ]
    rows_table("what was decided", ("item", "outcome", "s", "claim", "figures"), table)
    if phases := [line for row in rows for line in bound_rows(row)]:
        rows_table("seconds of a step beside the roofline", ("phase", "measured", "least", "reached"), phases)


def bound_rows(row: GpuRecord) -> list[tuple[str, ...]]:
    """Return a table row for each phase of a record that has a roofline."""
    try:
        stages = record.speed_of(row).get("stages", {})
    except UserError as error:  # of a record of another version, say: the others are still shown
        click.echo(error, err=True)
        return []
    return [
        (
            f"{row['gpu_item']}: {stage}/{phase}",
            f"{bound['seconds']:.3g}",
            f"{bound['least_seconds']:.3g}",
            f"{bound['reached']:.0%}",
        )
        for stage, figures in stages.items()
        for phase, bound in figures.get("roofline", {}).items()
    ]
