"""Advice on numbers of preference pairs that are small by the published H100 guide."""

from rlhf.recipe import StageName
from rlhf.terminal import say

MARGINAL, WORTH_IT, MEANINGFUL = 50, 100, 1000  # pairs; the guide's answers on small data and its aim for training


def advice(pairs: int) -> str:
    """Return the guide's advice on training on so few pairs; empty where they are enough."""
    if pairs < MARGINAL:
        return f"fewer than {MARGINAL}: the H100 guide expects marginal gains, and finds SFT more efficient"
    if pairs < WORTH_IT:
        return f"fewer than {WORTH_IT}: the H100 guide calls RLHF worth it from {WORTH_IT} good pairs, below that SFT"
    if pairs < MEANINGFUL:
        return f"few: the H100 guide asks for more than {MEANINGFUL:,} for meaningful training"
    return ""


def note(stage: StageName, pairs: int) -> None:
    """Print the advice for a stage that is about to train on `pairs`, if there is any."""
    if advice(pairs):
        say(f"{stage}: {pairs:,} training pairs are {advice(pairs)}")
