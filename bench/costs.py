"""Costs of measured stages beside every figure that is published for them."""

from collections.abc import Iterator, Mapping, Sequence

from bench.kinds import StageSteps
from rlhf.plan import prediction_file, published_figures
from rlhf.plan.plan import Plan, plan_of
from rlhf.recipe import PinnedRecipe, StageName, published
from rlhf.recipe.published import Figure, Verdict
from rlhf.recipe.totals import Spent, compare_total
from rlhf.terminal import wording

Compared = tuple[Figure, float | None, Verdict]  # a published figure, the cost here in its unit, the verdict


def comparisons(
    loaded: PinnedRecipe, stages: Mapping[StageName, StageSteps], price: float | None = None
) -> list[Compared]:
    """Compare every published cost of the measured stages, then those of all stages together.

    Hours and dollars are projected from the measured steps. `price` is in dollars per hour of one card. More of them
    than published are explained up to what the recipe's own prediction reaches, as more memory is.
    """
    pinned = prediction_file.read(loaded.directory)
    plan = plan_of(loaded, prediction_file.stages_of(pinned), price) if pinned else None
    measured = {stage: row for stage, row in stages.items() if not row.get("out_of_memory")}
    spent: dict[str, Spent] = {
        stage: Spent(
            row["peak_vram_bytes"] / wording.GB if row["peak_vram_bytes"] else None,
            row["hours"],
            loaded.recipe.processes(stage),
        )
        for stage, row in measured.items()
    }
    compared: list[Compared] = []
    for figure in loaded.figures:
        if not published.is_cost(figure.metric):
            continue
        figure = _with_projected(figure, plan)
        if figure.stage == "all":
            compared.append((figure, *compare_total(figure, spent, price)))
        elif figure.stage in measured:
            value = costs(measured[figure.stage]).get(figure.metric or "")
            compared.append((figure, value, published.verdict_of(figure, value)))
    return sorted(compared, key=lambda row: row[0].stage == "all")


def _with_projected(figure: Figure, plan: Plan | None) -> Figure:
    """Return a figure of time or money as one that expects the projection's upper end, where that is worse."""
    if plan is None or figure.metric not in ("hours", "cost_usd"):
        return figure
    projected, high = published_figures.predicted(plan, {}, figure, figure.metric), figure.accepted[1]
    if projected is None or high is None or projected.high <= high:
        return figure
    return figure.model_copy(update={"expected": projected.high, "explained": f"projected are {projected}"})


def costs(row: StageSteps) -> dict[str, float]:
    """Return the costs of a stage's measured steps in GB and hours, by the metric of a published figure."""
    by_metric = {f"component_gb.{name}": size / wording.GB for name, size in (row.get("component_bytes") or {}).items()}
    for metric, size in (("peak_vram_gb", row["peak_vram_bytes"]), ("adapter_gb", row.get("adapter_bytes"))):
        if size:
            by_metric[metric] = size / wording.GB
    return by_metric if row["hours"] is None else by_metric | {"hours": row["hours"]}


def figure_rows(compared: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Return a table row for each comparison: stage, figure with its heading, published, here, verdict."""
    return [
        (figure.stage, figure.title, figure.text(), wording.number(value), str(verdict))
        for figure, value, verdict in compared
    ]


def worse(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield a line for each cost that is worse than every figure published for it.

    A guide may publish several figures for one cost that disagree; a cost that reproduces one of them is not worse.
    """
    by_cost: dict[tuple[str, str | None], list[Compared]] = {}
    for row in compared:
        by_cost.setdefault((row[0].stage, row[0].metric), []).append(row)
    for (stage, metric), rows in by_cost.items():
        if published.best(verdict.word for *_, verdict in rows) == published.MISSED:
            listing = "; ".join(f"{figure.title}, {figure.text()} ({verdict.detail})" for figure, _, verdict in rows)
            yield f"{stage}: {metric} {rows[0][1]:.3g} misses {listing}"
