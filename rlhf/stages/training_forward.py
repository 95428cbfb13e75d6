"""How the decoder runs in the losses of TRL's trainers: without a mask for padding, or as the lean trunk."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import Trainer
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlhf.models.trunk import Trunk


def hide_right_padding(trainer: Trainer) -> None:
    """Keep the attention mask of training batches from the decoder, so that padding never costs flash attention.

    Under causal attention a real token never sees the padding behind it, and padded positions enter no loss. TRL's
    collators pass a mask all the same, and a single padded row would make attention use a slower kernel with a full
    mask. Only the decoder runs without it: token counts and the reward model's pooling are unchanged. So are forward
    passes outside of the trainer's loss, such as sampling, whose prompts are padded on the left.

    The collator checks each batch, on the CPU. Raises ValueError for one that is not padded on the right.
    """
    collate, compute_loss, decoder = trainer.data_collator, trainer.compute_loss, _decoder(trainer)

    def checked(rows: Any) -> Any:
        batch = collate(rows)
        mask = batch["attention_mask"]
        if (mask[:, 1:] > mask[:, :-1]).any():
            raise ValueError("a training batch has padding before a token: hide_right_padding cannot be used with it")
        return batch

    def compute_loss_without_mask(*args: Any, **kwargs: Any) -> Any:
        hook = decoder.register_forward_pre_hook(without_mask, with_kwargs=True)
        try:
            return compute_loss(*args, **kwargs)
        finally:
            hook.remove()

    methods: Any = trainer
    methods.data_collator, methods.compute_loss = checked, compute_loss_without_mask


def without_mask(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a decoder that keeps the attention mask from it."""
    return args, {**kwargs, "attention_mask": None}


def use_trunk(trainer: Trainer) -> None:
    """Compute the decoder's hidden states with the lean trunk in training steps; evaluation keeps the library's layers.

    The model has adapters, and `hide_right_padding` keeps masks from its decoder.
    Raises UserError for a model that the trunk does not support.
    """
    model: Any = trainer.model
    trunk = Trunk(model.get_base_model())
    usual = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        with as_decoder(trunk):
            loss: Tensor = usual(*args, **kwargs)
        return loss

    methods: Any = trainer
    methods.training_step = training_step


@contextmanager
def as_decoder(trunk: Trunk) -> Iterator[None]:
    """Run the trunk where its decoder is called inside the block, with the adapter that is active at each call.

    Such a call raises ValueError if it has a mask, positions or embeddings.
    """
    layer = next(module for module in trunk.decoder.modules() if isinstance(module, LoraLayer))

    def forward(
        input_ids: Tensor, attention_mask: None = None, position_ids: None = None, inputs_embeds: None = None, **_: Any
    ) -> BaseModelOutputWithPast:
        if not (attention_mask is position_ids is inputs_embeds is None):
            raise ValueError("the lean trunk computes rows of token ids, without a mask or positions of their own")
        role = "base" if layer.disable_adapters else layer.active_adapters[0]
        with trunk.merging(role):
            return BaseModelOutputWithPast(last_hidden_state=trunk.hidden(role, input_ids))

    trunk.decoder.forward = forward
    try:
        yield
    finally:
        del trunk.decoder.forward


def _decoder(trainer: Trainer) -> Any:
    model: Any = trainer.model
    return model.get_decoder()
