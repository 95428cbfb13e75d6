"""The command line of `python -m bench.gpu`."""

import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from bench import baseline, options
from bench.gpu import packages, plan, record, runner, tables
from bench.gpu.plan import GpuItem
from bench.gpu.record import GpuRecord
from bench.paths import ROOT
from rlhf.errors import UserError
from rlhf.process.libraries import quiet_libraries

LEAST = 20.0  # seconds below which no further item is started
GPU_HOUR = Path("runs/gpu-hour")
USED_UP = "the time box was used up before it"  # why an item was skipped
INTERRUPTED = 130  # the exit code, as a shell has it after Ctrl-C
EPILOG = """\b
In this order, the first two without a GPU:
  python -m bench.gpu --check             are all packages here?
  python -m bench.gpu --dry-run           does the code run? (minutes)
  python -m bench.gpu --box 55m           measure, on the card
  python -m bench.gpu --verify            can the records be contributed?
docs/internals.md says what each item decides, and what to do with the records."""


@options.command(epilog=EPILOG)
@click.option(
    "--box",
    default="30m",
    show_default=True,
    metavar="30m",
    help="Time limit for all items: 90s, 9m, 1h. All of them may take what --list says.",
)
@click.option("--only", multiple=True, metavar="ITEM", help="Run only this item of --list; may be repeated.")
@click.option(
    "--out", type=click.Path(path_type=Path), help=f"Folder for records and logs. [{GPU_HOUR}, dry run: {GPU_HOUR}-dry]"
)
@click.option("--list", "listed", is_flag=True, help="Print the plan: items, their minutes and claims.")
@click.option("--dry-run", is_flag=True, help="Run the items with a tiny recipe on the CPU, to try the code only.")
@click.option(
    "--no-predict",
    is_flag=True,
    help="Skip the minutes of CPU time at the end that predict MFU and MBU; --conclude does it later, anywhere.",
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
    """Run the measurements that need a GPU, most valuable first, until the time limit.

    Nothing is downloaded: weights are random. Each item runs in a process of its own and has its record in --out as
    soon as it ends. One that fails or takes too long leaves what it had measured, and the next one begins. Ctrl-C, a
    lost connection and SIGTERM end the item and keep all records.

    Exit code 1 if an item failed or timed out, a claim does not hold, or a figure is worse than in a stored record of
    the same card; 130 after an interruption.
    """
    items, limit = plan.choose(only), plan.seconds(box)
    out = out or GPU_HOUR.with_name(GPU_HOUR.name + ("-dry" if dry_run else ""))
    if listed:
        tables.show_plan(items)
    elif verify:
        sys.exit(bool(show_problems(out)))
    elif conclude:
        complete = add_predictions(records(out), out)
        tables.show_records(records(out))
        sys.exit(not complete)
    else:
        sys.exit(measure(items, out, limit, dry_run, predict=not no_predict))


def measure(items: Sequence[GpuItem], out: Path, limit: float, dry_run: bool, predict: bool) -> int:
    """Run the items and print their results. Return the exit code."""
    if not dry_run:
        require_cuda()
    end = time.monotonic() + limit
    rows: list[GpuRecord] = []
    interrupted = False
    try:
        with interruptible():
            for item in items:
                rows.append(run_item(item, out, end - time.monotonic(), dry_run))
                click.echo(f"{tables.line_of(rows[-1])}; {max(0.0, end - time.monotonic()):.0f} s left")
            if predict:
                add_predictions(rows, out)
    except KeyboardInterrupt:
        interrupted = True
    tables.show_records(rows)
    click.echo(f"records and logs: {out}")
    if open_items := [row["gpu_item"] for row in rows if row["outcome"] == "skipped" and row["why"] == USED_UP]:
        click.echo(f"to go on: python -m bench.gpu {' '.join(f'--only {name}' for name in open_items)} --out {out}")
    worse = [] if dry_run else baseline.show(files(out))[0]
    if interrupted:
        click.echo("interrupted; the records of all items that had begun are there", err=True)
        return INTERRUPTED
    return int(
        bool(worse)
        or any(row["outcome"] in ("failed", "timed out") or row["verdict"] == "does not hold" for row in rows)
    )


def run_item(item: GpuItem, out: Path, remaining: float, dry_run: bool) -> GpuRecord:
    """Run an item for at most its own minutes and the `remaining` seconds, or skip it. Return its record."""
    absent = [name for name in item.modules if packages.installed_version(name) is None]
    if absent:
        return runner.skip(item, out, dry_run, f"needs {', '.join(absent)}")
    if remaining < LEAST:
        return runner.skip(item, out, dry_run, USED_UP)
    limit = remaining if dry_run else min(remaining, 60 * item.minutes)
    click.echo(f"{item.name}: at most {limit:.0f} s; it prints to {out / 'logs' / item.name}.log")
    return runner.run(item, out, limit, dry_run)


def require_cuda() -> None:
    """Raise an error unless torch sees a CUDA device. Asks the driver and takes none of the card's memory."""
    with quiet_libraries():
        import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"bench.gpu needs a CUDA device, and torch {torch.__version__} sees none: "
            "see `nvidia-smi`, or try the code with --dry-run"
        )


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM, and SIGHUP of a lost connection, into a KeyboardInterrupt while the block runs.

    By default they would end this process alone: the item's would go on, and keep the card. One that the caller has
    told to ignore, as nohup does, stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def add_predictions(rows: Iterable[GpuRecord], out: Path) -> bool:
    """Add predicted figures to the speed records and write them again. Takes minutes of CPU time and no GPU.

    Return whether all could be predicted; one that cannot is said, and the others still get theirs.
    """
    waiting = [row for row in rows if needs_prediction(row)]
    if not waiting:
        return True
    click.echo("everything is measured; predicting operations on the CPU for MFU and MBU")
    with quiet_libraries():
        from bench.gpu import speed

    complete = True
    for row in waiting:
        try:
            speed.conclude(row)
            runner.keep(row, out)
        except Exception as error:  # what was measured is there already
            complete = False
            click.echo(f"{row['gpu_item']}: not predicted ({type(error).__name__}: {error}): --conclude tries again")
    return complete


def needs_prediction(row: GpuRecord) -> bool:
    """Return whether a record has measured stages without MFU."""
    stages = row["measured"].get("stages")
    return isinstance(stages, dict) and any("mfu" not in stage for stage in stages.values())


def records(out: Path) -> list[GpuRecord]:
    """Return the records below a folder, in the order of the plan. Raises UserError where one is damaged."""
    rows = [record.read(file) for file in files(out)]
    order = [item.name for item in plan.ITEMS]
    return sorted(rows, key=lambda row: order.index(row["gpu_item"]) if row["gpu_item"] in order else len(order))


def files(out: Path) -> list[Path]:
    """Return the files of the records below a folder. Raises an error if there are none."""
    written = [
        file for place in (runner.RECORDS, runner.UNMEASURED_FILE) for file in sorted((out / place).rglob("*.json"))
    ]
    if not written:
        raise UserError(
            f"{out}: there are no records of bench.gpu below it; --out names the folder that a run wrote to"
        )
    return written


def show_problems(out: Path) -> list[str]:
    """Print why records below a folder cannot be contributed, or that they can. Return the reasons.

    Items that were not measured are named; they are no records to contribute, and no reason against the others.
    """
    problems, measured = [], 0
    for file in files(out):
        try:
            row = record.read(file)
        except UserError as error:
            problems.append(error.lines[0])
            continue
        if row["device"] is None:
            click.echo(f"{row['gpu_item']}: not measured ({row['error'] or row['why']})")
            continue
        measured += 1
        problems += [f"{record.path_of(row)}: {line}" for line in record.problems(row, ROOT / "recipes")]
    if not measured and not problems:
        problems.append(f"{out}: no item was measured")
    click.echo("\n".join(problems) or f"every record in {out / runner.RECORDS} can be contributed")
    return problems
