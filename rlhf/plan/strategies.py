"""Ways to need less memory, and what each would save on a recipe.

The six are those of the published H100 guide. All but two leave the result alone: quantisation rounds the base, and a
shorter context cuts dialogues.
"""

from collections.abc import Callable, Iterable
from math import inf, isqrt
from typing import NamedTuple

from rlhf.errors import UserError
from rlhf.plan import projection
from rlhf.plan.phases import Predict, PredictedStage
from rlhf.plan.predict import card_needed_bytes
from rlhf.recipe import Changes, PinnedRecipe, StageName, TrainingName
from rlhf.recipe.choices import StrategyName
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.stages import GROUPS, ONLINE, STAGE_TABLE, TRAINING_STAGES


class Strategy(NamedTuple):
    """A way to need less memory."""

    name: StrategyName
    words: str  # what it does, for people
    always: bool  # another result of training, by more than rounding

    def changes_result(self, stage: StageName) -> bool:
        """Return whether a stage trains to another result with it, by more than rounding."""
        return self.always or (self.name == "batch_size" and STAGE_TABLE[stage].least_rows > 1)


STRATEGIES = (
    Strategy("gradient_checkpointing", "recompute activations in the backward pass", False),
    Strategy("quantization", "4-bit base (NF4)", True),
    Strategy("flash_attention", "attention without its matrix of scores", False),
    Strategy("batch_size", "half the micro-batch, twice the accumulation", False),
    Strategy("context_length", "half the tokens of a sequence", True),
    Strategy("distributed", "two GPUs", False),
)


def switched_on(loaded: PinnedRecipe, stage: TrainingName, name: StrategyName) -> Changes | None:
    """Return the keys that switch a strategy on for a stage; None if it is on, or there is nothing to halve."""
    recipe = loaded.recipe
    options = recipe.training_section(stage)
    if name == "gradient_checkpointing":
        return None if options.gradient_checkpointing else {f"{stage}.gradient_checkpointing": True}
    if name == "quantization":
        return None if recipe.model.quantization == "nf4" else {"model.quantization": "nf4"}
    if name == "flash_attention":
        return None if recipe.model.attention != "eager" else {"model.attention": "auto"}
    if name == "batch_size":
        least, most = STAGE_TABLE[stage].least_rows, options.per_device_train_batch_size // 2
        half = [n for n in divisors(global_batch(loaded, stage)) if least <= n <= most]
        return micro_batch(loaded, stage, half[-1]) if half else None
    if name == "context_length":
        return _halved(loaded, stage)
    return None  # one process sees one card


def switched_off(loaded: PinnedRecipe, stage: TrainingName) -> Changes:
    """Return the changes that switch every strategy off: the base as published, eager attention, one whole batch."""
    return {
        "model.quantization": "none",
        "model.attention": "eager",
        f"{stage}.gradient_checkpointing": False,
        **micro_batch(loaded, stage, global_batch(loaded, stage)),
    }


def one_by_one(loaded: PinnedRecipe, stage: TrainingName) -> dict[str, PinnedRecipe]:
    """Return variants of the recipe by name: "none" without any strategy, one for each strategy, and "combined".

    "combined" has all strategies that apply to one card.
    """
    off = loaded.with_changes(switched_off(loaded, stage))
    alone = {s.name: switched_on(off, stage, s.name) for s in STRATEGIES}
    changes: dict[str, Changes] = {"none": {}} | {name: keys for name, keys in alone.items() if keys}
    changes["combined"] = {key: value for keys in changes.values() for key, value in keys.items()}
    return {name: off.with_changes(keys) for name, keys in changes.items()}


class StrategyCost(NamedTuple):
    """A stage's learning phase with one strategy alone."""

    peak_bytes: int
    flops: float  # of a step, relative to those without any strategy


def costs_alone(
    predict: Predict,
    loaded: PinnedRecipe,
    stage: TrainingName,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, StrategyCost]:
    """Return the cost of a stage with each strategy alone, without any ("none") and with all together ("combined").

    `say` gets a line for each.
    """
    peaks, flops = {}, {}
    for name, changed in one_by_one(loaded, stage).items():
        say(f"rehearsing {stage} with strategies: {name}")
        predicted = predict(changed, stage)
        peaks[name] = predicted.phases[STAGE_TABLE[stage].learning_phase].peak_bytes
        flops[name] = flops_beside_decoding(changed, stage, predicted)
    return {name: StrategyCost(peaks[name], flops[name] / flops["none"]) for name in peaks}


def four_bit_changes(stages: Iterable[StageName]) -> Changes:
    """Return the changes to a 4-bit base, with optimizers whose 8-bit states can leave the card."""
    optimizers: Changes = {f"{s}.optim": "paged_adamw_8bit" for s in stages if s in TRAINING_STAGES}
    return {"model.quantization": "nf4", **optimizers}


class Effect(NamedTuple):
    """What a stage needs with a strategy, in bytes of the card.

    `after` is None if the strategy is on already, does not apply, or cannot be predicted.
    """

    strategy: Strategy
    changes: Changes | None
    after: int | None


def effects(predict: Predict, loaded: PinnedRecipe, stage: TrainingName) -> list[Effect]:
    """Return each strategy alone, on the recipe as it is, the one that saves most first."""
    rows = []
    for strategy in STRATEGIES:
        changes = switched_on(loaded, stage, strategy.name)
        if changes is None:
            rows.append(Effect(strategy, None, None))
            continue
        after: int | None
        try:
            after = card_needed_bytes(predict(loaded.with_changes(changes), stage).whole)
        except UserError:  # other keys of the recipe exclude it, or a package that it needs is not installed
            after = None
        rows.append(Effect(strategy, changes, after))
    return sorted(rows, key=lambda effect: inf if effect.after is None else effect.after)


def flops_beside_decoding(loaded: PinnedRecipe, stage: TrainingName, predicted: PredictedStage) -> float:
    """Return the floating-point operations of one step of a stage, decoding left out."""
    by_phase = projection.step_flops(loaded.recipe, stage, predicted)
    return sum(flops for phase, flops in by_phase.items() if phase != "rollout/decode")


def global_batch(loaded: PinnedRecipe, stage: TrainingName) -> int:
    """Return the rows of one optimizer step."""
    options = loaded.recipe.training_section(stage)
    if isinstance(options, Dialogues):
        return options.per_device_train_batch_size * options.gradient_accumulation_steps
    return options.batch_size // options.num_mini_batches


def micro_batch(loaded: PinnedRecipe, stage: TrainingName, micro: int) -> Changes:
    """Return the keys that put `micro` rows on the card at once and keep the rows of an optimizer step."""
    if stage in ONLINE:
        return {f"{stage}.per_device_train_batch_size": micro}
    return {
        f"{stage}.per_device_train_batch_size": micro,
        f"{stage}.gradient_accumulation_steps": global_batch(loaded, stage) // micro,
    }


def _halved(loaded: PinnedRecipe, stage: TrainingName) -> Changes:
    options = loaded.recipe.training_section(stage)
    if isinstance(options, Dialogues):
        key, length = "max_length", options.max_length
    else:
        key, length = "max_completion_length" if stage in GROUPS else "response_length", options.response_length
    lengths = {"max_prompt_length": options.max_prompt_length, key: length}
    return {f"{stage}.{name}": max(2, tokens // 2) for name, tokens in lengths.items()}


def divisors(n: int) -> list[int]:
    """Return the divisors of n, the smallest first."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
