"""Plans and predictions made by hand, for tests of what is done with them."""

from collections.abc import Mapping
from typing import Any, cast

from peakmem.events import Parts
from rlhf import recipe
from rlhf.plan.phases import PredictedPhase, PredictedStage, Work
from rlhf.plan.plan import Plan, PlannedStage
from rlhf.plan.predict import Predictor
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.schema import Optimization
from rlhf.recipe.schema_online import OnlineBase
from rlhf.recipe.stages import stage_name
from tests.helpers import RECIPE


def planned_stage(**changes: Any) -> PlannedStage:
    """A stage on a card, with the given fields changed."""
    fields: dict[str, Any] = {
        "in_memory_of": "cuda",
        "peak_bytes": 10**9,
        "card_needed_bytes": 10**9,
        "beside_bytes": 0,
        "fits": True,
        "phases": {},
        "time": None,
    }
    return PlannedStage(**fields | changes)


def planned(stages: Mapping[StageName, PlannedStage], card_bytes: int | None = 25 * 10**9) -> Plan:
    """The plan of these stages on one card."""
    return Plan("r", "v1", False, "4090", card_bytes, dict(stages))


class Known(Predictor):
    """Predicts the same for every stage, without a rehearsal."""

    def __init__(self, predicted: PredictedStage):
        super().__init__()
        self.predicted = predicted

    def predict(self, loaded: PinnedRecipe, stage: str) -> PredictedStage:
        return self.predicted


def global_batch(loaded: PinnedRecipe, stage: str) -> int:
    options = loaded.recipe.section(stage_name(stage))
    if isinstance(options, OnlineBase):
        return options.batch_size // options.num_mini_batches
    assert isinstance(options, Optimization)
    return options.per_device_train_batch_size * options.gradient_accumulation_steps


def phase(flops: int, moved: int = 0, launched: int = 0, **components: int) -> PredictedPhase:
    work = Work(flops, moved=moved, launched=launched)
    return PredictedPhase(sum(components.values()), cast(Parts, components), 0, work)


def sft_recipe(**changes) -> PinnedRecipe:
    """Toy data, whose lengths are not known: every row counts as the longest."""
    base: recipe.Changes = {
        "sft.max_samples": 80,
        "sft.num_train_epochs": 1,
        "sft.per_device_train_batch_size": 4,
        "sft.gradient_accumulation_steps": 2,
        "sft.max_eval_samples": 32,
        "hardware.name": "4090",
        "hardware.device": "cuda",
    }
    return recipe.load(RECIPE, base | {f"sft.{key}": value for key, value in changes.items()})


SFT = PredictedStage(phase(0, base=1), {"train": phase(800, base=1), "evaluate": phase(80, base=1)})
