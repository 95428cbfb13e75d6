"""What a run changes in the trainers of transformers and TRL.

Exact weights, the order of rows, the forward pass, and means of a step: a token or a row counts alike in whatever
micro-batch it lies, and on whatever rank. TRL takes the mean of what it found in each micro-batch, and transformers
that of their losses. A token of a micro-batch with short answers would count for more, and so would the rows of a short
last one: the same settings would train otherwise on a card with room for other micro-batches.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from accelerate.data_loader import SeedableRandomSampler
from peft import PeftModel
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from rlhf.models.precision import Model
from rlhf.models.random_state import kept_random_state
from rlhf.process import distributed
from rlhf.stages.supervised.forward import LeanSteps, without_mask
from rlhf.stages.supervised.row_order import LengthBuckets, ShardedBatches

ROWS = "rows"
EXTREMES: dict[str, Callable[[list[float]], float]] = {"min_reward": min, "max_reward": max}


class RunTrainer(Trainer):
    """Base class of the trainers of a run. They name it before TRL's class, so that its methods take precedence.

    Its rows are token ids already. It keeps the values and the type of trainable adapters: on a 4-bit base TRL casts
    them to bfloat16 when a trainer is built, which rounds a warm start away.
    """

    OVER: ClassVar[Mapping[str, str]] = {}  # what a metric is a mean over, as `counts` names it; rows for others
    around_evaluation: Callable[[], AbstractContextManager[None]] = nullcontext
    # Whether the decoder gets no attention mask in a loss, so that padding never costs flash attention. TRL's collators
    # pad on the right and pass a mask all the same, and a single padded row would make attention use a slower kernel
    # with a full mask. Under causal attention a real token never sees the padding behind it, and padded positions enter
    # no loss. Token counts and the reward model's pooling are unchanged, and so is sampling, whose prompts are padded
    # on the left.
    hides_padding = False
    lean_steps: LeanSteps | None = None  # compute training steps, with hidden padding; an evaluation has the library's
    _order: LengthBuckets | None = None
    _metrics: Any = MappingProxyType({"train": {}, "eval": {}})  # lists of values by name, of TRL, by mode
    _batches: Sequence[dict[str, float]] = ()  # counts of each micro-batch of the step, on all ranks
    _number = 0  # of those that are computed
    _found: dict[str, list[tuple[float, float]]]  # values of a metric in the micro-batches so far, with their counts

    def __init__(self, model: Model, **options: Any):
        adapters = isinstance(model, PeftModel)
        exact = {name: p.detach().clone() for name, p in model.named_parameters() if adapters and p.requires_grad}
        super().__init__(model=model, **options)
        for name, parameter in self.trained_model.named_parameters():
            if name in exact:
                parameter.data = exact[name].to(parameter.device)

    def _prepare_dataset(self, dataset: Any, *_: object, **__: object) -> Any:
        """Return the rows as they are, in place of TRL's way from texts to token ids."""
        return dataset

    @property
    def trained_model(self) -> Any:
        """Return the model; the classes of peft and torch do not share a base class for what is used of it."""
        assert self.model is not None
        return self.model

    # -- the order of rows ---------------------------------------------------------------------------------------------

    def group_by_length(self, lengths: Sequence[int], seed: int) -> None:
        """Take rows of similar length together. `lengths`: tokens of each training row."""
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * distributed.world()
        self._order = LengthBuckets(lengths, rows, seed)

    def _get_train_sampler(self, train_dataset: Dataset[object] | None = None) -> Sampler[int] | None:
        return self._order or super()._get_train_sampler(train_dataset)

    def get_train_dataloader(self) -> DataLoader[object]:
        """Return a loader of this rank's batches in the order of one process.

        transformers would fill a short last batch with other rows.
        """
        if distributed.world() == 1:
            return super().get_train_dataloader()
        order: Any = self._get_train_sampler()
        if not isinstance(order, LengthBuckets):
            order = SeedableRandomSampler(order.data_source, generator=order.generator)  # as accelerate does it for one
        batches = ShardedBatches(order, self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps)
        loader: Any = DataLoader(
            self._remove_unused_columns(self.train_dataset, "training"),
            batch_sampler=batches,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        # transformers looks for it here; in a resumed epoch it calls the sampler's
        loader.set_epoch = batches.set_epoch
        result: DataLoader[object] = loader
        return result

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Take the steps of an epoch; none after the last step, which a resumed run may have taken in the middle of it.

        transformers looks for the last step after it has taken one more.
        """
        if self.state.global_step < self.state.max_steps:
            run_epoch: Any = super()._run_epoch
            run_epoch(*args, **options)

    # -- the forward pass ----------------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        with nullcontext() if self.lean_steps is None else self.lean_steps.step():
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    # -- means of a step -----------------------------------------------------------------------------------------------

    def counts(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return how many `rows` a micro-batch has, and of whatever else metrics are means."""
        return {ROWS: len(inputs["input_ids"])}

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
        with without_mask(self.trained_model.get_decoder()) if self.hides_padding else nullcontext():
            result: Any = super().compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)  # type: ignore[misc]
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

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as the library does. Training goes on as if nothing had been evaluated.

        TRL logs the metrics of training only while the model is in that mode.
        """
        training = self.trained_model.training
        with self.around_evaluation(), kept_random_state():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        self.trained_model.train(training)
        return metrics

    def evaluation_loop(self, *_: Any, **__: Any) -> EvalLoopOutput:
        """Return the mean loss of the validation rows, in the batches of one process; each of several computes all.

        The library would divide the rows, and fill a short last batch with rows that count in its mean.
        """
        rows, size = list(cast(Any, self.eval_dataset)), self.args.per_device_eval_batch_size
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        batches = [self.data_collator(part) for part in parts]
        self._begin(batches)
        self.trained_model.eval()
        losses: list[torch.Tensor] = []
        for part, batch in zip(parts, batches, strict=True):
            loss = self.prediction_step(self.trained_model, batch, True)[0]  # without outputs
            assert loss is not None
            losses.append(loss.float().cpu().repeat(len(part)))
        mean = torch.cat(losses).numpy().mean().item()  # numpy's sum, as the library's
        return EvalLoopOutput(None, None, {"eval_loss": mean}, num_samples=len(rows))  # type: ignore[arg-type]


def _together(name: str, found: list[tuple[float, float]]) -> float:
    """Return a metric of several micro-batches from its values in them, with their counts; one value is kept as it is.

    Without any count, as where no token was trained, it is 0 as in TRL.
    """
    if name in EXTREMES or len(found) == 1:
        return EXTREMES.get(name, min)([value for value, _ in found])
    return sum(value * count for value, count in found) / max(sum(count for _, count in found), 1)
