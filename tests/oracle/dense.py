"""Log-probabilities and entropies from whole matrices of logits, with which the chunked ones are compared."""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-softmax of the logits at the given tokens: log p(id) = logit[id] - logsumexp(logits).

    Computed in float32 or wider for logits of any type: in bfloat16 the result would have two or three digits, and a
    policy ratio exp(new - old) would be mostly rounding. The log-softmax itself is never stored.

    Shapes: logits (..., V), ids (...) int64 in [0, V), padded slots included; returns (...).
    Raises ValueError when the shapes do not fit. There is no mask here: a padded slot gives a meaningless number.
    """
    if logits.shape[:-1] != ids.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit ids {tuple(ids.shape)}: want ids.shape + (V,)")
    # Gather from the float32 copy that logsumexp needs anyway: from bfloat16 logits the gradient 1 - p would be
    # summed in bfloat16 and vanish for confident tokens.
    x = _at_least_float32(logits)
    return x.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - x.logsumexp(-1)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the softmax in nats: -sum_i p_i log p_i, between 0 and log V.

    A logit of -inf contributes 0. Shapes: logits (..., V); returns (...), float32 or wider. Stores several tensors of
    the logits' size.
    """
    logp = _at_least_float32(logits).log_softmax(-1)
    # p log p tends to 0 where p is 0; a finite log p keeps 0 * -inf out of the value and the gradient.
    return -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
