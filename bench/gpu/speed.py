"""Real steps of stages on random weights, each in a separate process, as `rlhf run` runs them."""

from pathlib import Path
from typing import cast

import torch

from bench import goals, steps
from bench.ceilings import ceilings
from bench.gpu.item import Context
from bench.gpu.measured import SpeedFigures
from bench.gpu.record import Decision, GpuRecord, decide, speed_of
from bench.paths import ROOT
from rlhf import recipe as recipes
from rlhf.recipe import ONLINE, Changes, StageName
from rlhf.recipe.choices import LengthsShape

STEPS = 4  # after the warm-up


def measure(context: Context[SpeedFigures], shape: LengthsShape, stages: list[StageName]) -> Decision:
    """Measure seconds, tokens and peaks of the stages' steps. `conclude` adds MFU, MBU and hours by prediction."""
    measured = context.measured
    measured["shape"] = shape
    measured["ceilings"] = ceilings(context.device, getattr(torch, context.recipe.recipe.model.dtype))
    measured["stages"] = {}
    out = context.scratch / "runs"
    for stage in stages[:1] if context.dry_run else stages:
        count = 2 if context.dry_run else STEPS
        measured["stages"] |= steps.measure(context.recipe, (stage,), out, steps=count, shape=shape, preflight=False)
        context.save()
    return decision(measured, context.recipe.name)


def decision(measured: SpeedFigures, recipe: str) -> Decision:
    """Return whether every stage ran and every measured goal of the recipe is reached."""
    stages = measured["stages"]
    if too_large := [stage for stage, row in stages.items() if row.get("out_of_memory")]:
        return Decision(False, f"out of memory in {', '.join(too_large)}")
    step_times = ", ".join(f"{stage} {row['step_seconds']['median']:.3g} s" for stage, row in stages.items())
    usual = measured["shape"] == "hh"  # hours are of these, the other goals of the longest rows
    ratios = {r: r.ratio for r in goals.measured(recipe, stages) if (r.goal.key == "hours") == usual}
    if usual and not ratios:
        peak = max((row["peak_vram_bytes"] or 0 for row in stages.values()), default=0)
        return Decision(
            True if peak else None, f"{step_times} a step" + (f", peak {peak / 1e9:.1f} GB" if peak else "")
        )
    known = {result: ratio for result, ratio in ratios.items() if ratio is not None}
    if not known:
        return Decision(None, f"{step_times} a step; MFU, MBU and hours come with --conclude")
    return Decision(
        all(ratio >= 1 for ratio in known.values()),
        f"{step_times} a step; " + ", ".join(f"{result.goal.name} {result.value:.3g}" for result in known),
    )


def conclude(record: GpuRecord, root: Path = ROOT / "recipes") -> None:
    """Add MFU, MBU, hours and the roofline to a speed record, and decide its claim. Predicts on the CPU; needs no GPU.

    The roofline is at the rates that were measured on the same card.
    """
    from bench.derived import derived_figures
    from bench.roofline.times import beside
    from rlhf.memory.card.cards import NominalRates
    from rlhf.memory.predict import Predictor

    measured = speed_of(record)
    assert record["recipe"] and record["version"], f"{record['gpu_item']} has no recipe"
    loaded = recipes.load(root / record["recipe"] / record["version"], cast(Changes, record["overrides"]))
    with Predictor() as predictor:
        for stage, row in measured["stages"].items():
            predicted = predictor.predict(loaded, stage)
            row |= derived_figures(loaded, stage, row, predicted, measured["ceilings"], measured["shape"])
            if stage in ONLINE and not row.get("out_of_memory"):
                card = NominalRates(measured["ceilings"]["flops"], measured["ceilings"]["bandwidth"], "measured")
                medians = {phase: seconds["median"] for phase, seconds in row["phase_seconds"].items()}
                row["roofline"] = beside(loaded.recipe, stage, medians, card, measured["shape"] == "longest")
    decided = decision(measured, record["recipe"])
    complete = record["outcome"] == "done"  # of an item that was cut off some goals are not measured
    decide(record, decided if complete or decided.holds is False else Decision(None, decided.why))
