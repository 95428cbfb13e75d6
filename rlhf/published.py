"""Published figures that a recipe is held against: `published.yaml` beside it."""

from typing import Annotated, Literal

from pydantic import model_validator

from rlhf.strict import AsTuple, Section

COSTS = ("peak_vram_gb", "hours", "cost_usd", "adapter_gb", "merged_model_gb", "base_model_gb")


class Target(Section):
    """One published figure, and what of ours it is compared with, or why nothing of ours can be."""

    name: str
    stage: Literal["pretrain", "sft", "rm", "ppo", "dpo", "evaluate", "merge", "all"]
    metric: str | None = None  # key in the stage's summary metrics, or one of those in rlhf/memory/plan.py
    not_comparable: str | None = None  # the reason, where there is no metric
    range: Annotated[tuple[float | None, float | None], AsTuple]
    range_of_mean: Annotated[tuple[float | None, float | None], AsTuple] | None = None  # over several seeds
    unit: str
    source: str

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """What a value is held against: of a cost only the upper end of the range, for less is better."""
        return (None, self.range[1]) if self.metric in COSTS else self.range

    @model_validator(mode="after")
    def _either(self):
        if (self.metric is None) == (self.not_comparable is None):
            raise ValueError("a figure has either a metric that it is compared with, or a reason: not_comparable")
        return self
