"""Runs one item in a separate process group. A time limit ends all of its processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from bench.gpu import record
from bench.gpu.item import load
from bench.gpu.plan import Item
from bench.paths import ROOT
from rlhf.files import read_json, write_json
from rlhf.process.launching import child_environment

RECORDS = "results"
GRACE = 5.0  # seconds between asking a process group to end and killing it
# Never over what the caller has set. The first is what long runs of varying lengths want (see the item `allocator`).
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def run(item: Item, out: Path, limit: float, dry_run: bool) -> dict[str, Any]:
    """Run an item for at most `limit` seconds. Return its record, which is also written below `out`, beside a log."""
    for folder in ("logs", "unfinished"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    file = (out / "unfinished" / f"{item.name}.json").resolve()
    file.unlink(missing_ok=True)
    log = out / "logs" / f"{item.name}.log"
    command = [sys.executable, "-m", "bench.gpu.item", item.name, str(file), *(["--dry-run"] if dry_run else [])]
    settings = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # the older name of the allocator's variable
        settings.pop("PYTORCH_ALLOC_CONF", None)
    environment = child_environment(**settings, **item.environment)
    start = time.monotonic()
    with open(log, "w") as output:
        code = run_group(command, limit, output, environment)
    row = read_json(file) or record.new_record(item, dry_run, load(item, dry_run))
    row["seconds"] = round(time.monotonic() - start, 1)
    names = (*ENVIRONMENT, "PYTORCH_CUDA_ALLOC_CONF", *item.environment)
    row["environment"] = {name: environment[name] for name in names if name in environment}
    if code is None:
        row |= {"outcome": "timed out", "error": f"not done after {limit:.0f} s"}
    elif row["outcome"] == "started":  # its process ended without a word of its own
        row |= {"outcome": "failed", "error": f"exit code {code}: see {log}"}
    file.unlink(missing_ok=True)
    keep(row, out)
    return row


def skip(item: Item, out: Path, dry_run: bool, reason: str) -> dict[str, Any]:
    """Write and return the record of an item that is not run, with the reason."""
    row = record.new_record(item, dry_run, load(item, dry_run)) | {"outcome": "skipped", "why": reason, "seconds": 0.0}
    keep(row, out)
    return row


def keep(row: Mapping[str, Any], out: Path) -> Path:
    """Write a record below `out`, in a folder whose content can go to results/ as it is."""
    file = out / RECORDS / record.path_of(row)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, row)
    return file


def run_group(command: Sequence[str], limit: float, output: IO[str], environment: Mapping[str, str]) -> int | None:
    """Run a command in a separate process group. Returns its exit code, or None when `limit` seconds were too few.

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


def end_group(leader: "subprocess.Popen[Any]", grace: float = GRACE) -> None:
    """End every process of a group: by request, and after `grace` seconds by force."""
    if leader.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(timeout=grace)
    with contextlib.suppress(ProcessLookupError):  # the leader may be gone and its children not
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
