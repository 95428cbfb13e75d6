"""The check before a stage starts: whether its predicted memory fits the card, or on a CPU this machine."""

from contextlib import suppress

from rlhf.errors import UserError
from rlhf.plan import machine
from rlhf.plan.most import at_most_bytes
from rlhf.plan.phases import ON_HOST, Predict, PredictionError
from rlhf.plan.predict import card_needed_bytes, predicted_stages
from rlhf.plan.reward_models import beside
from rlhf.plan.strategies import effects
from rlhf.process import memory
from rlhf.recipe import PinnedRecipe, StageName, as_yaml
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.terminal import say
from rlhf.terminal.wording import GB, gb


def require_fit(predict: Predict, loaded: PinnedRecipe, stage: StageName) -> int | None:
    """Return the bytes of a card at the stage's predicted peak; None without a card, and if nothing can be predicted.

    Raises UserError, with what would help, when the stage needs more than the recipe's card has, or on a CPU more than
    is free here.
    """
    hardware = loaded.recipe.hardware
    if stage not in predicted_stages(loaded.recipe):
        return None
    if hardware.device == "cpu":
        _require_free(predict, loaded, stage)
        return None
    if hardware.memory_gb is None or stage in ON_HOST:
        return None
    try:
        predicted = predict(loaded, stage)
    except PredictionError as error:
        say(f"{error}; going on without")
        return None
    others = _beside(loaded, stage)
    card, need = hardware.memory_gb * GB, card_needed_bytes(predicted.whole) + others
    if need <= card:
        return predicted.whole.peak_bytes
    raise UserError(
        f"{stage} would need {gb(need)} GB ({gb(predicted.whole.peak_bytes)} GB allocated{_in_words(others)}) and the "
        f"card has {gb(card)} GB; nothing was started.",
        *_advice(predict, loaded, stage, need),
        _search(loaded),
    )


def _require_free(predict: Predict, loaded: PinnedRecipe, stage: StageName) -> None:
    """Raise UserError if a stage on a CPU needs more than is free. What is small beyond doubt is not rehearsed."""
    free, others = memory.free(), _beside(loaded, stage)
    with suppress(PredictionError):
        if machine.needed_bytes(loaded.recipe, stage, at_most_bytes(loaded, stage)) + others <= free.size:
            return
    try:
        tensors = predict(loaded, stage).whole.peak_bytes
    except PredictionError as error:
        say(f"{error}; going on without")
        return
    need = machine.needed_bytes(loaded.recipe, stage, tensors) + others
    if need > free.size:
        processes = loaded.recipe.processes(stage)
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"{stage} would need {gb(need)} GB ({gb(tensors)} GB of tensors and {gb(machine.LIBRARIES)} GB of "
            f"libraries{each}{_in_words(others)}) and {gb(free.size)} GB are {free.words}; nothing was started. "
            "--no-preflight starts it",
            _search(loaded),
        )


def _beside(loaded: PinnedRecipe, stage: StageName) -> int:
    """Return the bytes of reward models of others beside a stage, and say which of them are not known."""
    others = beside(loaded.recipe, stage)
    for name in others.unknown:
        say(f"{stage}: the memory of the reward model {name} is unknown until you fetch it; going on without")
    return others.size


def _in_words(others: int) -> str:
    return f", {gb(others)} GB for reward models of others" if others else ""


def _search(loaded: PinnedRecipe) -> str:
    """Return the line about the command that looks for settings with which the chain fits."""
    changed = ", with the same --set," if loaded.overrides else ""
    return f"`rlhf plan --recipe {loaded.directory} --fastest`{changed} looks for settings with which the chain fits"


def _advice(predict: Predict, loaded: PinnedRecipe, stage: StageName, need: int) -> list[str]:
    """Return a line for each change with which a stage needs less than `need`, the most helpful first."""
    if stage not in TRAINING_STAGES:
        return []
    lines = []
    for effect in effects(predict, loaded, stage):
        if effect.after is not None and effect.after < need and effect.changes:
            keys = " ".join(f"{key}={as_yaml(value)}" for key, value in effect.changes.items())
            other = "; another result" if effect.strategy.changes_result(stage) else ""
            lines.append(f"- {gb(effect.after)} GB  {effect.strategy.words}{other}: {keys}")
    heading = "What each change would do alone (--set KEY=VALUE for each):"
    return [heading, *lines] if lines else []
