"""The outcome that every stage returns to the runner."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf.run.records import Costs


class Result(NamedTuple):
    """The outcome of a stage: metrics and costs for summary.json, and answers to print."""

    metrics: dict[str, float]
    costs: Costs
    examples: Sequence[tuple[str, Mapping[str, str]]] = ()  # as `rlhf.evaluation.samples.examples` returns them
