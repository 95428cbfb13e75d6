"""Stored records with which a new measurement of a recipe can be compared, whichever program made them.

`make bench` has seconds and peaks of whole stages, `make bench-gpu` and `make bench-memory` have one of them, or those
of a part of a step. All are read as a `StepsRecord`, whose `shape` says what was measured: hh and longest are rows of
whole stages, others are parts.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

from bench import compare, provenance
from bench.gpu.measured import DecodingFigures, MemoryFigures, SpeedFigures, TrainingFigures
from bench.gpu.record import GpuRecord
from bench.kinds import MemoryRecord, StageSteps, StepsRecord
from bench.paths import RESULTS
from bench.reading import check, read
from rlhf.plan.phases import WHOLE
from rlhf.recipe import StageName

Stages = dict[StageName, StageSteps]


def before(record: StepsRecord, root: Path = RESULTS) -> list[StepsRecord]:
    """Return the stored records of the same recipe, kind of device and shape, the newest first."""
    place = Path(record["recipe"], record.get("version", ""), device_folder(record))
    files = sorted((root / place).glob("*/*.json"), key=lambda file: file.name, reverse=True)
    return [one for file in files if (one := as_steps(file)) and one["shape"] == record["shape"]]


def device_folder(record: StepsRecord) -> str:
    """Return the name of the record's device as folders below results/ have it."""
    return provenance.device_folder(provenance.device_name(record["device"]))


def show(files: Iterable[Path]) -> tuple[list[str], int]:
    """Print what new records have worse than stored ones; return the lines, and how many have one before them.

    Peaks are compared by their bytes, and times by their ratio.
    """
    measured = [one for file in files if (one := as_steps(file))]
    worse, compared = losses(measured)
    print(f"{compared} of {len(measured)} records have one of the same machine and recipe before them")
    if compared and not worse:
        print("nothing is worse than before")
    for line in worse:
        print(f"worse: {line}", file=sys.stderr)
    return worse, compared


def losses(records: Sequence[StepsRecord], root: Path = RESULTS) -> tuple[list[str], int]:
    """Return a line for each figure that is worse than in an earlier record, and how many records have one before."""
    lines, compared = [], 0
    for record in records:
        earlier = [one for one in before(record, root) if one != record and not compare.difference(one, record)]
        compared += bool(earlier)
        lines += [f"{record['shape']}: {line}" for line in compare.losses_since(earlier, record)]
    return lines, compared


def as_steps(file: Path) -> StepsRecord | None:
    """Return a stored record as one of steps; None where it has neither seconds nor peaks of a recipe's stages."""
    content = read(file, dict[str, object])
    if "stages" in content:
        return check(content, StepsRecord, str(file))
    if "gpu_item" in content:
        return of_gpu(check(content, GpuRecord, str(file)), str(file))
    if "phases" in content:
        memory = check(content, MemoryRecord, str(file))
        rows = ((row["stage"], row["phase"], row["measured_bytes"]) for row in memory["phases"])
        return cast(StepsRecord, {"date": "", **memory, "shape": "longest", "stages": _peaks(rows)})
    return None


def of_gpu(record: GpuRecord, source: str) -> StepsRecord | None:
    """Return a record of `bench.gpu` as one of steps; None where its item measures neither seconds nor peaks."""
    measured = record["measured"]
    kind = next((kind for kind in READERS if kind in measured), None)
    if kind is None or record["recipe"] is None:
        return None
    shape, stages = READERS[kind](measured, f"{source}: measured")
    return cast(StepsRecord, {**record, "shape": shape, "stages": stages})


def _of_speed(measured: object, source: str) -> tuple[str, Stages]:
    figures = check(measured, SpeedFigures, source)
    return figures["shape"], figures["stages"]


def _of_memory(measured: object, source: str) -> tuple[str, Stages]:
    rows = check(measured, MemoryFigures, source)["phases"]
    return "longest", _peaks((row["stage"], row["phase"], row["measured_bytes"]) for row in rows)


def _of_training(measured: object, source: str) -> tuple[str, Stages]:
    stages: Stages = {}
    for stage, table in check(measured, TrainingFigures, source)["micro_batches"].items():
        rows = {name: row for name, row in table["variants"].items() if not isinstance(row, str)}
        seconds = {name: row["seconds"] for name, row in rows.items()}
        seconds |= {f"{name}, host": row["host_seconds"] for name, row in rows.items()}
        peaks = {name: row["peak_bytes"] for name, row in rows.items() if row["peak_bytes"] is not None}
        stages[cast(StageName, stage)] = {"phase_seconds": seconds, "phase_peak_bytes": peaks, "peak_vram_bytes": None}
    return "micro-batches", stages


def _of_decoding(measured: object, source: str) -> tuple[str, Stages]:
    seconds = {
        f"{name}, {rows} rows": row["step_seconds"]
        for rows, table in check(measured, DecodingFigures, source)["rows"].items()
        for name, row in table["variants"].items()
        if not isinstance(row, str) and "step_seconds" in row
    }
    return "steps of decoding", {"ppo": {"phase_seconds": seconds, "phase_peak_bytes": None, "peak_vram_bytes": None}}


def _peaks(rows: Iterable[tuple[StageName, str, int]]) -> Stages:
    """Return stages with the peaks of their phases in bytes, which alone were measured."""
    phases: dict[StageName, dict[str, int]] = defaultdict(dict)
    for stage, phase, size in rows:
        phases[stage][phase] = size
    return {
        stage: {"peak_vram_bytes": peaks.pop(WHOLE, None), "phase_peak_bytes": peaks, "phase_seconds": {}}
        for stage, peaks in phases.items()
    }


# The key by which the figures of an item are known -> what was measured, and its stages.
READERS: dict[str, Callable[[object, str], tuple[str, Stages]]] = {
    "stages": _of_speed,
    "phases": _of_memory,
    "micro_batches": _of_training,
    "rows": _of_decoding,
}
