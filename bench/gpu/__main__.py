"""`python -m bench.gpu`: all measurements that need a GPU, most valuable first, within a time limit.

`--check` names missing packages, `--dry-run` tries the code with a tiny recipe on the CPU, `--box 14m` measures on the
card. Each item runs in a process of its own and has its record in --out/results as it goes, in the place that it has
below results/. Nothing is downloaded: weights are random.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.gpu import packages

LEAST = 20.0  # seconds below which no further item is started
GRACE = 5.0  # seconds between asking a process group to end and killing it
INTERRUPTED = 130  # the exit code, as a shell has it after Ctrl-C
# What the caller has set keeps its value. The first suits rows of varying lengths.
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
SMALL_CARD = {"RLHF_VRAM_CAP": "24GB"}  # a larger card is held to the memory of an RTX 4090


class Item(NamedTuple):
    """A separate process that runs for at most `minutes` and writes one record."""

    name: str
    minutes: float
    function: str  # in bench/gpu/items.py
    hw: str | None = None  # whose default recipe it uses; None: it is about the card alone
    guide: bool = False  # the version with the published guide's settings
    options: Mapping[str, Any] = {}  # keyword arguments of the function
    modules: tuple[str, ...] = ()  # packages that not every machine has
    environment: Mapping[str, str] = {}


ITEMS = (
    Item("device", 1, "device"),
    Item("published-h100", 4, "peaks", "h100", guide=True),
    Item("published-4090", 4, "peaks", "4090", guide=True, modules=("bitsandbytes",), environment=SMALL_CARD),
    Item("chain-lean", 2, "tests", options={"choose": "chain and lean"}, modules=("pytest",)),
    Item("hours-v4", 4, "steps", "h100", options={"stages": ["sft", "rm", "ppo"]}),
    Item("training", 4, "training", "h100"),
    Item("decoding", 5, "decoding", "h100", options={"rows": [16, 64]}),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--box", default="14m", show_default=True, metavar="14m", help="Time limit for all items: 90s, 9m, 1h.")
@click.option("--only", multiple=True, type=click.Choice([item.name for item in ITEMS]), help="Only this item.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for records and logs. [runs/gpu-hour]")
@click.option("--list", "listed", is_flag=True, help="Print the items and their minutes.")
@click.option("--dry-run", is_flag=True, help="Run the items with a tiny recipe on the CPU, to try the code only.")
@click.option(
    "--no-predict", is_flag=True, help="Measure alone, and predict nothing; peaks have predicted.json beside."
)
@click.option("--check", is_flag=True, help="Name missing packages and how to install them.")
@click.option("--item", hidden=True, help="Run this item in this process, and write its record to --out.")
def command(
    box: str,
    only: tuple[str, ...],
    out: Path | None,
    listed: bool,
    dry_run: bool,
    no_predict: bool,
    check: bool,  # answered in `main`, which needs no package for it
    item: str | None,
) -> None:
    """Run the measurements that need a GPU, most valuable first, until the time limit.

    One that fails or takes too long leaves what it had measured, and the next one begins. Exit code 1 if one did.
    """
    chosen = [one for one in ITEMS if not only or one.name in only]
    out = out or Path("runs/gpu-hour-dry" if dry_run else "runs/gpu-hour")
    if item:
        from bench.gpu import items

        items.run(next(one for one in ITEMS if one.name == item), out, dry_run)
    elif listed:
        for one in chosen:
            click.echo(f"{one.name:16} {one.minutes:g} min  {one.function} {one.hw or ''}{' --guide' * one.guide}")
    else:
        sys.exit(measure(chosen, out, seconds(box), dry_run))


def measure(items: Sequence[Item], out: Path, limit: float, dry_run: bool) -> int:
    """Run the items one after another. Return the exit code."""
    end, failed = time.monotonic() + limit, False
    for number in (signal.SIGTERM, signal.SIGHUP):  # they would end this process alone, and its child keep the card
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    for item in items:
        left = end - time.monotonic()
        absent = [name for name in item.modules if packages.installed_version(name) is None]
        if absent or left < LEAST:
            click.echo(f"{item.name}: skipped, {f'needs {absent[0]}' if absent else 'the time is used up'}")
            continue
        try:
            outcome = run(item, out, left if dry_run else min(left, 60 * item.minutes), dry_run)
        except KeyboardInterrupt:
            click.echo("interrupted; the records of all items that had begun are there", err=True)
            return INTERRUPTED
        failed |= outcome != "done"
        click.echo(f"{item.name}: {outcome}; {max(0.0, end - time.monotonic()):.0f} s left")
    click.echo(f"records and logs: {out}")
    return int(failed)


def run(item: Item, out: Path, limit: float, dry_run: bool) -> str:
    """Run an item for at most `limit` seconds in a process group of its own. Return how it ended."""
    log = out / "logs" / f"{item.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = ["--item", item.name, "--out", str(out), *(["--dry-run"] if dry_run else [])]
    given = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    with open(log, "w") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu", *words],
            stdout=output,
            stderr=output,
            env={**os.environ, **given, **item.environment},
            start_new_session=True,
        )
        try:
            code = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"timed out after {limit:.0f} s"
        finally:
            end_group(child)
    return "done" if code == 0 else f"failed with exit code {code}: see {log}"


def end_group(leader: "subprocess.Popen[bytes]") -> None:
    """End every process of a group, by request and then by force: one that survived would keep the GPU's memory."""
    if leader.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(timeout=GRACE)
    with contextlib.suppress(ProcessLookupError):  # the leader may be gone and its children not
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def seconds(box: str) -> float:
    """Return the seconds of `90s`, `9m` or `1h`. Raises a usage error for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", box)
    if not match:
        raise click.BadParameter(f"{box!r}: write 90s, 9m or 1h", param_hint="--box")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def main() -> None:
    """Name missing packages, without importing any; otherwise run the command."""
    missing = packages.missing()
    if "--check" in sys.argv[1:] or missing:
        lines = packages.report() + packages.indirect() + packages.optional()
        print("\n".join(dict.fromkeys(lines)) or "Every package is here, in a version that the project is written for.")
        absent = list(dict.fromkeys(line.split()[1].rstrip(",") for line in lines if line.startswith("missing")))
        if absent:
            print(packages.way_out(absent))
        sys.exit(f"error: bench.gpu cannot run without {', '.join(missing)}" if missing else 0)
    from rlhf.cli import guarded

    guarded(command)


if __name__ == "__main__":
    main()
