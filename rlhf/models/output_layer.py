"""Logits and log-probabilities, from hidden states and the output layer of a base model.

Of the types in rlhf/recipe/model_types.py logits are one product with the output matrix, times a constant, which never
exists whole. Of all other types the model's own code makes them from hidden states: biases and soft caps included.

On CUDA logits leave a product of 16-bit matrices in float32: rounded to bfloat16 they would be off by up to 2^-9 of
their size, and the ratio of a token's probabilities in training and in sampling with them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlhf.data.batch import Rollout
from rlhf.models.forwards import replaced_forwards
from rlhf.models.matmul import matmul, round_to_few_sizes, wide_matmul
from rlhf.models.precision import Model
from rlhf.models.traits import logit_scale
from rlhf.objectives.logprobs import EntropyMode, TokenStatistics, linear_token_logprobs
from rlhf.objectives.masked import at_least_float32
from rlhf.recipe.model_types import TESTED

LOGITS = 2**24  # numbers in the largest tensor of logits: 524 tokens of a vocabulary of 32,000, 64 MiB in float32


def logits_of(base: Model, states: Tensor) -> Tensor:
    """Return the logits (N, V), in float32 or wider, of final hidden states (N, H)."""
    if not is_plain(base):
        return _own_logits(base, states)
    logits, scale = output_of(base.get_output_embeddings(), states), logit_scale(base.config)
    return logits if scale == 1.0 else logits * scale


def output_of(layer: nn.Module, states: Tensor) -> Tensor:
    """Return what an output layer makes of states (N, H), (N, V) in float32 or wider.

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
    with `rlhf.models.matmul`.
    """
    mask, real = rollout.mask, rollout.real_slots
    states, tokens = hidden.flatten(0, 1)[real], rollout.tokens.flatten()[real]
    weight, count = base.get_output_embeddings().weight, len(tokens)
    chunk = max(1, LOGITS // len(weight))
    if not is_plain(base):
        statistics = _own_statistics(base, states, tokens, temperature, chunk, entropy)
    else:
        if few_sizes and (extra := round_to_few_sizes(count) - count):
            states, tokens = F.pad(states, (0, 0, 0, extra)), F.pad(tokens, (0, extra))
        statistics = linear_token_logprobs(
            states,
            weight,
            tokens,
            temperature / logit_scale(base.config),
            chunk,
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


def is_plain(base: Model) -> bool:
    """Return whether logits are a product of hidden states and output matrix, times `logit_scale`."""
    return base.config.model_type in TESTED


def _own_logits(base: Model, states: Tensor) -> Tensor:
    """Return the logits (N, V) float32 that a model's own code makes of final hidden states (N, H)."""
    ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
    decoder: nn.Module = base.get_decoder()
    with replaced_forwards({decoder: lambda *_, **__: _States(last_hidden_state=states[None])}):
        logits: Tensor = base(input_ids=ids, use_cache=False).logits
    return at_least_float32(logits[0])


class _States(BaseModelOutputWithPast):
    """What a decoder returns: its last states, and None for whatever else the code of a type asks for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _own_statistics(
    base: PreTrainedModel, states: Tensor, ids: Tensor, temperature: float, chunk: int, entropy: EntropyMode
) -> TokenStatistics:
    """Return log-probabilities (N,), and entropies unless they are not asked for, of tokens by `_own_logits`.

    A chunk's logits are computed again in the backward pass.
    """

    def of_chunk(part: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logp = (_own_logits(base, part) / temperature).log_softmax(-1)
        finite = logp.clamp(min=torch.finfo(logp.dtype).min)  # p log p tends to 0 where p is 0
        spread = -(finite.exp() * finite).sum(-1)
        return logp.gather(1, tokens[:, None]).squeeze(1), spread if entropy == "gradient" else spread.detach()

    logps, entropies = [], []
    for part, tokens in zip(states.split(chunk), ids.split(chunk), strict=True):
        again = torch.is_grad_enabled() and part.requires_grad
        logp, spread = checkpoint(of_chunk, part, tokens, use_reentrant=False) if again else of_chunk(part, tokens)
        logps.append(logp)
        entropies.append(spread)
    return TokenStatistics(torch.cat(logps), None if entropy == "none" else torch.cat(entropies), None)
