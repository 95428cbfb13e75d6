"""Published figures of a recipe beside what is predicted or projected for it."""

from typing import NamedTuple, cast

from peakmem.events import Component
from rlhf.plan.phases import ON_HOST
from rlhf.plan.plan import Plan, PlannedStage
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.published import Figure, Verdict, compare_total, verdict_of
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

    `peak_vram_gb`, `hours`, `cost_usd` of a stage or of all together (rlhf/recipe/published.py);
    `component_gb.<name>`, the most that a component takes in any phase; `adapter_gb`, `base_model_gb`,
    `merged_model_gb`.
    """
    if figure.stage == "all":
        return compare_total(figure, {stage: _costs(stage, planned) for stage, planned in plan.stages.items()})[0]
    stage, part = COMPONENTS.get(metric, (figure.stage, metric.removeprefix("component_gb.")))
    if stage not in plan.stages:
        return None
    if metric.startswith("component_gb.") or metric in COMPONENTS:
        held = [phase.components for phase in plan.stages[stage].phases.values()]
        return max(parts.get(cast(Component, part), 0) for parts in held) / GB if held else None
    return _costs(stage, plan.stages[stage]).get(metric)


def _costs(stage: StageName, planned: PlannedStage) -> dict[str, float | None]:
    """Return what a stage takes, by the metrics of figures."""
    time = planned.time
    return {
        "peak_vram_gb": None if stage in ON_HOST else planned.peak_bytes / GB,
        "hours": time.projected_hours if time else None,
        "cost_usd": time.projected_cost if time else None,
    }
