"""Importance weights for responses that were sampled from another distribution than the one that is trained.

A sampler with other kernels, another precision or rounded weights draws from q, the trainer computes p. Without a
correction the policy gradient is an expectation under q. With p / q as a weight it is one under p again; a cap on the
weight trades a little of that for less variance.
"""

import torch
from torch import Tensor

from rlhf.objectives.choices import Level, SamplingCorrection
from rlhf.objectives.groups import log_ratios, pool_log_ratios
from rlhf.objectives.masked import zero_pads


def importance_weights(
    logp: Tensor, sampled_logp: Tensor, mask: Tensor, correction: SamplingCorrection, cap: float
) -> Tensor:
    """Return the weight p / q of each token's policy loss, truncated or masked above a cap.

    With d_t = logp_t - sampled_logp_t:
        token_truncate      min(exp(d_t), cap)
        token_mask          exp(d_t), 0 where it exceeds the cap
        sequence_truncate   min(exp(sum_t d_t), cap), for all tokens of a response
        sequence_mask       exp(sum_t d_t), 0 where it exceeds the cap: such a response teaches nothing (TRL's default)

    Source: TRL 1.16, `vllm_importance_sampling_mode`; truncated weights: Ionides, Truncated Importance Sampling (2008).
    Shapes: logp, sampled_logp, mask (B, R), nats; mask bool, True on real tokens. Returns (B, R), 0 in padded slots.
    `correction` is not `none`. Raises ValueError when shapes differ.
    """
    of, _, bound = correction.partition("_")
    level: Level = "sequence_sum" if of == "sequence" else "token"
    ratio = pool_log_ratios(log_ratios(logp, sampled_logp, mask), mask, level).exp()
    bounded = ratio.clamp(max=cap) if bound == "truncate" else torch.where(ratio > cap, 0.0, ratio)
    return zero_pads(bounded, mask)
