"""One rank of several: what it needs, and what ranks exchange. All of it is predicted or projected."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlhf.plan.phases import PredictedPhase, PredictedStage
from rlhf.plan.weights import ADAPTER_BYTES, adapter_parameters, layers_bytes, shape_of
from rlhf.recipe import PinnedRecipe, Recipe, StageName, TrainingName
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.schema_online import Ppo
from rlhf.recipe.stages import STAGE_TABLE, TRAINING_STAGES

LAYERS_AT_ONCE = 2
PASSES = 2  # forward and backward each fetch every layer; what checkpointing computes again lies within the backward


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


class Traffic(NamedTuple):
    """Bytes that each rank receives in one step, as the algorithms that need least of them do it."""

    gradients: int  # a ring's all-reduce of float32 gradients: 2 (n − 1) / n of them
    weights: int  # fetched layers: (n − 1) / n of them each time


def traffic(recipe: Recipe, stage: TrainingName) -> Traffic:
    """Return the bytes that cards exchange in one optimizer step, or in one step of PPO, RLOO or GRPO.

    The numbers of a batch that ranks share in these are left out: bytes for each token, where adapters and layers have
    millions.
    """
    count = recipe.processes(stage)
    options = recipe.training_section(stage)
    trained = ADAPTER_BYTES * adapter_parameters(recipe)
    if isinstance(options, Dialogues):
        reductions, trunks, passes = 1, 1, PASSES * options.per_device(count)[1]
    else:
        reductions = options.passes * options.num_mini_batches
        trunks = 2 if isinstance(options, Ppo) and options.value_model == "adapter" else 1
        rows = options.batch_size // options.num_mini_batches // count
        passes = PASSES * trunks * reductions * math.ceil(rows / options.per_device_train_batch_size) + 1
    received = (count - 1) / count
    fetched = received * passes * layers_bytes(recipe) if recipe.hardware.engine == "fsdp" else 0
    return Traffic(round(2 * received * reductions * trunks * trained), round(fetched))


@dataclass(frozen=True)
class RankTraffic:
    """What a rank receives in a step, the time that takes at the link's nominal rate, and the share of speed left."""

    gradient_bytes_per_step: int
    weight_bytes_per_step: int
    steps: int
    seconds_per_step: float
    # Shares of n times the speed of one card: with no message hidden behind computing, and with all that can be.
    projected_scaling: tuple[float, float]


def between(recipe: Recipe, stage: TrainingName, steps: int, seconds: float, link: float) -> RankTraffic:
    """Return what ranks exchange in a stage whose steps compute for so many `seconds`; `link`: bytes per second."""
    received = traffic(recipe, stage)
    waiting, computing = sum(received) / link, seconds / steps
    scaling = computing / (computing + waiting), computing / max(computing, waiting)
    return RankTraffic(*received, steps, waiting, scaling)
