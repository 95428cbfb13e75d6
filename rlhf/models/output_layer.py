"""Logits and log-probabilities, from hidden states and the output layer of a base model.

On CUDA logits leave a product of 16-bit matrices in float32: rounded to bfloat16 they would be off by up to 2^-9 of
their size, and the ratio of a token's probabilities in training and in sampling with them.
"""

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.matmul import matmul, round_to_few_sizes, wide_matmul
from rlhf.models.traits import logit_scale
from rlhf.objectives.logprobs import EntropyMode, TokenStatistics, linear_token_logprobs
from rlhf.objectives.masked import at_least_float32

LOGITS = 2**24  # numbers in the largest tensor of logits: 524 tokens of a vocabulary of 32,000, 64 MiB in float32


def logits_of(layer: nn.Module, states: Tensor) -> Tensor:
    """Return the logits (N, V) of states (N, H) in float32 or wider.

    A layer that does not hold its whole weight, or is no plain product with one in 16 bits, is called as it is.
    """
    if type(layer) is nn.Linear and getattr(layer, "bias", None) is None:
        weight = layer.weight
        whole = type(weight) is nn.Parameter and weight.shape == (layer.out_features, layer.in_features)
        if whole and weight.dtype != torch.float32:
            return wide_matmul(states.to(weight.dtype), weight.t())
    return at_least_float32(layer(states))


def response_statistics(
    base: PreTrainedModel,
    hidden: Tensor,
    rollout: Rollout,
    temperature: float,
    entropy: EntropyMode = "none",
    likeliest: bool = False,
    few_sizes: bool = False,
) -> TokenStatistics:
    """Return statistics (B, R) of the response tokens given the hidden states (B, R, H) that predict them.

    `entropy` and `likeliest` as in `linear_token_logprobs`. All are 0 in masked slots. Logits are computed for real
    response tokens only, a chunk at a time. `few_sizes` rounds the number of tokens up to one of few, and multiplies
    with `rlhf.models.matmul`. Raises UserError for an output layer with a bias or an adapter.
    """
    output_layer = base.get_output_embeddings()
    if getattr(output_layer, "bias", None) is not None or isinstance(output_layer, BaseTunerLayer):
        raise UserError("an output layer with a bias or an adapter is not supported")
    mask, real = rollout.mask, rollout.real_slots
    states, tokens = hidden.flatten(0, 1)[real], rollout.tokens.flatten()[real]
    count = len(tokens)
    if few_sizes and (extra := round_to_few_sizes(count) - count):
        states, tokens = F.pad(states, (0, 0, 0, extra)), F.pad(tokens, (0, extra))
    statistics = linear_token_logprobs(
        states,
        output_layer.weight,
        tokens,
        temperature / logit_scale(base.config),
        max(1, LOGITS // len(output_layer.weight)),
        entropy,
        matmul if few_sizes else torch.mm,
        likeliest,
        matmul if few_sizes else wide_matmul,
    )

    def to_slots(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_zeros(mask.shape).masked_scatter(mask, x[:count])

    logp, entropies, tops = map(to_slots, statistics)
    assert logp is not None
    return TokenStatistics(logp, entropies, tops)
