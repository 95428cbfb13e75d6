"""Medians and ratios of the contenders' runs, and the tables of docs/speed.md and docs/groups.md."""

import statistics
from collections.abc import Mapping, Sequence

from bench.clocks import clock_of
from bench.kinds import Clock, Contender, PeerRecord
from bench.peer.contenders import ALIKE, Method
from bench.peer.inputs import BATCH
from bench.peer.runs import TIMED_PHASES, ContenderRun


def contender_figures(method: Method, runs: Mapping[str, Sequence[ContenderRun]], clock: Clock) -> dict[str, Contender]:
    """Return the medians over all measured steps of each contender, and the ratios to both of TRL's.

    `clock`: cpu, whose seconds other processes disturb least, or on a GPU wall.
    """
    figures: dict[str, Contender] = {}
    for name, parts in runs.items():
        if any(part.get("out_of_memory") for part in parts):
            figures[name] = {"out_of_memory": True}
            continue
        seconds = [x for part in parts for x in part[clock]]
        wall = statistics.median(x for part in parts for x in part["wall"])
        figures[name] = {
            "seconds_per_step": statistics.median(seconds),
            "seconds_range": [min(seconds), max(seconds)],
            "clock": clock,
            "samples_per_second": BATCH / wall,
            "peak_over_loaded_bytes": statistics.median(part["growth"] for part in parts),
            "steps_measured": len(seconds),
        }
        if "phases" in parts[0]:
            figures[name]["seconds_by_phase"] = {
                phase: statistics.median(part["phases"][phase] for part in parts) for phase in TIMED_PHASES
            }
    for name, row in figures.items():
        others = [figures[peer] for peer in method.theirs]
        if row.get("out_of_memory") or any(other.get("out_of_memory") for other in others):
            continue
        row["times_faster"] = [other["seconds_per_step"] / row["seconds_per_step"] for other in others]
        row["times_faster_range"] = [_range_of_ratios(runs[name], runs[peer], clock) for peer in method.theirs]
        row["memory_ratio"] = [row["peak_over_loaded_bytes"] / other["peak_over_loaded_bytes"] for other in others]
    return figures


def _range_of_ratios(ours: Sequence[ContenderRun], theirs: Sequence[ContenderRun], clock: Clock) -> list[float]:
    """Return the least and the most of the ratios of median steps within a round."""
    ratios = [
        statistics.median(peer[clock]) / statistics.median(own[clock]) for own, peer in zip(ours, theirs, strict=True)
    ]
    return [min(ratios), max(ratios)]


def markdown(record: PeerRecord) -> str:
    """Return the figures as docs/speed.md and docs/groups.md show them.

    Ratios are to those of TRL's contenders that have the same design as one of ours.
    """
    clock = clock_of(record["figures"].values())
    theirs = [name for name in record["figures"] if name.startswith("TRL, ")]
    like = [at for at, name in enumerate(theirs) if name in {peer for _, peer in ALIKE}]
    headings = [f"{clock} seconds per step (range)", "samples per wall second", "peak above the loaded models"]
    designs = [theirs[at].removeprefix("TRL, ") for at in like]
    headings += [f"{what} ÷ TRL ({design})" for what in ("speed", "memory") for design in designs]
    lines = [
        f"On {record['device']}, {record['date']}, commit `{(record['code']['commit'] or 'unknown')[:8]}`; median over "
        f"all measured steps of {record['repeats']} runs each, alternately:",
        "",
        f"| | {' | '.join(headings)} |",
        "|---" * (1 + len(headings)) + "|",
    ]
    for name, row in record["figures"].items():
        _, seconds, samples, growth, *_ = row_of(name, row)
        if "seconds_range" in row:
            low, high = row["seconds_range"]
            seconds, growth = f"{seconds} ({low:.2f} to {high:.2f})", f"{growth} MiB"
        ratios = (row.get("times_faster"), row.get("memory_ratio"))
        compared = [f"{values[at]:.2f}" if values else "" for values in ratios for at in like]
        lines.append(f"| {' | '.join((name, seconds, samples, growth, *compared))} |")
    return "\n".join(lines)


def phases_table(record: PeerRecord) -> str:
    """Return the table of docs/speed-internals.md: the phases of a step beside the floor of their contender.

    A share reached above 100 % means that the phase's products run faster than the one large product of the floor.
    """
    limit = record["floor"]
    by_name = {name: row["seconds_by_phase"] for name, row in record["figures"].items() if "seconds_by_phase" in row}
    contender = limit.get("contender") or next(iter(by_name), "")  # records before it was named took the first
    seconds = by_name.get(contender, {})
    total = sum(seconds.values())
    lines = [
        f"| phase | seconds | share | GFLOP | seconds at {limit['flops_per_second'] / 1e9:.0f} GFLOP/s | reached |",
        "|---|---|---|---|---|---|",
    ]
    for phase, spent in seconds.items():
        flops = limit["flops_per_step"][phase]
        least = flops / limit["flops_per_second"]
        lines.append(
            f"| {phase} | {spent:.2f} | {spent / total:.0%} | {flops / 1e9:.0f} | {least:.2f} | {least / spent:.0%} |"
        )
    return "\n".join(lines)


def row_of(name: str, row: Contender) -> tuple[str, ...]:
    """Return the table row of a contender; memory in MiB."""
    if row.get("out_of_memory"):
        return (name, "out of memory", "", "", "", "")
    return (
        name,
        f"{row['seconds_per_step']:.2f}",
        f"{row['samples_per_second']:.2f}",
        f"{row['peak_over_loaded_bytes'] / 2**20:.0f}",
        ", ".join(f"{ratio:.2f}" for ratio in row.get("times_faster", [])),
        ", ".join(f"{ratio:.2f}" for ratio in row.get("memory_ratio", [])),
    )
