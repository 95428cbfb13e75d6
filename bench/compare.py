"""Comparison of a benchmark's record with those before it: stages that need more time or memory.

On a GPU the memory that torch's allocator counted is compared. On a CPU only the growth in a step is: what a process
holds resident differs by a tenth between runs of the same code. `make bench-against` counts what tensors hold there.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.clocks import clock_of
from bench.kinds import Spread, StageSteps, StepsRecord
from rlhf.recipe import StageName
from rlhf.terminal.wording import gb

MEMORY, SPEED = 0.03, 0.10  # more than these shares is a loss
GROWTH = 0.003  # share of the resident bytes by which a step may grow more than before: 3 % in ten steps


class Loss(NamedTuple):
    """What a stage or phase needs more of: `figure` is `fit`, `memory`, `growth` or `time`."""

    place: str
    figure: str
    text: str

    def line(self) -> str:
        """Return the loss as a line that begins with its place."""
        return f"{self.place} {self.text}" if self.figure == "fit" else f"{self.place}: {self.text}"


def losses_since(earlier: Sequence[StepsRecord], after: StepsRecord) -> list[str]:
    """Return a line for each figure of a stage or phase that is worse than in an earlier record, the newest of these.

    `earlier` has the newest first. All count, because several losses that are small each time can be large together.
    """
    lines: dict[tuple[str, str], str] = {}  # by place and figure
    for before in earlier:
        for loss in losses(before, after):
            lines.setdefault((loss.place, loss.figure), f"since {before['date']}: {loss.line()}")
    return list(lines.values())


def losses(before: StepsRecord, after: StepsRecord) -> Iterator[Loss]:
    """Yield what each stage and phase of two records needs more of than before.

    Memory of a GPU is compared as it is, and the growth of a process in every step. A time is a loss when its median is
    more than SPEED above the old one and the two ranges from quartile to quartile do not overlap. Records that differ
    in more are not compared (ValueError).
    """
    if reason := difference(before, after):
        raise ValueError(reason)
    for stage, new in after["stages"].items():
        old = before["stages"].get(stage)
        if old is None or old.get("out_of_memory"):
            continue
        if new.get("out_of_memory"):
            yield Loss(stage, "fit", "no longer fits")
            continue
        yield from _memory(stage, old, new)
        for phase, seconds in new["phase_seconds"].items():
            if phase in old["phase_seconds"]:  # of another program there may be peaks alone
                yield from _time(f"{stage}/{phase}", old["phase_seconds"][phase], seconds)


def difference(before: StepsRecord, after: StepsRecord) -> str | None:
    """Return why two records cannot be compared: another recipe, shape, machine, cap, number of threads, or clock."""
    for key in ("recipe", "version", "recipe_sha256", "shape"):
        old, new = before.get(key), after.get(key)
        if old != new:
            return f"records of another {key} cannot be compared: {old} and {new}"
    if machine(before) != machine(after):
        return f"records of {machine(before)} and {machine(after)} cannot be compared"
    if cap(before) != cap(after):
        return f"records under a memory cap of {cap(before)} and of {cap(after)} cannot be compared"
    if threads(before) != threads(after):
        return f"records of {threads(before)} and {threads(after)} threads cannot be compared"
    one, other = (clock_of(record["stages"].values()) for record in (before, after))
    return None if one == other else f"seconds of the {one} and the {other} clock cannot be compared"


def threads(record: StepsRecord) -> int | None:
    """Return the threads with which a CPU measured; None of a GPU, and where a record does not say."""
    device = record["device"]
    return None if isinstance(device, str) else device.get("threads")


def cap(record: StepsRecord) -> str | None:
    """Return the limit of a GPU's memory under which was measured; None without one."""
    device = record["device"]
    return None if isinstance(device, str) else device.get("memory_cap")


def machine(record: StepsRecord) -> str:
    """Return the machine of a record: the GPU, or the processor. Old records say only `cpu`."""
    device = record["device"]
    if isinstance(device, str):
        return device
    return device["name"] + (f": {device['model']}" if "model" in device else "")


def _memory(stage: StageName, old: StageSteps, new: StageSteps) -> Iterator[Loss]:
    phases = {
        f"{stage}/{p}": (o, (new.get("phase_peak_bytes") or {}).get(p))
        for p, o in (old.get("phase_peak_bytes") or {}).items()
    }
    for place, (a, b) in {stage: (old["peak_vram_bytes"], new["peak_vram_bytes"]), **phases}.items():
        if a and b and b / a - 1 > MEMORY:
            yield Loss(place, "memory", f"peak memory {b / a - 1:+.1%}, {gb(a)} to {gb(b)} GB")
    if "growth_bytes" not in old or "growth_bytes" not in new:
        return
    if new["growth_bytes"] - old["growth_bytes"] > GROWTH * old["peak_rss_bytes"]:
        yield Loss(stage, "growth", f"memory grows in every step, by {gb(new['growth_bytes'], 3)} GB")


def _time(place: str, old: Spread, new: Spread) -> Iterator[Loss]:
    change = new["median"] / old["median"] - 1 if old["median"] else 0.0
    if change > SPEED and new["low"] > old["high"]:
        yield Loss(place, "time", f"{change:+.0%}, {old['median']:.3g} to {new['median']:.3g} s")
