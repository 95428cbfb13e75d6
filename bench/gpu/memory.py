"""Measured peaks of each phase beside those of the recipe's predicted.json. Nothing is predicted here."""

import torch

from bench.gpu.item import Context
from bench.gpu.measured import MemoryFigures, PhasePeaks
from bench.gpu.record import Decision
from bench.memory.measure import beside, measuring, pinned_peaks, unmatched
from rlhf.memory import prediction_file as pins
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import StageName

STAGES: tuple[StageName, ...] = ("sft", "rm", "ppo", "dpo")  # merge runs on the CPU; evaluate samples as these do
CLOSE = 0.05  # share of the measured peak by which a prediction may miss it


def measure(context: Context[MemoryFigures]) -> Decision:
    """Run two steps of each stage on the longest rows. A stage that does not fit is a result; the others still run."""
    loaded = context.recipe
    pinned = (loaded.directory / pins.FILE).exists() and not loaded.modified
    measured = context.measured
    measured["phases"], measured["unmatched"], measured["out_of_memory"] = [], [], []
    with quiet_libraries(), measuring(loaded) as measure_stage:
        for stage in STAGES[:2] if context.dry_run else STAGES:
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
    return decision(measured)


def decision(measured: MemoryFigures) -> Decision:
    """Return whether all phases are close to their predictions and fit; None without predictions."""
    if measured["out_of_memory"]:
        return Decision(False, f"out of memory in {', '.join(row['stage'] for row in measured['out_of_memory'])}")
    if measured["unmatched"]:
        return Decision(False, "; ".join(measured["unmatched"]))
    rows = [row for row in measured["phases"] if "error" in row]
    if not rows:
        return Decision(None, "nothing is pinned for this recipe")
    worst = max(rows, key=lambda row: abs(row["error"]))
    ratios = [row["reserved_bytes"] / row["measured_bytes"] for row in rows if row["reserved_bytes"]]
    reserved = f"; reserved at most {max(ratios) - 1:+.0%} above allocated" if ratios else ""
    why = f"worst of {len(rows)}: {worst['stage']}/{worst['phase']} {worst['error']:+.1%}{reserved}"
    return Decision(abs(worst["error"]) <= CLOSE, why)
