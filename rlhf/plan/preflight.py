"""The check before a stage starts: whether its predicted memory fits the card, or on a CPU this machine."""

from contextlib import suppress

from rlhf.errors import UserError
from rlhf.plan.phases import ON_HOST, Predict, PredictionError
from rlhf.plan.plan import needed_bytes
from rlhf.plan.predict import predicted_stages
from rlhf.plan.weights import base_bytes
from rlhf.process import memory
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.terminal import say
from rlhf.terminal.wording import GB, gb

SMALL = 64  # times a base's bytes: where so many are free, a stage on a CPU is not rehearsed before it starts


def require_fit(predict: Predict, loaded: PinnedRecipe, stage: StageName) -> int | None:
    """Return the bytes of a card at the stage's predicted peak; None without a card, and if nothing can be predicted.

    Raises UserError when the stage needs more than the recipe's card has, or on a CPU more than is free here.
    """
    hardware = loaded.recipe.hardware
    on_cpu = hardware.device == "cpu"
    if stage not in predicted_stages(loaded.recipe) or (not on_cpu and (stage in ON_HOST or not hardware.memory_gb)):
        return None
    free = memory.free()
    with suppress(PredictionError):
        if on_cpu and SMALL * base_bytes(loaded.recipe, stage) <= free.size:
            return None
    try:
        whole = predict(loaded, stage).whole
    except PredictionError as error:
        say(f"{error}; going on without")
        return None
    need = needed_bytes(loaded.recipe, stage, whole)
    if on_cpu:
        most, has = free.size, f"{gb(free.size)} GB are {free.words}; --no-preflight starts it all the same"
    else:
        most = round((hardware.memory_gb or 0) * GB)
        has = f"the card has {gb(most)} GB"
    if need <= most:
        return None if on_cpu else whole.peak_bytes
    changed = ", with the same --set," if loaded.overrides else ""
    raise UserError(
        f"{stage} would need {gb(need)} GB and {has}; nothing was started: "
        f"`rlhf plan --recipe {loaded.directory} --fit card`{changed} looks for settings that fit"
    )
