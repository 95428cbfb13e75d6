"""Real steps of stages as `rlhf run` takes them, each in a process of its own, on random weights."""

from pathlib import Path
from typing import Any

import torch

from bench import goals, steps
from bench.ceilings import ceilings
from bench.gpu.item import Context
from bench.gpu.record import Verdict, decide
from bench.paths import ROOT
from rlhf import recipe as recipes

STEPS = 4  # after the warm-up


def measure(context: Context, shape: str, stages: list[str]) -> Verdict:
    """Seconds, tokens and peaks of the stages' steps. MFU, MBU and hours need predictions: `conclude` adds them."""
    found: dict[str, Any] = context.measured
    found["shape"] = shape
    found["ceilings"] = ceilings(context.device, getattr(torch, context.recipe.recipe.model.dtype))
    if context.device.type == "cuda":
        torch.cuda.empty_cache()  # the stages have processes of their own
    found["stages"] = {}
    out = context.scratch / "runs"
    for stage in stages[:1] if context.dry_run else stages:
        row = steps.measure(
            context.recipe, (stage,), out, steps=2 if context.dry_run else STEPS, shape=shape, preflight=False
        )
        found["stages"] |= row or {stage: {"out_of_memory": True}}  # an earlier stage did not fit
        context.save()
    return verdict(found, context.recipe.name)


def verdict(found: dict[str, Any], recipe: str) -> Verdict:
    """Whether every stage ran and every goal of the recipe that was measured is reached."""
    stages = found["stages"]
    if large := [stage for stage, row in stages.items() if row.get("out_of_memory")]:
        return Verdict(False, f"out of memory in {', '.join(large)}")
    shown = ", ".join(f"{stage} {row['step_seconds']['median']:.3g} s" for stage, row in stages.items())
    if found["shape"] != "longest":  # goals are about the longest rows
        peak = max((row["peak_vram_bytes"] or 0 for row in stages.values()), default=0)
        return Verdict(True if peak else None, f"{shown} a step" + (f", peak {peak / 1e9:.1f} GB" if peak else ""))
    reached = [row for row in goals.rows({"recipe": recipe, "stages": stages}) if row[-1] != "-"]
    if not reached:
        return Verdict(None, f"{shown} a step; MFU and MBU need predictions: --conclude")
    return Verdict(
        all(float(row[-1]) >= 1 for row in reached), f"{shown} a step; " + ", ".join(f"{r[0]} {r[2]}" for r in reached)
    )


def conclude(record: dict[str, Any], root: Path = ROOT / "recipes") -> None:
    """Add MFU, MBU and hours to a speed record, and decide its claim. Predicts on the CPU; needs no GPU."""
    from bench.__main__ import derived
    from rlhf.memory.predict import Predictor

    found = record["measured"]
    loaded = recipes.load(root / record["recipe"] / record["version"], record["overrides"])
    with Predictor() as predict:
        for stage, row in found["stages"].items():
            row |= derived(loaded, stage, row, predict(loaded, stage), found["ceilings"], found["shape"])
    decided = verdict(found, record["recipe"])
    whole = record["outcome"] == "done"  # of an item that was cut off some goals are not measured
    decide(record, decided if whole or decided.holds is False else Verdict(None, decided.why))
