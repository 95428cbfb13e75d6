"""The outcome that every stage returns to the runner."""

from typing import NamedTuple

from rlhf.run.records import Costs


class Result(NamedTuple):
    """The outcome of a stage: metrics and costs for summary.json."""

    metrics: dict[str, float]
    costs: Costs
