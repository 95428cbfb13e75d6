"""Published figures of a recipe beside what is predicted or projected for it."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, cast

from peakmem.events import Component
from rlhf.plan.phases import ON_HOST
from rlhf.plan.plan import Plan
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.published import CHAIN, Figure, Verdict, verdict_of
from rlhf.recipe.stages import MERGE, SFT
from rlhf.terminal.wording import GB

COMPONENTS: dict[str, tuple[StageName, str]] = {  # of a stage, by metric
    "adapter_gb": (SFT, "adapters"),
    "base_model_gb": (MERGE, "base"),
    "merged_model_gb": (MERGE, "base"),
}


class ComparedFigure(NamedTuple):
    """A published figure and what is predicted for it in its unit; None if only a run can tell."""

    figure: Figure
    predicted: float | None
    verdict: Verdict


def compare(loaded: PinnedRecipe, plan: Plan) -> list[ComparedFigure]:
    """Compare every published figure of the recipe with its plan."""
    rows = []
    for figure in loaded.figures:
        value = None if figure.metric is None else predicted(plan, figure, figure.metric)
        if value is None and figure.not_comparable is None:
            way = "projected with --price" if figure.metric == "cost_usd" else f"known after {figure.stage}"
            verdict = Verdict("not compared", way)
        else:
            others = [f for f in loaded.figures if (f.stage, f.metric) == (figure.stage, figure.metric)]
            verdict = verdict_of(figure, value, others)
        rows.append(ComparedFigure(figure, value, verdict))
    return rows


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
    if metric.startswith("component_gb.") or metric in COMPONENTS:
        stage, part = COMPONENTS.get(metric, (stage, metric.removeprefix("component_gb.")))
        held = [phase.components for phase in stages[stage].phases.values()] if stage in stages else []
        return max(parts.get(cast(Component, part), 0) for parts in held) / GB if held else None
    return None


def _of_time(plan: Plan, stages: Sequence[StageName], metric: str) -> float | None:
    """Return the hours or dollars of some stages together; None if those of one are not known."""
    times = [plan.stages[stage].time if stage in plan.stages else None for stage in stages]
    of = attrgetter("projected_hours" if metric == "hours" else "projected_cost")
    costs = [of(time) for time in times if time is not None]
    return None if len(costs) < len(times) or None in costs else sum(costs)
