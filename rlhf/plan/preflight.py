"""The check before a stage starts: whether its predicted memory fits the card."""

from rlhf.errors import UserError
from rlhf.plan.phases import ON_HOST, Predict, PredictionError
from rlhf.plan.predict import card_needed_bytes, predicted_stages
from rlhf.plan.strategies import effects
from rlhf.recipe import TRAINING_STAGES, PinnedRecipe, StageName, as_yaml
from rlhf.terminal import say
from rlhf.terminal.wording import GB, gb


def require_fit(predict: Predict, loaded: PinnedRecipe, stage: StageName) -> int | None:
    """Return the bytes at the stage's predicted peak; None if nothing can be predicted.

    Raises UserError, with what would help, when the stage needs more than the recipe's card has.
    """
    hardware = loaded.recipe.hardware
    on_card = hardware.device == "cuda" and stage in predicted_stages(loaded.recipe) and stage not in ON_HOST
    if hardware.memory_gb is None or not on_card:
        return None
    try:
        predicted = predict(loaded, stage)
    except PredictionError as error:
        say(f"{error}; going on without")
        return None
    card, need = hardware.memory_gb * GB, card_needed_bytes(predicted.whole)
    if need <= card:
        return predicted.whole.peak_bytes
    changed = ", with the same --set," if loaded.overrides else ""
    raise UserError(
        f"{stage} would need {gb(need)} GB ({gb(predicted.whole.peak_bytes)} GB allocated) and the "
        f"card has {gb(card)} GB; nothing was started.",
        *_advice(predict, loaded, stage, need),
        f"`rlhf plan --recipe {loaded.directory} --fastest`{changed} looks for settings with which the chain fits",
    )


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
