"""Importance ratios of tokens and of responses, and weights for responses that another distribution was sampled from.

A sampler with other kernels, another precision or rounded weights draws from q, the trainer computes p. Without a
correction the policy gradient is an expectation under q. With p / q as a weight it is one under p again; a cap on the
weight trades a little of that for less variance.
"""

import torch
from torch import Tensor

from rlhf.objectives.choices import Level, SamplingCorrection
from rlhf.objectives.masked import check_mask, masked_mean, zero_pads


def log_ratios(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Return the logarithm of each token's importance ratio, logp - old_logp.

    Shapes: logp, old_logp, mask (B, R); mask bool, True on real tokens. Returns (B, R), 0 where mask is False. Raises
    ValueError when shapes differ.
    """
    check_mask(mask, logp=logp, old_logp=old_logp)
    return zero_pads(logp, mask) - zero_pads(old_logp, mask)


def pool_log_ratios(log_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return the logarithm of the importance ratio that each token's loss is multiplied with.

    With d = `log_ratio`, the tokens' own:
        token         d_t                    of each token (PPO, GRPO)
        sequence      mean_t d_t             of the response, to the power 1/length (GSPO, arXiv 2507.18071, eq. 7)
        sequence_sum  sum_t d_t              of the response (RLOO)

    Shapes: log_ratio, mask (B, R). Returns (B, R), 0 where mask is False; at the levels of a sequence all real tokens
    of a row hold the same number. Raises ValueError when shapes differ.
    """
    check_mask(mask, log_ratio=log_ratio)
    d = zero_pads(log_ratio, mask)
    if level == "token":
        return d
    of_response = masked_mean(d, mask, dim=1).unsqueeze(1) if level == "sequence" else d.sum(1, keepdim=True)
    return zero_pads(of_response.expand_as(d), mask)


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
