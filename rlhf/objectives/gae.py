"""Advantages and value targets from per-token rewards."""

import torch
from torch import Tensor

from rlhf.objectives.masked import check_mask, zero_pads


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns by generalised advantage estimation (arXiv 1506.02438, eq. 16).

    A_t = delta_t + gamma lam A_{t+1},   delta_t = r_t + gamma V_{t+1} - V_t,   V = 0 after the last real token.
    The returns are A_t + V_t, the targets of the value function.

    Shapes: rewards, values, mask (B, R); slot t is the t-th generated token; mask bool, True on real tokens,
    a prefix of each row (a row without any is allowed). Returns advantages, returns (B, R), both 0 where mask is
    False; not whitened. Raises ValueError when shapes differ or a row's real tokens are not a prefix.
    """
    check_mask(mask, rewards=rewards, values=values)
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("the real tokens of each row must be a prefix of it")
    r, v = zero_pads(rewards, mask), zero_pads(values, mask)
    advantages = torch.zeros_like(v + r)  # of the wider of the two types
    next_value = next_advantage = advantages.new_zeros(len(advantages))
    for t in reversed(range(mask.shape[1])):
        delta = r[:, t] + gamma * next_value - v[:, t]  # 0 in padded slots, where r = v = 0
        next_advantage = delta + gamma * lam * next_advantage
        next_value = v[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + v
