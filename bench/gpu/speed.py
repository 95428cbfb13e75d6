"""Real steps of stages on random weights, each in a separate process, as `rlhf run` runs them."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from bench import steps, targets
from bench.ceilings import ceilings
from bench.gpu.item import Context
from bench.gpu.measured import SpeedFigures
from bench.gpu.record import Decision, GpuRecord, decide, speed_of
from bench.kinds import Bound, StageSteps
from bench.paths import ROOT
from rlhf import recipe as recipes
from rlhf.plan import padding, projection
from rlhf.recipe import Changes, StageName
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.terminal.wording import gb

STEPS = 4  # after the warm-up
# With the warm-up a window of row_order.py: its batches have rows of similar length each, short to long.
SUPERVISED_STEPS = padding.SORTED_BATCHES - steps.WARM_UP


def measure(context: Context[SpeedFigures], shape: LengthsShape, stages: list[StageName]) -> Decision:
    """Measure seconds, tokens and peaks of the stages' steps. `conclude` adds MFU, MBU and hours by prediction."""
    measured = context.measured
    measured["shape"] = shape
    measured["ceilings"] = ceilings(context.device, getattr(torch, context.recipe.recipe.model.dtype))
    measured["stages"] = {}
    out = context.scratch / "runs"
    count = 2 if context.dry_run else STEPS
    supervised = SUPERVISED_STEPS if shape == "hh" and not context.dry_run else count
    chosen = stages[:1] if context.dry_run else stages
    for stage in chosen:
        measured["stages"] |= steps.measure(
            context.recipe,
            (stage,),
            out,
            steps=count,
            supervised_steps=supervised,
            measured=chosen,
            shape=shape,
            preflight=False,
        )
        context.save()
    return decision(measured, context.recipe.name)


def decision(measured: SpeedFigures, recipe: str) -> Decision:
    """Return whether every stage ran and every measured target of the recipe is reached.

    Nothing is decided where a target lies between the quartiles of what was measured for it.
    """
    stages = measured["stages"]
    if too_large := [stage for stage, row in stages.items() if row.get("out_of_memory")]:
        return Decision(False, f"out of memory in {', '.join(too_large)}")
    step_times = ", ".join(f"{stage} {row['step_seconds']['median']:.3g} s" for stage, row in stages.items())
    usual = measured["shape"] == "hh"  # hours are of these, the other targets of the longest rows
    wanted = [result for result in targets.measured(recipe, stages) if (result.target.key == "hours") == usual]
    if usual and not wanted:
        peak = max((row["peak_vram_bytes"] or 0 for row in stages.values()), default=0)
        return Decision(True if peak else None, f"{step_times} a step" + (f", peak {gb(peak, 1)} GB" if peak else ""))
    known = [result for result in wanted if result.value is not None]
    if not known:
        return Decision(None, f"{step_times} a step; MFU, MBU and hours come with --conclude")
    verdicts = {result.reached for result in known}
    return Decision(
        False if False in verdicts else None if None in verdicts else True,
        f"{step_times} a step; " + ", ".join(map(_said, known)),
    )


def _said(result: targets.Measured) -> str:
    between = " (the target is within its spread)" if result.reached is None else ""
    return f"{result.target.name} {result.value:.3g}{between}"


def _bounds(least: Mapping[str, float], row: StageSteps) -> dict[str, Bound]:
    """Return the least seconds of each measured phase, and their share of the seconds measured."""
    seconds = {phase: spread["median"] for phase, spread in row["phase_seconds"].items() if phase in least}
    return {
        phase: {"least_seconds": least[phase], "seconds": median, "reached": least[phase] / median}
        for phase, median in seconds.items()
    }


def conclude(record: GpuRecord, root: Path = ROOT / "recipes") -> None:
    """Add MFU, MBU, hours and the roofline to a speed record, and decide its claim. Predicts on the CPU; needs no GPU.

    The roofline is the projection's, at the rates that were measured on the same card.
    """
    from bench.derived import derived_figures
    from peakmem.cards import Rates
    from rlhf.plan.predict import Predictor

    measured = speed_of(record)
    assert record["recipe"] and record["version"], f"{record['gpu_item']} has no recipe"
    loaded = recipes.load(root / record["recipe"] / record["version"], cast(Changes, record["overrides"]))
    with Predictor() as predictor:
        for stage, row in measured["stages"].items():
            predicted = predictor.predict(loaded, stage)
            row |= derived_figures(loaded, stage, row, predicted, measured["ceilings"], measured["shape"])
            if not row.get("out_of_memory"):
                assert stage in TRAINING_STAGES  # as every stage with measured steps
                card = Rates(measured["ceilings"]["flops"], measured["ceilings"]["bandwidth"], "measured")
                least = projection.step_limits(loaded.recipe, stage, predicted, card, measured["shape"] == "longest")
                row["roofline"] = _bounds(least, row)
    decided = decision(measured, record["recipe"])
    complete = record["outcome"] == "done"  # of an item that was cut off some targets are not measured
    decide(record, decided if complete or decided.holds is False else Decision(None, decided.why))
