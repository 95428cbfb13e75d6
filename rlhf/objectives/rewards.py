"""From the reward model's scores to shaped scores, and from those to PPO's reward of each token."""

import torch
from torch import Tensor

from rlhf.objectives.masked import at_least_float32, check_mask, zero_pads


def shape_scores(scores: Tensor, *, mean: float = 0.0, sd: float = 1.0, sigmoid: bool = False) -> Tensor:
    """Return the reward model's scores as they enter a sum of rewards, before penalties.

    shaped = (score - mean) / sd;   then with sigmoid: 1 / (1 + exp(-shaped))

    Shapes: scores of any shape; returns that shape, float32 or wider.
    """
    shaped = (at_least_float32(scores) - mean) / sd
    return shaped.sigmoid() if sigmoid else shaped


def shape_rewards(kl: Tensor, shaped_scores: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return the reward of each token: r_t = -kl_coef * kl_t, plus the shaped score at the last real token.

    Source: arXiv 1909.08593, eq. 2.

    Shapes: kl, mask (B, R); shaped_scores (B,), one per response; mask bool, True on real tokens. Returns (B, R), 0
    where mask is False. Raises ValueError when shapes differ or a row has no real token to carry its score.
    """
    check_mask(mask, kl=kl)
    if not mask.any(dim=1).all():
        raise ValueError("a row has no real token to carry its score")
    check_mask(mask[:, 0], shaped_scores=shaped_scores)
    slots = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, slots, -1).amax(dim=1, keepdim=True)
    return -kl_coef * zero_pads(kl, mask) + zero_pads(shaped_scores.unsqueeze(1), slots == last)
