"""PPO's way from scores to advantages: shaped scores, the reward of each token, generalised advantage estimation."""

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
