"""What a run changes in the trainers of transformers and TRL: exact weights, the order of rows, the forward pass.

It also checks a checkpoint before transformers resumes from it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

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
from rlhf.run.checkpoints import with_resume_advice
from rlhf.run.reader import reading
from rlhf.stages.supervised.checkpoint import check_parts, check_step
from rlhf.stages.supervised.forward import LeanSteps, padded_on_the_right, without_mask
from rlhf.stages.supervised.row_order import LengthBuckets, ShardedBatches


class RunTrainer(Trainer):
    """Base class of the trainers of a run. They name it before TRL's class, so that its methods take precedence.

    It keeps the values and the type of trainable adapters. On a 4-bit base TRL casts them to bfloat16 when a trainer is
    built, which rounds a warm start away.
    """

    _order: LengthBuckets | None = None
    _hides_padding = False
    _lean: LeanSteps | None = None
    _resumed_from: Path | None = None
    around_evaluation: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, model: Model, **options: Any):
        adapters = isinstance(model, PeftModel)
        exact = {name: p.detach().clone() for name, p in model.named_parameters() if adapters and p.requires_grad}
        super().__init__(model=model, **options)
        for name, parameter in self.trained_model.named_parameters():
            if name in exact:
                parameter.data = exact[name].to(parameter.device)

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

    # -- the forward pass ----------------------------------------------------------------------------------------------

    def hide_right_padding(self) -> None:
        """Keep the attention mask of training batches from the decoder, so that padding never costs flash attention.

        Under causal attention a real token never sees the padding behind it, and padded positions enter no loss. TRL's
        collators pass a mask all the same, and a single padded row would make attention use a slower kernel with a full
        mask. Only the decoder runs without it: token counts and the reward model's pooling are unchanged. So are
        forward passes outside of the trainer's loss, such as sampling, whose prompts are padded on the left.
        """
        self.data_collator = padded_on_the_right(self.data_collator)
        self._hides_padding = True

    def use_trunk(self, pairs: bool = False, joins: bool = False) -> None:
        """Compute training steps with the lean trunk; evaluation keeps the library's layers.

        The model has adapters, and `hide_right_padding` checks its batches. `pairs`: row n of the first half of a batch
        has the prompt of row n of the second half, which is computed once for both. `joins` as in `LeanTrunk`.
        Raises UserError for a model that the trunk does not support.
        """
        self._lean = LeanSteps(self.trained_model, pairs, joins)

    def training_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        with nullcontext() if self._lean is None else self._lean.step():
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with without_mask(self.trained_model.get_decoder()) if self._hides_padding else nullcontext():
            return super().compute_loss(*args, **kwargs)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as the library does. Training goes on as if nothing had been evaluated.

        A loader draws a seed where it begins. TRL logs the metrics of training only while the model is in that mode.
        """
        training = self.trained_model.training
        with self.around_evaluation(), kept_random_state():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        self.trained_model.train(training)
        return metrics

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate in the batches of one process; of several, each evaluates all of them.

        The library would divide the rows, and fill a short last batch with rows that count in its mean.
        """
        if distributed.world() == 1:
            return super().evaluation_loop(*args, **kwargs)
        self.trained_model.eval()
        total, count = 0.0, 0
        for batch in self.evaluated_batches():
            loss, *_ = self.prediction_step(self.trained_model, self.data_collator(batch), prediction_loss_only=True)
            assert loss is not None
            total, count = total + loss.item() * len(batch), count + len(batch)
        return EvalLoopOutput(None, None, {"eval_loss": total / count}, num_samples=count)  # type: ignore[arg-type]

    def evaluated_batches(self) -> Iterator[list[Any]]:
        """Yield the validation rows in batches of one process."""
        rows: Any = self.eval_dataset
        size = self.args.per_device_eval_batch_size
        for start in range(0, len(rows), size):
            yield [rows[i] for i in range(start, min(start + size, len(rows)))]

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Take the steps of an epoch; none after the last step, which a resumed run may have taken in the middle of it.

        transformers looks for the last step after it has taken one more.
        """
        if self.state.global_step < self.state.max_steps:
            run_epoch: Any = super()._run_epoch
            run_epoch(*args, **options)

    # -- the checkpoint of a resumed run -------------------------------------------------------------------------------

    def resume_from(self, folder: Path, divided: bool) -> None:
        """Check the checkpoint from which training will continue. `divided`: by an engine, in formats of its own.

        Raises UserError for files on which transformers would fail late, continue with wrong values, or unpickle code.
        """
        with with_resume_advice(folder):
            check_step(folder)
            if not divided:
                check_parts(self.accelerator.unwrap_model(self.model), folder)
        self._resumed_from = folder

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn every error while the checkpoint is read into one line that names it."""
        if self._resumed_from is None:
            yield
            return
        with with_resume_advice(self._resumed_from), reading(self._resumed_from):
            yield

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self._reading():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._reading():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._reading():
            super()._load_rng_state(checkpoint)


class EncodedRowsTrainer(RunTrainer):
    """A run's trainer for rows that are token ids already, for which TRL has no option."""

    def _prepare_dataset(self, dataset: Any, *_: object, **__: object) -> Any:
        return dataset
