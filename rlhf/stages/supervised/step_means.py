"""Means of a step: a token or a row counts alike in whatever micro-batch it lies, and on whatever rank.

TRL takes the mean of what it found in each micro-batch, and transformers that of their losses. A token of a micro-batch
with short answers would count for more, and so would the rows of a short last one: the same settings would train
otherwise on a card with room for other micro-batches.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers.trainer_utils import EvalLoopOutput

from rlhf.process import distributed
from rlhf.stages.supervised.trainer import RunTrainer

ROWS = "rows"
EXTREMES: dict[str, Callable[[list[float]], float]] = {"min_reward": min, "max_reward": max}


class StepMeans(RunTrainer):
    """A run's trainer with TRL's metrics and loss as means over a whole step, or over a whole evaluation."""

    OVER: ClassVar[Mapping[str, str]] = {}  # what a metric is a mean over, as `counts` names it; rows for others
    _metrics: dict[str, defaultdict[str, list[float]]]  # of TRL, by mode
    _batches: Sequence[dict[str, float]] = ()  # counts of each micro-batch of the step, on all ranks
    _number = 0  # of those that are computed
    _found: dict[str, list[tuple[float, float]]]  # values of a metric in the micro-batches so far, with their counts

    def counts(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return how many `rows` a micro-batch has, and of whatever else metrics are means."""
        raise NotImplementedError

    def weigh(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Prepare for the loss of a micro-batch."""

    def of_step(self, values: dict[str, float]) -> None:
        """Change metrics of a step that follow from others."""

    def share(self, inputs: Mapping[str, torch.Tensor], name: str) -> float:
        """Return how much of the step's count is in this rank's micro-batch."""
        return self.counts(inputs)[name] / max(sum(counts[name] for counts in self._batches), 1)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._begin(batches)
        return batches, items

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._begin(map(self.data_collator, self.evaluated_batches()))
        return super().evaluation_loop(*args, **kwargs)

    def _begin(self, batches: Iterable[Mapping[str, torch.Tensor]]) -> None:
        self._batches = [distributed.sum_of(self.counts(batch), self.args.device) for batch in batches]
        self._number, self._found = 0, defaultdict(list)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        if self._number == len(self._batches):  # neither a step nor an evaluation has begun
            self._begin([inputs])
        self.weigh(inputs)
        training = self.trained_model.training
        metrics = self._metrics["train" if training else "eval"]
        before = {name: len(values) for name, values in metrics.items()}
        result = super().compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        counts, self._number = self._batches[self._number], self._number + 1
        for name, values in metrics.items():
            if len(values) > before.get(name, 0) and name != "num_tokens":  # a sum, which is set and not appended
                self._found[name].append((values.pop(), counts[self.OVER.get(name, ROWS)]))
        if self._number == len(self._batches):
            self._end(metrics)
        if not training or num_items_in_batch is not None:  # an evaluation weighs rows; SFT's loss is one over tokens
            return result
        weight = self.share(inputs, ROWS) * len(self._batches) * distributed.world()
        return (result[0] * weight, *result[1:]) if isinstance(result, tuple) else result * weight

    def _end(self, metrics: dict[str, list[float]]) -> None:
        """Add each metric once for all micro-batches."""
        values = {name: _together(name, found) for name, found in self._found.items()}
        self.of_step(values)
        for name, value in values.items():
            metrics[name].append(value)


def _together(name: str, found: list[tuple[float, float]]) -> float:
    """Return a metric of several micro-batches from its values in them, with their counts; one value is kept as it is.

    Without any count, as where no token was trained, it is 0 as in TRL.
    """
    if name in EXTREMES or len(found) == 1:
        return EXTREMES.get(name, min)([value for value, _ in found])
    return sum(value * count for value, count in found) / max(sum(count for _, count in found), 1)
