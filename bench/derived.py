"""Figures that follow from measured steps and a prediction: shares of a device's rates, and projected hours."""

from collections.abc import Mapping

from bench.kinds import Ceilings, StageSteps
from rlhf.plan import projection
from rlhf.plan.phases import PredictedStage
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import TRAINING_STAGES


def derived_figures(
    loaded: PinnedRecipe,
    stage: StageName,
    row: StageSteps,
    predicted: PredictedStage | None,
    best: Ceilings,
    shape: str,
) -> StageSteps:
    """Return MFU, HFU, MBU, predicted peak and projected hours of a stage's steps; None for what is unknown.

    Rows have one `shape`: shares are of the longest ones, hours of rows as long as HH-RLHF's. `predicted` is None for a
    stage that cannot be predicted.
    """
    shares: StageSteps = {"mfu": None, "hfu": None, "mbu": None, "hours": None}
    shares["predicted_peak_bytes"] = predicted.whole.peak_bytes if predicted else None
    if row.get("out_of_memory"):
        return shares
    assert stage in TRAINING_STAGES  # as every stage with measured steps
    if shape == "longest":  # the steps of a whole stage are not of the longest rows, whose operations are known
        if predicted is None:
            return shares
        shares["mfu"], shares["hfu"] = (
            _rate(row, projection.step_flops(loaded.recipe, stage, predicted, of_model)) / best["flops"]
            for of_model in (True, False)
        )
        if stage in loaded.recipe.online():
            bytes_read = projection.step_decoded_bytes(loaded.recipe, stage, predicted, longest=True)
            shares["mbu"] = bytes_read / row["phase_seconds"]["rollout/decode"]["median"] / best["bandwidth"]
        return shares
    total = projection.optimizer_steps(loaded.recipe, stage)
    if total is not None:
        shares["hours"] = total * row["tokens_per_step"] / row["tokens_per_second"] / 3600  # by the mean step
    return shares


def _rate(row: StageSteps, flops: Mapping[str, float]) -> float:
    """Return the operations per second of all phases but decoding."""
    dense = {phase: n for phase, n in flops.items() if phase != "rollout/decode"}
    return sum(dense.values()) / sum(row["phase_seconds"][phase]["median"] for phase in dense)
