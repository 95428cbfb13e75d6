"""Costs of all stages together, and their comparison with figures that are published for a whole run (`stage: all`)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlhf.recipe.published import NOT_COMPARED, Figure, Verdict, verdict_of
from rlhf.recipe.stages import PPO, RM, SFT, StageName

CHAIN: tuple[StageName, ...] = (SFT, RM, PPO)  # the stages whose hours and cost a published total adds up


class Spent(NamedTuple):
    """The cost of one stage; None for what is not known."""

    peak_vram_gb: float | None
    hours: float | None
    cards: int = 1


def total(metric: str, stages: Mapping[str, Spent], price: float | None) -> tuple[float | None, str]:
    """Return a cost of all stages together, and a message about stages or prices that are missing.

    Peak memory is the highest peak of `stages`; hours and dollars are sums over SFT, reward model and
    PPO, as in the guides. `price` is in dollars per hour of one card.
    """
    if metric == "cost_usd" and price is None:
        return None, "needs the price of an hour (--price)"
    pick: Callable[[Spent], float | None] = {
        "peak_vram_gb": lambda spent: spent.peak_vram_gb,
        "hours": lambda spent: spent.hours,
        "cost_usd": lambda spent: None if spent.hours is None else spent.hours * spent.cards * (price or 0.0),
    }.get(metric, lambda spent: None)
    costs = {stage: cost for stage, spent in stages.items() if (cost := pick(spent)) is not None}
    missing = [stage for stage in CHAIN if stage not in costs]
    needs = f"needs {', '.join(missing)}" if missing else ""
    if metric == "peak_vram_gb":
        return max(costs.values(), default=None), needs
    counted = [costs[stage] for stage in CHAIN if stage in costs]
    return (sum(counted) if counted else None), needs


def compare_total(
    figure: Figure, stages: Mapping[str, Spent], price: float | None = None
) -> tuple[float | None, Verdict]:
    """Return the value and the verdict of a figure of all stages together (`stage: all`).

    A guide's figure counts SFT, reward model and PPO, as the guides do; a target of our own, peaks of every stage.
    While stages are missing the value is None, unless it already exceeds the accepted range: costs only grow.
    """
    if figure.not_comparable is not None:
        return None, verdict_of(figure, None)
    if figure.guide is not None:
        stages = {stage: spent for stage, spent in stages.items() if stage in CHAIN}
    value, missing = total(figure.metric or "", stages, price)
    high = figure.accepted[1]
    if missing and (value is None or high is None or value <= high):
        return None, Verdict(NOT_COMPARED, missing)
    return value, verdict_of(figure, value)
