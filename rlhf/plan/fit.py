"""Settings of a chain of stages that need no more memory than a limit.

Each stage begins with its whole batch on the card at once. What its neediest phase has at once is halved until the
stage fits, and gradient checkpointing comes last. This does not change what is learned, with two exceptions: 4 bits,
which are tried where nothing else fits, and the micro-batch of KTO, whose loss compares its rows.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from peakmem.events import Component
from rlhf.plan.phases import Predict, PredictedStage
from rlhf.plan.predict import card_needed_bytes
from rlhf.recipe import Changes, PinnedRecipe, StageName, TrainingName
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.stages import ONLINE, STAGE_TABLE, TRAINING_STAGES

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
            changed = loaded.with_changes(chosen)
            found[stage] = predict(changed, stage)
            if card_needed_bytes(found[stage].whole) <= limit:
                break
            smaller = _smaller(changed, stage, found[stage], limit)
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


def _smaller(loaded: PinnedRecipe, stage: StageName, predicted: PredictedStage, limit: int) -> Changes:
    """Return the keys that halve what a stage's neediest phase has at once; none if nothing is left to make smaller.

    That is so, too, where what the phase holds without any rows is more than the limit.
    """
    recipe = loaded.recipe
    phase, needs = max(predicted.phases.items(), key=lambda item: card_needed_bytes(item[1]))
    if needs.peak_bytes - sum(needs.components.get(name, 0) for name in GROWING) > limit:
        return {}
    halves: dict[str, int | None] = {}  # of the rows that the phase has at once
    if phase.startswith("evaluate") and STAGE_TABLE[stage].samples:
        halves["evaluate.batch_size"] = half(recipe.evaluate.batch_size, recipe.evaluate.batch_size)
    if online := recipe.online().get(stage):
        if phase.startswith(("evaluate", "rollout")):  # whole groups of a prompt's answers
            group = online.samples_per_prompt
            groups = half(online.rollout_batch_size // group, online.batch_size // group)
            halves[f"{stage}.rollout_batch_size"] = groups and groups * group
        if phase.startswith("score") and online.score_batch_size is not None:
            halves[f"{stage}.score_batch_size"] = half(online.score_batch_size, online.batch_size)
    if halves or stage not in TRAINING_STAGES:
        return {key: rows for key, rows in halves.items() if rows}
    options, whole = recipe.training_section(stage), global_batch(loaded, stage)
    rows = half(options.per_device_train_batch_size, whole)
    if rows and rows >= STAGE_TABLE[stage].least_rows:
        return micro_batch(loaded, stage, rows)
    if options.gradient_checkpointing:
        return {}
    return {f"{stage}.gradient_checkpointing": True, **micro_batch(loaded, stage, whole)}


def half(rows: int, whole: int) -> int | None:
    """Return the largest divisor of `whole` that is at most half of `rows`; None for a single row."""
    return next((n for n in range(rows // 2, 0, -1) if whole % n == 0), None)


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
