"""Runs one item in a separate process group. A time limit ends all of its processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from bench.gpu import record
from bench.gpu.item import load
from bench.gpu.plan import GpuItem
from bench.gpu.record import GpuRecord
from bench.gpu.smi import used_bytes
from bench.paths import ROOT
from bench.reading import read
from rlhf.files import write_json
from rlhf.process.children import child_environment

RECORDS = "results"  # of what was measured
UNMEASURED_FILE = "not-measured"  # of items that were skipped, or whose process died before it named the device
GRACE = 5.0  # seconds between asking a process group to end and killing it
# What the caller has set keeps its value. The first suits rows of varying lengths.
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def run(item: GpuItem, out: Path, limit: float, dry_run: bool) -> GpuRecord:
    """Run an item for at most `limit` seconds. Return its record, which is also written below `out`, beside a log.

    An interruption (Ctrl-C, or a signal that `command.interruptible` turns into one) ends the item, writes its record
    and passes on.
    """
    for folder in ("logs", "unfinished"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    file = (out / "unfinished" / f"{item.name}.json").resolve()
    file.unlink(missing_ok=True)
    log = out / "logs" / f"{item.name}.log"
    command = [sys.executable, "-m", "bench.gpu.item", item.name, str(file), *(["--dry-run"] if dry_run else [])]
    environment = environment_of(item)
    idle = used_bytes()  # what is in use beside the allocator later, less this, is the item's own
    start, interrupted = time.monotonic(), False
    with open(log, "w") as output:
        try:
            code = run_group(command, limit, output, environment)
        except KeyboardInterrupt:
            code, interrupted = None, True
    # Its figures are not checked here: a fault in their description must not cost what was measured.
    row = read(file, GpuRecord) if file.exists() else record.new_record(item, dry_run, load(item, dry_run))
    row["seconds"], row["idle_bytes"] = round(time.monotonic() - start, 1), idle
    names = (*ENVIRONMENT, "PYTORCH_CUDA_ALLOC_CONF", *item.environment)
    row["environment"] = {name: environment[name] for name in names if name in environment}
    if row["outcome"] == "started":  # its process ended without a word of its own
        row["outcome"], row["error"] = _ending(code, interrupted, limit, log)
    keep(row, out)
    file.unlink(missing_ok=True)
    if interrupted:
        raise KeyboardInterrupt
    return row


def _ending(code: int | None, interrupted: bool, limit: float, log: Path) -> tuple[str, str]:
    """Return outcome and error of an item that did not finish."""
    if interrupted:
        return "failed", "interrupted"
    if code is None:
        return "timed out", f"not done after {limit:.0f} s"
    return "failed", f"exit code {code}: see {log}"


def environment_of(item: GpuItem) -> dict[str, str]:
    """Return the variables of an item's process: the caller's, what they lack of ENVIRONMENT, and the item's own."""
    settings = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # the older name of the allocator's variable
        settings.pop("PYTORCH_ALLOC_CONF", None)
    return child_environment(**settings, **item.environment)


def skip(item: GpuItem, out: Path, dry_run: bool, reason: str) -> GpuRecord:
    """Write and return the record of an item that is not run, with the reason."""
    row = record.new_record(item, dry_run, load(item, dry_run))
    row["outcome"], row["why"], row["seconds"] = "skipped", reason, 0.0
    keep(row, out)
    return row


def keep(row: GpuRecord, out: Path) -> Path:
    """Write a record below `out`. Return its file.

    What was measured goes into a folder whose content can go to results/ as it is. The rest stays beside it, until the
    item is measured.
    """
    unmeasured = out / UNMEASURED_FILE / f"{row['gpu_item']}.json"
    file = out / RECORDS / record.path_of(row) if row["device"] else unmeasured
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, row)
    if file != unmeasured:
        unmeasured.unlink(missing_ok=True)
    return file


def run_group(command: Sequence[str], limit: float, output: IO[str], environment: Mapping[str, str]) -> int | None:
    """Run a command in a separate process group. Return its exit code, or None when `limit` seconds were too few.

    Whatever happens, no process of the group is left: one that survived would keep the GPU's memory.
    """
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=output, stderr=output, env=dict(environment), start_new_session=True
    )
    try:
        return child.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(child)


def end_group(leader: "subprocess.Popen[bytes]", grace: float = GRACE) -> None:
    """End every process of a group: by request, and after `grace` seconds by force."""
    if leader.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(timeout=grace)
    with contextlib.suppress(ProcessLookupError):  # the leader may be gone and its children not
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
