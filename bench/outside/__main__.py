"""`python -m bench.outside`: predicted memory held against GPUs that other people measured.

--save writes a record to results/outside/peft-metamath/, and docs/outside.md and its plot from it.
"""

import datetime
import json
import os
import time
from importlib.metadata import version

import click

from bench.outside import compare, lengths, page
from bench.outside.collect import DATA
from bench.paths import RESULTS, ROOT
from rlhf import console
from rlhf.cli import guarded
from rlhf.run import code_version, write_json

FOLDER = RESULTS / "outside" / "peft-metamath"
PACKAGES = ("torch", "transformers", "peft")


@click.command()
@click.option("--only", default="", metavar="TEXT", help="Only the runs whose name contains this.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default="processors", help="Processes side by side.")
@click.option("--save", is_flag=True, help=f"Keep the comparison in {FOLDER}, and write docs/outside.md from it.")
def main(only: str, jobs: int, save: bool) -> None:
    """Rehearse PEFT's MetaMathQA runs, predict what each reserves, and compare."""
    chosen = compare.runs(only)
    if not chosen:
        raise click.ClickException(f"--only {only}: no run has that in its name")
    began = time.monotonic()
    rows = []
    for row in compare.predict_all(chosen, jobs):
        rows.append(row)
        said = row.get("failed") or f"{row['error']['reserved_max']:+.2%}"
        click.echo(
            f"{len(rows):3} of {len(chosen)}  {time.monotonic() - began:4.0f} s  {row['name']}: {said}", err=True
        )
    table = [page.cells(row) for row in rows if "error" in row]
    console.rows_table("maximum and average reserved, allocated after a step; MiB", page.COLUMNS, table)
    if len(rows) > 1:
        click.echo("\n".join(page.summary_lines(rows)))
    if save and not only:
        write(rows)


def write(rows: list[compare.Row]) -> None:
    """Write the record, and the page and the plot that are made from it."""
    source = {key: value for key, value in json.loads(DATA.read_text(encoding="utf-8")).items() if key != "runs"}
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"{datetime.date.today().isoformat()}.json"
    record = {
        "outside": source,
        "calibrated_on": lengths.CALIBRATED_ON,
        "calibrated": {"shape": lengths.SHAPE, "longest": lengths.LONGEST},
        "device": "none: a stand-in for the NVIDIA L40S",
        "code": code_version(),
        "packages": {package: version(package) for package in PACKAGES},
        "rows": rows,
    }
    write_json(file, record)
    page.write(record, ROOT / "docs")
    click.echo(f"wrote {file}, docs/outside.md and docs/outside.svg")


if __name__ == "__main__":
    guarded(main)
