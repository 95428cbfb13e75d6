"""The outcome that every stage returns to the runner."""

from typing import NamedTuple

from rlhf.run.outcomes import Examples
from rlhf.run.records import Costs


class Result(NamedTuple):
    """The outcome of a stage: metrics and costs for summary.json, and answers to print."""

    metrics: dict[str, float]
    costs: Costs
    examples: Examples | None = None
