"""Comparison of a benchmark's record with those before it: stages that need more time or memory."""

from collections.abc import Iterator, Sequence

from bench.clocks import clock_of
from bench.kinds import Spread, StageSteps, StepsRecord
from rlhf.recipe import StageName
from rlhf.terminal.wording import gb

MEMORY, SPEED = 0.03, 0.10  # more than these shares is a loss


def losses_since(earlier: Sequence[StepsRecord], after: StepsRecord) -> list[str]:
    """Return a line for each stage and phase that needs more than in an earlier record, with the newest such record.

    `earlier` has the newest first. All count, because several losses that are small each time can be large together.
    """
    lines: dict[str, str] = {}  # by stage or phase
    for before in earlier:
        for line in losses(before, after):
            lines.setdefault(line.partition(":")[0], f"since {before['date']}: {line}")
    return list(lines.values())


def losses(before: StepsRecord, after: StepsRecord) -> Iterator[str]:
    """Yield a line for each stage and phase of two records that needs more memory or time than before.

    Memory is compared as it is. A time is a loss when its median is more than SPEED above the old one and the two
    ranges from quartile to quartile do not overlap. Records that differ in more are not compared (ValueError).
    """
    if reason := difference(before, after):
        raise ValueError(reason)
    for stage, new in after["stages"].items():
        old = before["stages"].get(stage)
        if old is None or old.get("out_of_memory"):
            continue
        if new.get("out_of_memory"):
            yield f"{stage} no longer fits"
            continue
        yield from _memory(stage, old, new)
        for phase, seconds in new["phase_seconds"].items():
            if phase in old["phase_seconds"]:
                yield from _time(f"{stage}/{phase}", old["phase_seconds"][phase], seconds)


def difference(before: StepsRecord, after: StepsRecord) -> str | None:
    """Return why two records cannot be compared: another recipe, shape, machine, number of threads, or clock."""
    for key in ("recipe", "version", "recipe_sha256", "shape"):
        old, new = before.get(key), after.get(key)
        if old != new:
            return f"records of another {key} cannot be compared: {old} and {new}"
    if machine(before) != machine(after):
        return f"records of {machine(before)} and {machine(after)} cannot be compared"
    if threads(before) != threads(after):
        return f"records of {threads(before)} and {threads(after)} threads cannot be compared"
    one, other = (clock_of(record["stages"].values()) for record in (before, after))
    return None if one == other else f"seconds of the {one} and the {other} clock cannot be compared"


def threads(record: StepsRecord) -> int | None:
    """Return the threads with which a CPU measured; None of a GPU, and where a record does not say."""
    device = record["device"]
    return None if isinstance(device, str) else device.get("threads")


def machine(record: StepsRecord) -> str:
    """Return the machine of a record: the GPU, or the processor. Old records say only `cpu`."""
    device = record["device"]
    if isinstance(device, str):
        return device
    return device["name"] + (f": {device['model']}" if "model" in device else "")


def _memory(stage: StageName, old: StageSteps, new: StageSteps) -> Iterator[str]:
    on_gpu = new["peak_vram_bytes"] is not None
    before, after = (row["peak_vram_bytes"] if on_gpu else row["peak_rss_bytes"] for row in (old, new))
    phases = {
        f"{stage}/{p}": (o, (new.get("phase_peak_bytes") or {}).get(p))
        for p, o in (old.get("phase_peak_bytes") or {}).items()
    }
    for name, (a, b) in {stage: (before, after), **phases}.items():
        if a and b and b / a - 1 > MEMORY:
            yield f"{name}: peak memory {b / a - 1:+.1%}, {gb(a)} to {gb(b)} GB"


def _time(name: str, old: Spread, new: Spread) -> Iterator[str]:
    change = new["median"] / old["median"] - 1 if old["median"] else 0.0
    if change > SPEED and new["low"] > old["high"]:
        yield f"{name}: {change:+.0%}, {old['median']:.3g} to {new['median']:.3g} s"
