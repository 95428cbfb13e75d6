"""Measured peaks of each phase beside those of the recipe's predicted.json. Nothing is predicted here."""

import torch

from bench import targets
from bench.gpu.item import Context
from bench.gpu.measured import MemoryFigures, PhasePeaks
from bench.gpu.plan import NEAR
from bench.gpu.record import Decision
from bench.kinds import StageSteps
from bench.memory.measure import beside, measuring, pinned_peaks, unmatched
from rlhf.plan import prediction_file as pins
from rlhf.plan.phases import WHOLE
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import StageName
from rlhf.terminal.wording import gb

CHECKED_STAGES: tuple[StageName, ...] = (
    "sft",
    "rm",
    "ppo",
    "dpo",
)  # merge runs on the CPU; evaluate samples as these do


def measure(context: Context[MemoryFigures]) -> Decision:
    """Run two steps of each stage on the longest rows. A stage that does not fit is a result; the others still run."""
    loaded = context.recipe
    pinned = (loaded.directory / pins.PREDICTION_FILE).exists() and not loaded.modified
    measured = context.measured
    measured["phases"], measured["unmatched"], measured["out_of_memory"] = [], [], []
    with quiet_libraries(), measuring(loaded) as measure_stage:
        for stage in CHECKED_STAGES[:2] if context.dry_run else CHECKED_STAGES:
            try:
                peaks = measure_stage(stage)
            except torch.OutOfMemoryError as error:
                measured["out_of_memory"].append({"stage": stage, "error": str(error)[:500]})
                context.save()
                continue
            predicted = pinned_peaks(loaded.directory, stage) if pinned else {}
            in_bytes = {phase: peak["bytes"] for phase, peak in peaks.items()}
            compared = {row["phase"]: row for row in beside(stage, predicted, in_bytes)}
            if pinned:
                measured["unmatched"] += unmatched(stage, predicted, in_bytes)
            for phase, peak in peaks.items():
                row: PhasePeaks = {
                    "stage": stage,
                    "phase": phase,
                    "measured_bytes": peak["bytes"],
                    "reserved_bytes": peak.get("reserved"),
                }
                if phase in compared:
                    row["predicted_bytes"] = compared[phase]["predicted_bytes"]
                    row["error"] = compared[phase]["error"]
                measured["phases"].append(row)
            context.save()
    return decision(measured, loaded.name)


def decision(measured: MemoryFigures, recipe: str) -> Decision:
    """Return whether all phases are close to their predictions, fit, and reach the recipe's targets for peaks.

    Nothing is decided without predictions.
    """
    if measured["out_of_memory"]:
        return Decision(False, f"out of memory in {', '.join(row['stage'] for row in measured['out_of_memory'])}")
    if measured["unmatched"]:
        return Decision(False, "; ".join(measured["unmatched"]))
    rows = [row for row in measured["phases"] if "error" in row]
    if not rows:
        return Decision(None, "nothing is pinned for this recipe")
    worst = max(rows, key=lambda row: abs(row["error"]))
    stages = [row for row in measured["phases"] if row["phase"] == WHOLE]  # a phase keeps what earlier ones reserved
    ratios = [row["reserved_bytes"] / row["measured_bytes"] for row in stages if row["reserved_bytes"]]
    reserved = f"; stages reserve at most {max(ratios) - 1:.0%} more than they allocate" if ratios else ""
    why = f"worst of {len(rows)}: {worst['stage']}/{worst['phase']} {worst['error']:+.1%}{reserved}"
    results = [
        result for result in targets.measured(recipe, _peaks(measured)) if result.target.key == "peak_vram_bytes"
    ]
    missed = [f"{result.target.name} {gb(result.value or 0)} GB" for result in results if result.reached is False]
    return Decision(abs(worst["error"]) <= NEAR and not missed, "; ".join((why, *missed)))


def _peaks(measured: MemoryFigures) -> dict[StageName, StageSteps]:
    """Return the highest peak of each stage in bytes, as a row of its steps."""
    peaks: dict[StageName, StageSteps] = {}
    for row in measured["phases"]:
        before = peaks.get(row["stage"], {}).get("peak_vram_bytes") or 0
        peaks[row["stage"]] = {"peak_vram_bytes": max(before, row["measured_bytes"])}
    return peaks
