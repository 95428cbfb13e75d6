"""Stages that are killed, stopped and failed by the disk at seeded moments, and resumed until they are done.

A moment is an event of the file system in the run directory (a file opened to be written, made, renamed, removed or
synced) or an amount of CPU time. After a kill, bytes that were not synced may be cut off as well, as a power cut would.
"""

import errno
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz import sandbox
from tests.fuzz.oracle import CONTROL
from tests.fuzz.reference import ROOT, Reference, changed_results, metrics

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
KINDS = (*["kill at an event"] * 3, *["kill at a time"] * 2, "power cut", *["SIGTERM"] * 2, "disk")
LIVES = 4  # interrupted ones of a run, at most
COLUMNS = (
    "kills",
    "power cuts",
    "SIGTERM",
    "failed writes",
    "finished runs",
    "other bytes",
    "extra files",
    "bad message",
)


@dataclass
class Row:
    """What became of one stage's runs. `counts` is by the names in COLUMNS."""

    stage: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    flaws: int = 0

    def flaw(self, column: str, what: str, replay: str) -> None:
        self.counts[column] += 1
        self.flaws += 1
        print(f"kills, {self.stage}: {column}: {ascii(what)[:500]}\n    {replay}", file=sys.stderr)


def run(number: int, seed: int, folder: Path, reference: Reference, stages: tuple[str, ...]) -> list[Row]:
    """Interrupt every stage until there were `number` interruptions in all."""
    rows = []
    for stage in stages:
        row = Row(stage)
        wanted, done, series = -(-number // len(stages)), 0, 0
        events, cpu = _size(stage, folder, reference)
        while done < wanted:
            draw = random.Random(f"{seed}:kills:{stage}:{series}")
            replay = f"make fuzz SEED={seed} ONLY=kills KILLS={number}  # {stage}, run {series}"
            done += _series(row, draw, min(LIVES, wanted - done), events, cpu, folder, reference, replay)
            series += 1
        rows.append(row)
    return rows


def _size(stage: str, folder: Path, reference: Reference) -> tuple[int, float]:
    """Events of an uninterrupted run of a stage, and its CPU seconds."""
    place = folder / "size"
    reference.before(place / "out", stage)
    log = place / "events"
    outcome = _life(stage, place, reference, at=0, act=lambda: None)
    events = sum(not line.startswith("synced") for line in log.read_text().splitlines())
    shutil.rmtree(place)
    return events, outcome.cpu


def _series(
    row: Row, draw: Random, lives: int, events: int, cpu: float, folder: Path, reference: Reference, replay: str
) -> int:
    """One run: interrupted up to `lives` times, then left alone. Returns how often it was interrupted."""
    place = folder / "kills"
    stage = place / "out" / ROOT / row.stage
    reference.before(place / "out", row.stage)
    interrupted, did = 0, []
    while interrupted < lives:
        kind = draw.choice(KINDS)
        at, when = draw.randint(1, max(1, events)), draw.uniform(0.02, cpu)
        timed = kind == "kill at a time"
        act = {"SIGTERM": _terminate, "disk": _fail(draw)}.get(kind, _kill)
        durable = {str(file.resolve()): file.stat().st_size for file in stage.glob("*.jsonl")}
        outcome = _life(row.stage, place, reference, at=0 if timed else at, act=act, kill_after=when if timed else None)
        if outcome.code == 0:
            break  # it was done before the moment came
        interrupted += 1
        did.append(kind)
        text = outcome.err.decode(errors="replace")
        killed = outcome.code == -signal.SIGKILL
        if killed:
            row.counts["power cuts" if kind == "power cut" else "kills"] += 1
            if kind == "power cut":
                _cut(draw, place, stage, durable)
        else:
            row.counts["SIGTERM" if kind == "SIGTERM" else "failed writes"] += 1
            lines = [line for line in text.splitlines() if line.startswith(("error: ", "stopped"))]
            if outcome.code < 0 or "Traceback" in text or len(lines) != 1 or CONTROL.search(text):
                row.flaw("bad message", f"{kind}, exit {outcome.code}: {text[-300:]}", replay)
            if kind != "SIGTERM" and not outcome.err:
                row.flaw("bad message", f"{kind}: it ended with {outcome.code} and no word", replay)
        if outcome.stopped:
            row.flaw("bad message", f"{kind}: it did not end", replay)
        if (stage / "summary.json").exists() and _differs(stage, reference.root / row.stage):
            row.flaw("other bytes", f"{kind}: a summary stands beside an unfinished result", replay)
    last = _life(row.stage, place, reference, at=0, act=lambda: None)
    row.counts["finished runs"] += 1
    if last.code or last.stopped:
        row.flaw("other bytes", f"after {did}, --resume ends with {last.code}: {last.err[-300:]!r}", replay)
    elif what := _differs(stage, reference.root / row.stage):
        row.flaw("other bytes", f"after {did}: {what}", replay)
    elif more := _left_over(stage, reference.root / row.stage):
        row.flaw("extra files", f"after {did}: {', '.join(more)}", replay)
    shutil.rmtree(place)
    return max(1, interrupted)


def _life(
    stage: str,
    place: Path,
    reference: Reference,
    *,
    at: int,
    act: Callable[[], None],
    kill_after: float | None = None,
) -> sandbox.Outcome:
    """Run or resume a stage; `act` is called at its event number `at`, or it is killed after so much CPU time."""
    inside = str(place / "out")
    (place / "events").unlink(missing_ok=True)

    def arm() -> None:
        log = os.open(place / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        count = 0

        def note(what: str) -> None:
            nonlocal count
            count += 1
            os.write(log, f"{what}\n".encode())
            if count == at:
                act()

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event in EVENTS or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES):
                path = str(arguments[0])
                if inside in os.path.abspath(path):
                    moved = f"\t{os.path.abspath(str(arguments[1]))}" if event == "os.rename" else ""
                    note(f"{event}\t{os.path.abspath(path)}{moved}")

        sync = os.fsync

        def synced(handle: int) -> None:
            path = os.readlink(f"/proc/self/fd/{handle}")
            note("fsync")
            sync(handle)
            os.write(log, f"synced\t{path}\t{os.fstat(handle).st_size}\n".encode())

        vars(os)["fsync"] = synced
        sys.addaudithook(hook)

    def watch(pid: int, cpu: float) -> None:
        if kill_after is not None and cpu >= kill_after:
            os.kill(pid, signal.SIGKILL)

    arguments = ["run", stage, *reference.options(), "--resume"]
    return sandbox.run(arguments, place, inside=arm, watch=watch)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _fail(draw: Random) -> Callable[[], None]:
    """Let the file system fail once."""
    number = draw.choice((errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS))

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def _cut(draw: Random, place: Path, stage: Path, durable: dict[str, int]) -> None:
    """Cut off a part of what was appended and never synced. `durable`: bytes by path of what was there before."""
    for line in (place / "events").read_text().splitlines():
        event, *about = line.split("\t")
        if event == "synced":
            durable[about[0]] = int(about[1])
        elif event == "os.rename":
            durable[about[1]] = durable.pop(about[0], 0)
    for file in stage.glob("*.jsonl"):
        size = file.stat().st_size
        least = min(durable.get(str(file.resolve()), 0), size)
        os.truncate(file, draw.randint(least, size))


def _differs(stage: Path, reference: Path) -> str | None:
    """What of a finished stage is not the reference's."""
    if changed := changed_results(stage, reference):
        return f"{', '.join(changed)} has other bytes"
    for name in ("metrics.jsonl", "samples.jsonl", "findings.jsonl", "details.json", "checkpoints/best.json"):
        ours, theirs = (file.read_bytes() if (file := root / name).exists() else b"" for root in (stage, reference))
        if ours != theirs:
            return f"{name} has other bytes"
    return None if metrics(stage) == metrics(reference) else "the summary has other metrics"


def _left_over(stage: Path, reference: Path) -> list[str]:
    """Files that the reference does not have."""
    ours, theirs = (
        {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} for folder in (stage, reference)
    )
    return sorted(ours - theirs)


def table(rows: list[Row]) -> str:
    from tests.fuzz.__main__ import markdown

    cells = [(row.stage, *(row.counts[column] for column in COLUMNS)) for row in rows]
    return markdown(("stage", *COLUMNS), [*cells, ("all", *(sum(row.counts[c] for row in rows) for c in COLUMNS))])
