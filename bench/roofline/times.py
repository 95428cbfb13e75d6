"""The least seconds of a step's phases on a card, from the work that bench/roofline/counts.py counts."""

from collections.abc import Mapping

from bench.kinds import Bound
from bench.roofline.counts import LeastWork, phases
from peakmem.cards import Rates
from rlhf.plan.padding import row_tokens
from rlhf.recipe import OnlineName, Recipe


def seconds(work: Mapping[str, LeastWork], card: Rates) -> float:
    """Return the least seconds of a step, its phases one after another."""
    return sum(part.seconds(card) for part in work.values())


def bound(work: LeastWork, card: Rates) -> str:
    """Return what bounds a phase on a card, compute or memory."""
    computing, moving = card.seconds(work.flops, work.moved)
    return "compute" if computing >= moving else "memory"


def by_phase(recipe: Recipe, stage: OnlineName, prompt: float, card: Rates) -> dict[str, float]:
    """Return the least seconds of the phases whose time a run measures: those of the rollout, score and update."""
    sums: dict[str, float] = {}
    for name, part in phases(recipe, stage, prompt).items():
        detail = [name] if name in ("rollout/prefill", "rollout/decode") else []
        for phase in (name.split("/")[0], *detail):
            sums[phase] = sums.get(phase, 0.0) + part.seconds(card)
    return sums


def beside(
    recipe: Recipe, stage: OnlineName, measured: Mapping[str, float], card: Rates, longest: bool
) -> dict[str, Bound]:
    """Return the least seconds of each measured phase, and their share of the seconds measured.

    longest: prompts are as long as the stage admits, and not of the mean length of those in the recipe's data.
    """
    options = recipe.online()[stage]
    prompt = options.max_prompt_length if longest else row_tokens(recipe, stage, 1) - options.response_length
    least = by_phase(recipe, stage, prompt, card)
    return {
        phase: {"least_seconds": shortest, "seconds": measured[phase], "reached": shortest / measured[phase]}
        for phase, shortest in least.items()
        if phase in measured
    }
