"""A stand-in for the predictor of memory, whose answers are arithmetic."""

from typing import Any

from rlhf.plan.phases import PredictedPhase, PredictedStage, Work
from rlhf.recipe import PinnedRecipe

LEAST = 100_000_000  # bytes of a card that the stand-in needs for anything


class Predictor:
    """A stand-in that needs `row` bytes for each row at once, four times as many without checkpointing."""

    def __init__(self, row: int = 200_000_000, base: int = LEAST):
        self.row, self.base = row, base

    def __enter__(self) -> "Predictor":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def predict(self, loaded: PinnedRecipe, stage: str) -> PredictedStage:
        settings, found = loaded.recipe, {}
        base = self.base // (4 if settings.model.quantization == "nf4" else 1)
        section: Any = getattr(settings, stage)
        rows = {"evaluate": settings.evaluate.batch_size}
        if stage in ("sft", "rm", "ppo", "grpo", "dpo"):
            factor = 1 if section.gradient_checkpointing else 4
            rows["train"] = rows["update"] = factor * section.per_device_train_batch_size
        if stage in ("ppo", "grpo"):
            rows["rollout"] = section.rollout_batch_size
        for phase, count in rows.items():
            found[phase] = self.phase(base, count * self.row)
        return PredictedStage(max(found.values(), key=lambda phase: phase.peak_bytes), found)

    @staticmethod
    def phase(base: int, rows: int) -> PredictedPhase:
        size = base + rows
        return PredictedPhase(size, {"base": base, "activations": rows}, 0, Work(), needed_bytes=size)

    def decoding_step(self, loaded: PinnedRecipe) -> None:
        return None
