"""`python -m studies.outside`: predicted memory held against GPUs that other people measured.

--save writes a record to studies/outside/results/, and the page from it with its pictures.
"""

import os
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import cast

import click

from bench import options
from bench.paths import newest
from bench.provenance import code, in_file_name, now, require_committed_code
from bench.reading import read
from rlhf.cli import guarded
from rlhf.cli.options import WholeNumber
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.terminal.tables import rows_table
from studies.kinds import OutsideRecord, OutsideRow, PackedRow, PackedSource, RunsSource
from studies.outside import collect, collect_fms, compare, lengths, page, plot, speed
from studies.paths import OUTSIDE

FOLDER = OUTSIDE / "results"
PACKAGES = ("torch", "transformers", "peft")


@options.command()
@click.option("--only", default="", metavar="TEXT", help="Only the runs whose name contains this.")
@click.option(
    "--jobs",
    default=os.cpu_count() or 1,
    show_default="processors",
    type=WholeNumber(min=1),
    help="Processes side by side.",
)
@click.option("--page", "page_only", is_flag=True, help="Only write the page again, from the newest record.")
@click.option("--save", is_flag=True, help=f"Keep the comparison in {FOLDER}, and write the page from it.")
def main(only: str, jobs: int, page_only: bool, save: bool) -> None:
    """Rehearse runs that others measured, predict their memory, and compare."""
    if page_only:
        write_page(newest(FOLDER))
        return
    if save and only:
        raise UserError("--save: a record has all runs: leave out --only or --save")
    if save:
        require_committed_code()
    chosen = compare.runs(only)
    if not chosen:
        raise UserError(f"--only {only}: no run has that in its name")
    began = time.monotonic()
    rows: list[OutsideRow] = []
    for row in compare.predict_all(chosen, jobs):
        rows.append(row)
        outcome = row.get("failed") or f"{row['error']['reserved_max']:+.2%}"
        click.echo(
            f"{len(rows):3} of {len(chosen)}  {time.monotonic() - began:4.0f} s  {row['name']}: {outcome}", err=True
        )
    table = [page.cells(row) for row in rows if "error" in row]
    rows_table("maximum and average reserved, allocated after a step; MiB", page.COLUMNS, table)
    if len(rows) > 1:
        click.echo("\n".join(page.summary_lines(rows)))
    if only:
        return
    packed = list(compare.predict_packed(jobs))
    rows_table("NF4 and gradient checkpointing; GB", page.PACKED_COLUMNS, map(page.packed_cells, packed))
    click.echo(page.packed_line(packed))
    _, unseen = speed.timed(rows, packed)
    for name, card in (("L40S", speed.L40S), ("A100", speed.A100)):
        click.echo(f"- time of a step, {name}, {page.time_spread(unseen, card)}")
    if save:
        write(rows, packed)


def write(rows: list[OutsideRow], packed: list[PackedRow]) -> None:
    """Write the record, and the page and the plot that are made from it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"{in_file_name(now())}.json"
    record: OutsideRecord = {
        "outside": cast(RunsSource, _without_runs(collect.runs())),
        "calibrated_on": lengths.CALIBRATED_ON,
        "calibrated": {"shape": lengths.SHAPE, "longest": lengths.LONGEST},
        "device": "none: a stand-in for the NVIDIA L40S",
        "code": code(),
        "packages": {package: version(package) for package in PACKAGES},
        "rows": rows,
        "packed_source": cast(PackedSource, _without_runs(collect_fms.packed_runs())),
        "packed": packed,
    }
    write_json(file, record)
    click.echo(f"wrote {file}")
    write_page(file)


def write_page(file: Path) -> None:
    """Write the page and its pictures from a record."""
    record = read(file, OutsideRecord)
    page.write(record, file)
    plot.write(record)
    click.echo(f"wrote {page.PAGE} and its pictures")


def _without_runs(content: Mapping[str, object]) -> dict[str, object]:
    """Return where measured figures come from: all but the figures."""
    return {key: value for key, value in content.items() if key != "runs"}


if __name__ == "__main__":
    guarded(main)
