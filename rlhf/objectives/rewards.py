"""The reward PPO sees at each token."""

import torch
from torch import Tensor

from .masked import check, zero_pads


def shape_rewards(kl: Tensor, scores: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Per-token reward: r_t = -kl_coef * kl_t, plus the score at the last real token (arXiv 1909.08593, eq. 2).

    Shapes: kl, mask (B, T); scores (B,), one per response; mask bool, True on real tokens. Returns (B, T), 0 where
    mask is False. Raises ValueError when shapes differ or a row has no real token to carry its score.
    """
    check(mask, kl=kl)
    if scores.shape != mask.shape[:1] or mask.dim() != 2:
        raise ValueError(f"want scores (B,) and mask (B, T), got {tuple(scores.shape)} and {tuple(mask.shape)}")
    if not mask.any(dim=1).all():
        raise ValueError("a row has no real token to carry its score")
    slots = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, slots, -1).amax(dim=1, keepdim=True)
    return -kl_coef * zero_pads(kl, mask) + zero_pads(scores.unsqueeze(1), slots == last)
