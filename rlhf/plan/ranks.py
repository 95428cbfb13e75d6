"""One rank of several: its share of the rows, and of the layers where ranks divide them."""

import math
from dataclasses import replace

from rlhf.plan.phases import PredictedPhase, PredictedStage
from rlhf.plan.weights import layers_bytes, shape_of
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.stages import STAGE_TABLE, TRAINING_STAGES

LAYERS_AT_ONCE = 2


def recipe_of_one_rank(loaded: PinnedRecipe, stage: StageName) -> PinnedRecipe:
    """Return the recipe with which one process alone does the work of one rank: all steps, its share of the rows."""
    recipe = loaded.recipe
    count = recipe.processes(stage)
    if count == 1 or stage not in TRAINING_STAGES:
        return loaded
    options = recipe.training_section(stage)
    share: dict[str, int]
    if isinstance(options, Dialogues):
        rows, accumulated = options.per_device(count)
        share = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated}
    else:
        batch = options.batch_size // count
        share = {
            "max_eval_samples": math.ceil(options.max_eval_samples / count),
            "batch_size": batch,
            "rollout_batch_size": min(options.rollout_batch_size, batch),
            "per_device_train_batch_size": min(options.per_device_train_batch_size, batch // options.num_mini_batches),
        }
    if options.max_samples is not None:
        share["max_samples"] = math.ceil(options.max_samples / count)
    changes = {f"{stage}.{key}": value for key, value in share.items()} | {"hardware.count": 1}
    return loaded.with_changes(changes)


def divide(recipe: Recipe, stage: StageName, predicted: PredictedStage) -> PredictedStage:
    """Return what a rank needs from what it needs with the whole base: less of it where ranks divide the layers."""
    if recipe.hardware.engine != "fsdp" or recipe.processes(stage) == 1:
        return predicted
    layers = layers_bytes(recipe)
    part = layers // recipe.hardware.count
    fetched = LAYERS_AT_ONCE * layers // shape_of(recipe).num_hidden_layers

    def of_rank(name: str, phase: PredictedPhase) -> PredictedPhase:
        """Return a phase with the layers that a rank holds in it."""
        top = name.partition("/")[0]
        if top in STAGE_TABLE[stage].fetched:
            return _with_base(phase, part)
        return _with_base(phase, part + fetched - layers) if top in STAGE_TABLE[stage].divided else phase

    phases = {name: of_rank(name, phase) for name, phase in predicted.phases.items()}
    highest = max(phases.values(), key=lambda phase: phase.peak_bytes)
    needed = [phase.needed_bytes for phase in phases.values() if phase.needed_bytes is not None]
    whole_stage = replace(  # the work and the paged states are those of all phases
        predicted.whole,
        peak_bytes=highest.peak_bytes,
        components=highest.components,
        needed_bytes=max(needed, default=None),
    )
    return PredictedStage(whole_stage, phases)


def _with_base(phase: PredictedPhase, more: int) -> PredictedPhase:
    """Return a phase with `more` additional bytes of weights; scales of 4-bit weights grow in proportion.

    What the allocator needs changes by as much: how it would place the parts was not replayed.
    """
    parts = dict(phase.components)
    weights = parts["base"] + parts.get("quantization", 0)
    for name in ("base", "quantization"):
        if name in parts:
            parts[name] += round(more * parts[name] / weights)
    peak = sum(parts.values())
    needed = None if phase.needed_bytes is None else phase.needed_bytes + peak - phase.peak_bytes
    return replace(phase, peak_bytes=peak, components=parts, needed_bytes=needed)
