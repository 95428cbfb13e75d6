"""Published figures of a recipe beside what is predicted or projected for it."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, cast

from rlhf.plan.phases import ON_HOST, Component, PredictedPhase
from rlhf.plan.plan import Plan
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.published import CHAIN, Figure, Verdict, verdict_of
from rlhf.recipe.stages import MERGE, SFT
from rlhf.terminal.wording import GB


class ComparedFigure(NamedTuple):
    """A published figure and what is predicted for it in its unit; None if only a run can tell."""

    figure: Figure
    predicted: float | None
    verdict: Verdict


def compare(loaded: PinnedRecipe, plan: Plan) -> list[ComparedFigure]:
    """Compare every published figure of the recipe with its plan."""
    return [compared(figure, loaded.figures, plan) for figure in loaded.figures]


def compared(figure: Figure, figures: Sequence[Figure], plan: Plan) -> ComparedFigure:
    """Compare a figure with a plan; `figures` are all of its recipe."""
    value = None if figure.metric is None else predicted(plan, figure, figure.metric)
    if value is None and figure.not_comparable is None:
        way = "projected with --price" if figure.metric == "cost_usd" else f"known after {figure.stage}"
        return ComparedFigure(figure, None, Verdict("not compared", way))
    others = [f for f in figures if (f.stage, f.metric) == (figure.stage, figure.metric)]
    return ComparedFigure(figure, value, verdict_of(figure, value, others))


def predicted(plan: Plan, figure: Figure, metric: str) -> float | None:
    """Return what is predicted or projected for a figure's `metric`; None if only a run can tell.

    `peak_vram_gb`, `hours`, `cost_usd` of a stage or of SFT, reward model and PPO together (`all`; the peak that a
    target of our own is compared with is that of every stage);
    `component_gb.<name>`, the most that a component takes in any phase; `adapter_gb`, `base_model_gb`,
    `merged_model_gb`.
    """
    if metric in ("hours", "cost_usd"):
        return _of_time(plan, CHAIN if figure.stage == "all" else (figure.stage,), metric)
    stage, stages = figure.stage, plan.stages
    if metric == "peak_vram_gb":
        wanted = (stage,) if stage != "all" else CHAIN if figure.guide else tuple(stages)
        peaks = [stages[name].peak_bytes for name in wanted if name in stages and name not in ON_HOST]
        return max(peaks) / GB if peaks else None
    if metric.startswith("component_gb."):
        part = cast(Component, metric.removeprefix("component_gb."))
        return _most(stages[stage].phases, part) if stage != "all" and stage in stages else None
    if metric == "adapter_gb":
        return _most(stages[SFT].phases, "adapters") if SFT in stages else None
    if metric in ("base_model_gb", "merged_model_gb"):
        return _most(stages[MERGE].phases, "base") if MERGE in stages else None
    return None


def _of_time(plan: Plan, stages: Sequence[StageName], metric: str) -> float | None:
    """Return the hours or dollars of some stages together; None if those of one are not known."""
    times = [plan.stages[stage].time if stage in plan.stages else None for stage in stages]
    of = attrgetter("projected_hours" if metric == "hours" else "projected_cost")
    costs = [of(time) for time in times if time is not None]
    return None if len(costs) < len(times) or None in costs else sum(costs)


def _most(phases: Mapping[str, PredictedPhase], component: Component) -> float:
    return max(phase.components.get(component, 0) for phase in phases.values()) / GB
