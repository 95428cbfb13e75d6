"""Settings of a chain of stages that need no more memory than a limit.

Each stage begins with its whole batch on the card at once. What its neediest phase has at once is cut until the stage
fits, and gradient checkpointing comes last. This does not change what is learned, with two exceptions: 4 bits, which
are tried where nothing else fits, and the micro-batch of KTO, whose loss compares its rows.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import isqrt
from operator import attrgetter
from typing import NamedTuple

from peakmem.events import Component
from rlhf.errors import UserError
from rlhf.plan.phases import Predict, PredictedPhase, PredictedStage, PredictionError
from rlhf.plan.predict import card_needed_bytes
from rlhf.plan.weights import base_bytes
from rlhf.recipe import Changes, PinnedRecipe, Recipe, StageName, TrainingName
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.stages import ONLINE, STAGE_TABLE, TRAINING_STAGES
from rlhf.terminal.wording import GB

# Share of a card that chosen settings may need. In 95 % of the runs that others measured on a T4, reserved memory was
# at most 4.8 % above its prediction, in all but one at most 7 % (peakmem/validation).
USABLE = 0.93
# Components that grow with rows.
GROWING: tuple[Component, ...] = ("activations", "logits", "kv_cache", "buffers", "temporaries", "kernels")


class Fit(NamedTuple):
    """One set of changes for the whole chain: stages that build on each other must agree in what they share."""

    changes: Changes  # of the recipe
    stages: dict[StageName, PredictedStage]  # as predicted with them
    too_large: tuple[StageName, ...]  # the stages that still need more than the limit


def fit(
    predict: Predict,
    loaded: PinnedRecipe,
    stages: Sequence[StageName],
    limit: int,
    say: Callable[[str], None] = lambda text: None,
    compress: bool = True,
) -> Fit:
    """Return settings with which each of `stages` needs at most `limit` bytes of the card.

    Batches of the optimizers stay as they are. If a bfloat16 base does not fit, NF4 and paged 8-bit optimizers are
    tried, which change the result, unless `compress` is False. `say` gets a line for each prediction.
    """
    found = _fit(predict, loaded, stages, limit, say)
    if found.too_large and compress and loaded.recipe.model.quantization == "none":
        compressed = four_bit_changes(stages)
        again = _fit(predict, loaded.with_changes(compressed), stages, limit, say)
        return again._replace(changes=compressed | again.changes)
    return found


def _fit(
    predict: Predict, loaded: PinnedRecipe, stages: Sequence[StageName], limit: int, say: Callable[[str], None]
) -> Fit:
    chosen = {key: value for stage in stages for key, value in _largest(loaded, stage).items()}
    found: dict[StageName, PredictedStage] = {}
    too_large = []
    for stage in stages:
        while True:
            say(f"looking for settings that fit: {stage}")
            found[stage] = predict(loaded.with_changes(chosen), stage)
            if card_needed_bytes(found[stage].whole) <= limit:
                break
            smaller = _smaller(loaded.with_changes(chosen), stage, found[stage], limit)
            if not smaller:
                too_large.append(stage)
                break
            chosen |= smaller
    changes = {key: value for key, value in chosen.items() if attrgetter(key)(loaded.recipe) != value}
    return Fit(changes, found, tuple(too_large))


def _largest(loaded: PinnedRecipe, stage: StageName) -> Changes:
    """Return the keys that put a stage's whole batch on the card at once, without gradient checkpointing."""
    if stage not in TRAINING_STAGES:
        return {}
    changes = {f"{stage}.gradient_checkpointing": False, **micro_batch(loaded, stage, global_batch(loaded, stage))}
    if options := loaded.recipe.online().get(stage):
        changes[f"{stage}.rollout_batch_size"] = options.batch_size
        if options.score_batch_size is not None:
            changes[f"{stage}.score_batch_size"] = options.batch_size
    return changes


def _smaller(loaded: PinnedRecipe, stage: StageName, predicted: PredictedStage, limit: int) -> Changes | None:
    """Return the keys that make a stage's neediest phase smaller; None or no keys if nothing is left to make smaller.

    The number of rows is the largest with which the phase fits, if its growing components are proportional to rows.
    """
    recipe = loaded.recipe
    name, phase = max(predicted.phases.items(), key=lambda item: card_needed_bytes(item[1]))
    share = _share_that_fits(phase, limit)
    keys: dict[str, list[int]] = {}  # of rows that the phase has at once, and the numbers that they can be
    if name.startswith("evaluate") and STAGE_TABLE[stage].samples:
        keys["evaluate.batch_size"] = divisors(recipe.evaluate.batch_size)
    if online := recipe.online().get(stage):
        if name.startswith(("evaluate", "rollout")):  # whole groups of a prompt's answers
            groups = divisors(online.batch_size // online.samples_per_prompt)
            keys[f"{stage}.rollout_batch_size"] = [n * online.samples_per_prompt for n in groups]
        if name.startswith("score") and online.score_batch_size is not None:
            keys[f"{stage}.score_batch_size"] = divisors(online.batch_size)
    if keys or stage not in TRAINING_STAGES:
        return {**_fewer(recipe, keys, share)}
    rows = [n for n in divisors(global_batch(loaded, stage)) if n >= STAGE_TABLE[stage].least_rows]
    key = f"{stage}.per_device_train_batch_size"
    if fewer := _fewer(recipe, {key: rows}, share):
        return micro_batch(loaded, stage, fewer[key])
    if recipe.training_section(stage).gradient_checkpointing:
        return None
    return {f"{stage}.gradient_checkpointing": True, **micro_batch(loaded, stage, rows[-1])}


def _fewer(recipe: Recipe, keys: dict[str, list[int]], share: float) -> dict[str, int]:
    """Return the keys with the largest of their possible numbers up to a share of the present one, and below it."""
    fewer = {}
    for key, possible in keys.items():
        now = attrgetter(key)(recipe)
        if below := [n for n in possible if n < now]:
            fewer[key] = max((n for n in below if n <= share * now), default=below[0])
    return fewer


def _share_that_fits(phase: PredictedPhase, limit: int) -> float:
    """Return the share of its rows with which a phase would need `limit` bytes."""
    growing = sum(phase.components.get(name, 0) for name in GROWING)
    return max(0.0, (limit - card_needed_bytes(phase) + growing) / growing) if growing else 0.0


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


def four_bit_changes(stages: Iterable[StageName]) -> Changes:
    """Return the changes to a 4-bit base, with optimizers whose 8-bit states can leave the card."""
    optimizers: Changes = {f"{s}.optim": "paged_adamw_8bit" for s in stages if s in TRAINING_STAGES}
    return {"model.quantization": "nf4", **optimizers}


def divisors(n: int) -> list[int]:
    """Return the divisors of n, the smallest first."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def refuse_less_than_the_base(loaded: PinnedRecipe, stages: Sequence[StageName], limit: int) -> None:
    """Raise UserError if `limit` bytes are too few for the base in 4 bits, before anything is rehearsed."""
    with suppress(PredictionError):
        smallest = loaded.with_changes(four_bit_changes(stages)).recipe
        for stage in stages:
            least = min(base_bytes(recipe, stage) for recipe in (loaded.recipe, smallest))
            if least > limit:
                raise UserError(
                    f"--fit: {stage}'s base alone needs {least / GB:.3g} GB in 4 bits, more than {limit / GB:.3g} GB: "
                    "allow more, or choose a smaller model"
                )
