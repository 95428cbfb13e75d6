"""Losses of PPO, to be minimised.

They are means over real tokens: to split a minibatch, weight each part's loss by its share of the tokens. The
loss of rlhf/objectives/groups.py is a weighted sum instead, whose parts add up as they are.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.objectives.importance import log_ratios
from rlhf.objectives.masked import check_mask, masked_mean, zero_pads

Stats = dict[str, Tensor]  # 0-dim tensors by the key under which they are logged


class Clipping(NamedTuple):
    """How an update relates to its clipping range: detached 0-dim means over real tokens."""

    clipfrac: Tensor  # share of tokens whose clipped term is the smaller, so that they give no gradient
    approxkl: Tensor  # mean((logp - old_logp)^2) / 2, the k2 estimate of how far this update has moved
    ratio: Tensor  # mean(ratio), 1 in expectation; infinite where the loss, which is bounded, is not


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return min(ratio A, clamp(ratio, 1 - low, 1 + high) A) of each token, and where the clipped term is the smaller.

    It is the objective of arXiv 1707.06347, eq. 7, with ratio = exp(log_ratio).
    Shapes: log_ratio (B, R), advantages (B, R) or (B, 1); returns (B, R).
    """
    # Beyond the clip range a ratio has no gradient where A >= 0; unbounded it would overflow to a gradient of 0 * inf.
    # With A < 0 nothing bounds it: an infinite gradient ends the stage.
    far = math.log1p(high) + 1
    ratio = torch.where(advantages >= 0, log_ratio.clamp(max=far), log_ratio).exp()
    free, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return torch.minimum(free, clipped), clipped < free


def ppo_policy_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, clip: float, weights: Tensor | None = None
) -> tuple[Tensor, Clipping]:
    """Return the clipped surrogate objective, negated (arXiv 1707.06347, eq. 7).

    loss = -mean(w min(ratio A, clamp(ratio, 1 - clip, 1 + clip) A)),   ratio = exp(logp - old_logp)

    weights: w, those of `importance.importance_weights`; None: 1.

    Shapes: logp, old_logp, advantages, mask, weights (B, R); mask bool, True on real tokens. Returns a 0-dim loss, 0
    without real tokens. Raises ValueError when shapes differ.
    """
    check_mask(mask, advantages=advantages)
    log_ratio = log_ratios(logp, old_logp, mask)
    objective, is_clipped = clipped_surrogate(log_ratio, zero_pads(advantages, mask), clip, clip)
    clipping = Clipping(
        clipfrac=masked_mean(is_clipped, mask),
        approxkl=masked_mean(log_ratio.detach() ** 2, mask) / 2,
        ratio=masked_mean(log_ratio.detach().exp(), mask),
    )
    if weights is not None:
        check_mask(mask, weights=weights)
        objective = objective * zero_pads(weights, mask)
    return -masked_mean(objective, mask), clipping


def ppo_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half the mean squared error of the critic, clipped around the values before the update.

    The critic cannot gain by moving further than `clip` from those.

    loss = mean(max((V_t - R_t)^2, (clamp(V_t, V_old - clip, V_old + clip) - R_t)^2)) / 2, with the returns R_t;
    clip None: mean((V_t - R_t)^2) / 2   (openai/baselines ppo2; kept in arXiv 1909.08593's code)

    Shapes: values, old_values, returns, mask (B, R); mask bool, True on real tokens. Returns a 0-dim loss, and the
    share of real tokens whose clipped error is the larger (they give no gradient); both 0 without real tokens.
    Raises ValueError when shapes differ.
    """
    check_mask(mask, values=values, old_values=old_values, returns=returns)
    v, old, r = (zero_pads(x, mask) for x in (values, old_values, returns))
    free = (v - r) ** 2
    clipped = free if clip is None else (v.clamp(old - clip, old + clip) - r) ** 2
    loss = masked_mean(torch.maximum(free, clipped), mask) / 2
    return loss, masked_mean(clipped > free, mask)
