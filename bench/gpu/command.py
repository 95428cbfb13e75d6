"""The command line of `python -m bench.gpu`."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench.gpu import packages, plan, record, runner
from bench.gpu.plan import Item
from bench.paths import ROOT
from rlhf.files import read_json
from rlhf.observe import console

LEAST = 20.0  # seconds below which no further item is started
OUT = Path("runs/gpu-hour")


@click.command()
@click.option("--box", default="30m", show_default=True, metavar="30m", help="Time limit for all items: 90s, 9m, 1h.")
@click.option("--only", multiple=True, metavar="ITEM", help="Run only this item; may be repeated.")
@click.option(
    "--out", type=click.Path(path_type=Path), help=f"Folder for records and logs. [{OUT}, dry run: {OUT}-dry]"
)
@click.option("--list", "listed", is_flag=True, help="Print the plan: items, their minutes and claims.")
@click.option("--dry-run", is_flag=True, help="Run the items with a tiny recipe on the CPU, to try the code only.")
@click.option(
    "--no-predict", is_flag=True, help="Do not predict at the end; `--conclude` can do it later, on another machine."
)
@click.option(
    "--conclude", is_flag=True, help="Measure nothing; add predicted figures (MFU, MBU) to the records in --out."
)
@click.option("--verify", is_flag=True, help="Measure nothing; check whether the records in --out can be contributed.")
@click.option("--check", is_flag=True, help="Name missing packages and how to install them.")
def command(
    box: str,
    only: tuple[str, ...],
    out: Path | None,
    listed: bool,
    dry_run: bool,
    no_predict: bool,
    conclude: bool,
    verify: bool,
    check: bool,  # answered in __main__.py, which needs no package for it
) -> None:
    """Run the measurements that need a GPU, item by item, until the time limit.

    Exit code 1 if an item failed or a claim does not hold.
    """
    items, limit = plan.choose(only), plan.seconds(box)
    out = out or OUT.with_name(OUT.name + ("-dry" if dry_run else ""))
    if listed:
        show_plan(items)
    elif verify:
        sys.exit(bool(show_problems(out)))
    elif conclude:
        add_predictions(records(out), out)
        show_records(records(out))
    else:
        measure(items, out, limit, dry_run, predict=not no_predict)


def measure(items: list[Item], out: Path, limit: float, dry_run: bool, predict: bool) -> None:
    """Run the items and print their results."""
    end = time.monotonic() + limit
    if not dry_run:
        with console.quiet_libraries():
            import torch

        if not torch.cuda.is_available():  # asks the driver and takes none of the card's memory
            raise click.ClickException(
                f"bench.gpu needs a CUDA device, and torch {torch.__version__} sees none: "
                "see `nvidia-smi`, or try the code with --dry-run"
            )
    rows = []
    for item in items:
        remaining = end - time.monotonic()
        absent = [name for name in item.modules if packages.installed_version(name) is None]
        if dry_run and not item.stand_in:
            row = runner.skip(item, out, dry_run, "cannot run without CUDA")
        elif absent:
            row = runner.skip(item, out, dry_run, f"needs {', '.join(absent)}")
        elif remaining < LEAST:
            row = runner.skip(item, out, dry_run, "the time box was used up before it")
        else:
            row = runner.run(item, out, remaining if dry_run else min(remaining, 60 * item.minutes), dry_run)
        rows.append(row)
        click.echo(f"{line_of(row)}; {max(0.0, end - time.monotonic()):.0f} s left")
    if predict:
        add_predictions(rows, out)
    show_records(rows)
    click.echo(f"records and logs: {out}")
    sys.exit(any(row["outcome"] == "failed" or row["verdict"] == "does not hold" for row in rows))


def add_predictions(rows: Iterable[dict[str, Any]], out: Path) -> None:
    """Add predicted figures to the speed records and write them again. Takes minutes of CPU time and no GPU."""
    waiting = [row for row in rows if row["measured"].get("stages") and "mfu" not in _first(row["measured"]["stages"])]
    if not waiting:
        return
    click.echo("everything is measured; predicting operations on the CPU for MFU and MBU")
    with console.quiet_libraries():
        from bench.gpu import speed

    for row in waiting:
        speed.conclude(row)
        runner.keep(row, out)


def _first(stages: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(stages.values()))


def records(out: Path) -> list[dict[str, Any]]:
    """Return the records below a folder, in the order of the plan."""
    rows = [row for file in sorted(out.rglob("*.json")) if (row := read_json(file)) and "gpu_item" in row]
    if not rows:
        raise click.ClickException(f"{out}: there are no records of bench.gpu below it")
    order = [item.name for item in plan.ITEMS]
    return sorted(rows, key=lambda row: order.index(row["gpu_item"]) if row["gpu_item"] in order else len(order))


def line_of(row: Mapping[str, Any]) -> str:
    """Return a record in one line."""
    verdict = row["verdict"] or "not decided"
    detail = row["error"] or row["why"]
    state = row["outcome"] if row["outcome"] != "done" else verdict
    return f"{row['gpu_item']}: {state}{f' ({detail})' if detail else ''}, {row['seconds'] or 0:.0f} s"


def show_plan(items: Iterable[Item]) -> None:
    """Print the items with the minutes that each may take, the minutes until its end, and its claim."""
    total, rows = 0.0, []
    for item in items:
        total += item.minutes
        rows.append((item.name, f"{item.minutes:g}", f"{total:g}", item.recipe or "", item.claim))
    console.rows_table("bench.gpu", ("item", "minutes", "in all", "recipe", "decides whether"), rows)


def show_records(rows: Sequence[Mapping[str, Any]]) -> None:
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
    console.rows_table("what was decided", ("item", "outcome", "s", "claim", "figures"), table)
    phases = [
        (
            f"{row['gpu_item']}: {stage}/{phase}",
            f"{x['seconds']:.3g}",
            f"{x['least_seconds']:.3g}",
            f"{x['reached']:.0%}",
        )
        for row in rows
        for stage, figures in (row["measured"].get("stages") or {}).items()
        for phase, x in figures.get("roofline", {}).items()
    ]
    if phases:
        console.rows_table("seconds of a step beside the roofline", ("phase", "measured", "least", "reached"), phases)


def show_problems(out: Path) -> list[str]:
    """Print why records below a folder cannot be contributed, or that they can."""
    problems = []
    for row in records(out):
        lines = record.problems(row, ROOT / "recipes")
        problems += [f"{record.path_of(row)}: {line}" for line in lines]
    click.echo("\n".join(problems) or f"every record in {out} can be contributed")
    return problems
