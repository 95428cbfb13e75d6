"""The forward pass inside TRL's trainers: without a mask for padding, or with the lean trunk."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, SequenceClassifierOutputWithPast
from trl.trainer.utils import FusedCausalLMOutput

from rlhf.data.batch import Rollout
from rlhf.models.forwards import replaced_forwards
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.models.output_layer import response_statistics

IGNORED = -100  # a label that takes no part in the loss


@contextmanager
def without_mask(decoder: nn.Module) -> Iterator[None]:
    """Keep the attention mask from a decoder inside the block."""
    hook = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


class LeanSteps:
    """Training steps whose forward passes are the lean trunk's. `pairs` as in `LabelStatistics`."""

    def __init__(self, model: PeftModel, pairs: bool, joins: bool):
        self.model = model
        base: Any = model.get_base_model()
        self.trunk = LeanTrunk(base, joins)
        self.forwards: dict[nn.Module, Callable[..., object]]
        if base.get_output_embeddings() is not None:
            self.forwards = {base: LabelStatistics(self.trunk, pairs)}
        elif self.trunk.packs:
            self.forwards = {base: partial(pair_scores, self.trunk)}
        else:
            self.forwards = {self.trunk.decoder: partial(decoder_states, self.trunk)}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the trunk inside the block, which is one training step."""
        with ExitStack() as block:
            for role in self.model.peft_config:  # weights merged for the forward pass serve a recomputation too
                block.enter_context(self.trunk.merging(role))
            block.enter_context(replaced_forwards(self.forwards))
            yield


def decoder_states(
    trunk: LeanTrunk,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    **_: object,
) -> BaseModelOutputWithPast:
    """Return what replaces a decoder's forward pass: the trunk's, with the adapter that is active.

    Raises ValueError for a mask, positions or embeddings.
    """
    if not (attention_mask is position_ids is inputs_embeds is None):
        raise ValueError("the lean trunk computes rows of token ids, without a mask or positions of their own")
    return BaseModelOutputWithPast(last_hidden_state=trunk.hidden(_active_role(trunk), input_ids))


def pair_scores(trunk: LeanTrunk, input_ids: Tensor, **_: object) -> SequenceClassifierOutputWithPast:
    """Return what replaces a classifier's forward pass on pairs in joined rows: a score (B, 1) of each row.

    It is the head's output at the last token that is no padding, as transformers takes it.
    """
    base: Any = trunk.base
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    last = (places * (input_ids != base.config.pad_token_id)).argmax(1)
    return SequenceClassifierOutputWithPast(logits=base.score(trunk.pair_hidden(_active_role(trunk), input_ids, last)))


def _active_role(trunk: LeanTrunk) -> str:
    layer = next(module for module in trunk.decoder.modules() if isinstance(module, LoraLayer))
    return "base" if layer.disable_adapters else layer.active_adapters[0]


class LabelStatistics:
    """Forward pass that replaces a causal model's where a trainer asks TRL's fused output layer for label statistics.

    States of the last layer, and logits, are computed only where they predict a label. `pairs`: row n of the first half
    of a batch has the prompt of row n of the second half, which is computed once for both.
    """

    def __init__(self, trunk: LeanTrunk, pairs: bool):
        self.trunk, self.pairs = trunk, pairs
        self.mean_output = trunk.base.get_output_embeddings().weight.mean(0, dtype=torch.float32)  # (H,)

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        fused_lm_head: bool = False,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **_: object,
    ) -> FusedCausalLMOutput:
        """Return statistics (B, T - 1) of the labels (B, T), 0 where they are IGNORED.

        They are computed from a row's first label to its last one. Raises ValueError for other calls, and for pairs
        whose prompts differ in length.
        """
        if not fused_lm_head or labels is None or not (position_ids is inputs_embeds is shift_labels is None):
            raise ValueError("the lean trunk gives statistics of labels, and no logits")
        scored, role = labels[:, 1:] != IGNORED, _active_role(self.trunk)
        rollout = _rollout(input_ids, scored)
        order = torch.arange(len(labels), device=labels.device)
        if self.pairs:
            order = order.view(2, -1).t().flatten()
            rollout = replace(rollout.rows(order), prompt_numbers=torch.arange(len(labels), device=labels.device) // 2)
            if (rollout.prompt_length[::2] != rollout.prompt_length[1::2]).any():
                raise ValueError("the prompts of a pair differ in length")
        with self.trunk.merging(role):
            hidden = self.trunk.response_hidden(role, rollout)
        few_sizes = self.trunk.rounds
        logp, entropy, likeliest = response_statistics(self.trunk.base, hidden, rollout, 1.0, "value", True, few_sizes)
        assert entropy is not None and likeliest is not None
        back, mask, spans = order.argsort(), rollout.mask, _spans(scored)[order]

        def of_labels(x: Tensor) -> Tensor:
            return x.new_zeros(scored.shape).masked_scatter(spans, x[mask])[back].masked_fill(~scored, 0)

        return FusedCausalLMOutput(
            log_probs=of_labels(logp),
            entropy=of_labels(entropy),
            mean_logits=of_labels((hidden.detach().float() * self.mean_output).sum(-1)),  # autocast rounds products
            is_top1=of_labels(likeliest),
            label_mask=scored,
        )


def _rollout(ids: Tensor, scored: Tensor) -> Rollout:
    """Return rows of ids (B, T), whose response is from the first to the last that `scored` (B, T - 1) marks."""
    return Rollout(ids, scored.int().argmax(1) + 1, _spans(scored).sum(1), ended=torch.zeros_like(scored[:, 0]))


def _spans(scored: Tensor) -> Tensor:
    """Return marks (B, T - 1) from the first to the last that `scored` (B, T - 1) has in each row."""
    return (scored.cumsum(1) > 0) & (scored.flip(1).cumsum(1).flip(1) > 0)
