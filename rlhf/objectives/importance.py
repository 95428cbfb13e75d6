"""Importance weights for responses that were sampled from another distribution than the one that is trained.

A sampler with other kernels, another precision or rounded weights draws from q, the trainer computes p. Without a
correction the policy gradient is an expectation under q. With p / q as a weight it is one under p again; a cap on the
weight trades a little of that for less variance.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.objectives.choices import SAMPLING_CORRECTIONS, SamplingCorrection
from rlhf.objectives.masked import check_mask, zero_pads


class ImportanceWeights(NamedTuple):
    """Weights of tokens, 0 in padded slots, and whether the ratio of each exceeds the cap (bool); both (B, R)."""

    weights: Tensor
    over_cap: Tensor


def importance_weights(
    logp: Tensor, sampled_logp: Tensor, mask: Tensor, correction: SamplingCorrection, cap: float
) -> ImportanceWeights:
    """Return the weight p / q of each token's policy loss, truncated or masked above a cap.

    With d_t = logp_t - sampled_logp_t:
        token_truncate      min(exp(d_t), cap)
        token_mask          exp(d_t), 0 where it exceeds the cap
        sequence_truncate   min(exp(sum_t d_t), cap), for all tokens of a response
        sequence_mask       exp(sum_t d_t), 0 where it exceeds the cap: such a response teaches nothing (TRL's default)

    Source: TRL 1.16, `vllm_importance_sampling_mode`; truncated weights: Ionides, Truncated Importance Sampling (2008).
    Shapes: logp, sampled_logp, mask (B, R), nats; mask bool, True on real tokens. Raises ValueError when shapes differ
    or the correction is unknown or `none`.
    """
    check_mask(mask, logp=logp, sampled_logp=sampled_logp)
    if correction not in SAMPLING_CORRECTIONS or correction == "none":
        known = ", ".join(SAMPLING_CORRECTIONS[1:])
        raise ValueError(f"unknown correction {correction!r}: choose one of {known}")
    level, _, bound = correction.partition("_")
    difference = zero_pads(logp, mask) - zero_pads(sampled_logp, mask)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand_as(mask)
    ratio = difference.exp()
    over = ratio > cap
    bounded = ratio.clamp(max=cap) if bound == "truncate" else torch.where(over, 0.0, ratio)
    return ImportanceWeights(zero_pads(bounded, mask), over & mask)
