"""Medians and ratios of the contenders' runs, and the tables of docs/speed.md and docs/groups.md.

Records of PPO, RLOO and GRPO from before 2026-11-27 are `PeerRecord`s, which nothing writes any more.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import cast

from bench.clocks import clock_of
from bench.kinds import Contender, PeerRecord, SideFigures, StageSteps, SupervisedRecord
from bench.provenance import device_text
from rlhf.recipe import StageName
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import gb

# Contenders of a PeerRecord that are the same design on both sides: ours, TRL's. Headlines compare no others, and the
# ratios of the pages are to TRL's of these.
ALIKE = (
    ("ours, critic with an adapter", "TRL, value model through LoRA"),
    ("ours, activations kept", "TRL, activations kept"),
    ("ours, activations recomputed", "TRL, activations recomputed"),
)


PEAKS = ("train", "rollout", "score", "update")  # phases of a GPU's peak: what loading and evaluating hold is left out


def side_by_side(
    runs: Mapping[str, Sequence[StageSteps]], ours: Sequence[str], theirs: Sequence[str]
) -> dict[str, SideFigures]:
    """Return the `summary` of each contender's runs, and in ours the ratios to `theirs`, TRL's two.

    Speeds are tokens per second, or steps where a peer counts no tokens. A ratio is of medians; its range is that of
    the ratios within each round. One that did not fit has no ratio, and no other has one to it.
    """
    sides = {name: summary(parts) for name, parts in runs.items()}
    for name in ours:
        for suffix, peer in zip(("", "_tuned"), theirs, strict=True):
            if any("out_of_memory" in sides[side] for side in (name, peer)):
                continue
            pairs = [*zip(runs[name], runs[peer], strict=True)]
            tokens = all("tokens_per_second" in part for pair in pairs for part in pair)
            faster = _ratio([tuple(map(_speed if tokens else _rate, pair)) for pair in pairs])
            memory = _ratio([tuple(map(_peak, pair)) for pair in pairs])
            row: dict[str, object] = {f"times_faster{suffix}": faster[0], f"times_faster{suffix}_range": faster[1]}
            if memory[0] is not None:
                row |= {f"memory_ratio{suffix}": memory[0], f"memory_ratio{suffix}_range": memory[1]}
            sides[name] |= cast(SideFigures, row)
    return sides


def _ratio(pairs: Sequence[tuple[float | None, ...]]) -> tuple[float | None, list[float]]:
    """Return the ratio of both sides' medians, and the least and most ratio of a pair; None where none is known."""
    known = [(own, other) for own, other in pairs if own and other]
    if not known:
        return None, []
    own, other = (statistics.median(side) for side in zip(*known, strict=True))
    ratios = [a / b for a, b in known]
    return own / other, [min(ratios), max(ratios)]


def summary(parts: Sequence[StageSteps]) -> SideFigures:
    """Return the median and range of the runs' medians; of a contender that did not fit once, that alone.

    The peak is a GPU's while it trains, on a CPU that of the whole process.
    """
    if any(part.get("out_of_memory") for part in parts):
        return {"out_of_memory": True}
    seconds = [part["step_seconds"]["median"] for part in parts]
    peaks = [peak for part in parts if (peak := _peak(part))]
    row: SideFigures = {
        "step_seconds": statistics.median(seconds),
        "step_seconds_range": [min(seconds), max(seconds)],
        "peak_bytes": statistics.median(peaks) if peaks else None,
        "clock": parts[0]["clock"],
    }
    if all("tokens_per_second" in part for part in parts):
        row["tokens_per_second"] = statistics.median(part["tokens_per_second"] for part in parts)
    return row


def _speed(part: StageSteps) -> float:
    return part["tokens_per_second"]


def _rate(part: StageSteps) -> float:
    return 1 / part["step_seconds"]["median"]


def _peak(part: StageSteps) -> float | None:
    peaks = part["phase_peak_bytes"]
    if peaks is None:
        return part.get("peak_rss_bytes")
    return max((peaks[name] for name in PEAKS if name in peaks), default=None)


def show(title: str, beside: Mapping[StageName, Mapping[str, SideFigures]]) -> None:
    """Print the figures of all stages."""
    clock = clock_of(row for sides in beside.values() for row in sides.values())
    ratios = ("speed, times TRL's", "times TRL tuned", "memory ratio", "to TRL tuned")
    columns = ("stage", "", f"step, {clock} s", f"tokens/{clock} s", "peak, GB", *ratios)
    rows = [_row(stage, name, row) for stage, sides in beside.items() for name, row in sides.items()]
    rows_table(f"{title}; ratios are to TRL's two, in their order", columns, rows)


def _row(stage: str, name: str, row: SideFigures) -> tuple[str, ...]:
    if row.get("out_of_memory"):
        return (stage, name, "out of memory", *[""] * 6)
    tokens = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
    shown = f"{row['step_seconds']:.3g}", tokens, gb(row["peak_bytes"] or 0)
    return (stage if name == "ours" else "", name, *shown, *(text.replace("–", "") for text in ratios_of(row)))


def ratios_of(row: SideFigures) -> tuple[str, ...]:
    """Return the four ratios of a row of ours: speed and memory, each to TRL's two."""
    return (
        with_range(row.get("times_faster"), row.get("times_faster_range")),
        with_range(row.get("times_faster_tuned"), row.get("times_faster_tuned_range")),
        with_range(row.get("memory_ratio"), row.get("memory_ratio_range")),
        with_range(row.get("memory_ratio_tuned"), row.get("memory_ratio_tuned_range")),
    )


def with_range(ratio: float | None, rounds: Sequence[float] | None) -> str:
    """Return a ratio, with the range of the ratios within a round where a record has it."""
    return "–" if ratio is None else f"{ratio:.2f}" + (f" ({rounds[0]:.2f} to {rounds[1]:.2f})" if rounds else "")


def stages_table(records: Sequence[SupervisedRecord]) -> str:
    """Return the table of some records, a row for each stage: ours, and beside it TRL's defaults and TRL tuned."""
    columns = ("processor", "stage", "CPU s a step", "speed ÷ TRL's", "÷ tuned")
    lines = [(*columns, "peak, GB", "memory ÷ TRL's", "÷ tuned"), ("---", "---", *["---:"] * 6)]
    for record in records:
        for stage, sides in record["stages_beside"].items():
            ours = sides["ours"]
            peak = "–" if ours["peak_bytes"] is None else gb(ours["peak_bytes"])
            speed, tuned, *memory = ratios_of(ours)
            processor = device_text(record["device"], stage)
            lines.append((processor, stage, f"{ours['step_seconds']:.1f}", speed, tuned, peak, *memory))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


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
    """Return the table of docs/internals.md: the phases of a step beside the floor of their contender.

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
