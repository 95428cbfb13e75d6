"""Published figures of a recipe beside what is predicted or projected for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from rlhf.files import JsonObject
from rlhf.plan.phases import ON_HOST
from rlhf.plan.plan import Plan, PlannedPhase
from rlhf.recipe import PinnedRecipe, StageName, published, totals
from rlhf.recipe.choices import Component
from rlhf.recipe.published import Figure, Verdict, verdict_of
from rlhf.recipe.stages import MERGE, SFT
from rlhf.terminal import wording
from rlhf.terminal.wording import GB


class Predicted(NamedTuple):
    """A predicted or projected value in its figure's unit, and the range in which it is expected.

    Memory has no range; its ends are the value.
    """

    value: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float]:
        """Return both ends of the range."""
        return self.low, self.high

    def __str__(self) -> str:
        texts = [wording.number(float(f"{number:.3g}")) for number in self]
        return texts[0] if self.low == self.high else f"{texts[0]} ({texts[1]} to {texts[2]})"


@dataclass(frozen=True)
class ComparedFigure:
    """A published figure and its prediction."""

    figure: Figure
    predicted: Predicted | None  # None if only a run can tell
    verdict: Verdict

    @property
    def basis(self) -> Literal["predicted", "projected"] | None:
        """Return whether the value is predicted or projected; None without one."""
        if self.predicted is None:
            return None
        return "projected" if self.figure.metric in ("hours", "cost_usd") else "predicted"

    def as_json(self) -> JsonObject:
        """Return the comparison as JSON's types."""
        figure = self.figure
        return {
            "stage": figure.stage,
            "name": figure.name,
            "source": figure.source,
            "metric": figure.metric,
            "published": list(figure.printed),
            "accepted": list(figure.accepted),
            "unit": figure.unit,
            "predicted": self.predicted and self.predicted.value,
            "predicted_range": self.predicted and list(self.predicted.ends),
            "basis": self.basis,
            "verdict": self.verdict.word,
            "detail": self.verdict.detail,
        }


def compare(loaded: PinnedRecipe, plan: Plan) -> list[ComparedFigure]:
    """Compare every published figure of the recipe with its plan."""
    rows = []
    for figure in loaded.figures:
        value = None if figure.metric is None else predicted(plan, figure, figure.metric)
        verdict = verdict_of(figure, value.value, value.ends) if value else _unpredicted(figure, plan)
        rows.append(ComparedFigure(figure, value, verdict))
    return rows


def predicted(plan: Plan, figure: Figure, metric: str) -> Predicted | None:
    """Return what is predicted or projected for a figure's `metric`; None if only a run can tell.

    `peak_vram_gb`, `hours`, `cost_usd` of a stage or of SFT, reward model and PPO together (`all`; the peak that a
    target of our own is compared with is that of every stage);
    `component_gb.<name>`, the most that a component takes in any phase; `adapter_gb`, `base_model_gb`,
    `merged_model_gb`.
    """
    if metric in ("hours", "cost_usd"):
        return _of_time(plan, totals.CHAIN if figure.stage == "all" else (figure.stage,), metric)
    value = _of_memory(plan, figure, metric)
    return None if value is None else Predicted(value, value, value)


def _of_time(plan: Plan, stages: Sequence[StageName], metric: str) -> Predicted | None:
    """Return the hours or dollars of some stages together; None if those of one are not known."""
    times = [plan.stages[stage].time if stage in plan.stages else None for stage in stages]
    if None in times or (metric == "cost_usd" and plan.price_per_hour is None):
        return None
    known = []
    for time in (time for time in times if time):
        rate = 1.0 if metric == "hours" else (time.projected_cost or 0.0) / time.projected_hours
        known.append([rate * hours for hours in (time.projected_hours, *time.projected_hours_range)])
    return Predicted(*map(sum, zip(*known, strict=True)))


def _of_memory(plan: Plan, figure: Figure, metric: str) -> float | None:
    stage, stages = figure.stage, plan.stages
    if metric == "peak_vram_gb":
        wanted = (stage,) if stage != "all" else totals.CHAIN if figure.guide else tuple(stages)
        peaks = [stages[name].peak_bytes for name in wanted if name in stages and name not in ON_HOST]
        return max(peaks) / GB if peaks else None
    if metric.startswith("component_gb."):
        part = cast(Component, metric.removeprefix("component_gb."))  # checked when the figure was read
        return _most(stages[stage].phases, part) if stage != "all" and stage in stages else None
    if metric == "adapter_gb":
        return _most(stages[SFT].phases, "adapters") if SFT in stages else None
    if metric in ("base_model_gb", "merged_model_gb"):
        return _most(stages[MERGE].phases, "base")
    return None


def _most(phases: Mapping[str, PlannedPhase], component: Component) -> float:
    return max(phase.components.get(component, 0) for phase in phases.values()) / GB


def _unpredicted(figure: Figure, plan: Plan) -> Verdict:
    """Return the verdict on a figure that has no prediction: why it cannot be compared, or what measures it."""
    metric = figure.metric
    if metric is None:
        return verdict_of(figure, None)
    if metric == "cost_usd" and plan.price_per_hour is None:
        return Verdict(published.NOT_COMPARED, "projected with --price")
    if metric.startswith("effect."):
        return Verdict(published.NOT_COMPARED, published.why_not_measured(metric))
    return Verdict(published.NOT_COMPARED, f"known after {'the chain' if figure.stage == 'all' else figure.stage}")
