"""The outcome that every stage returns to the runner."""

from typing import NamedTuple

from rlhf.run.records import Costs


class Result(NamedTuple):
    """The outcome of a stage: metrics and costs for summary.json, and a sample to print."""

    metrics: dict[str, float]
    costs: Costs
    sample: tuple[str, dict[str, str]] | None = None  # a prompt, and the answers by label: SFT, PPO (score 1.30)
