"""Advantages within groups of responses to one prompt, and the policy losses of the critic-free methods.

RLOO (arXiv 2402.14740), GRPO (2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), GSPO (2507.18071), CISPO
(2506.13585), GMPO (2507.20673) and REINFORCE++ with a group baseline (2501.03262) differ in few choices: how rewards
become advantages, what the importance ratio is of, whether it is clipped or a constant, and how tokens are weighted.
Each choice is a function here.

A loss here is a weighted sum over tokens, and the weights hold the denominator. Its statistics are plain sums. So the
losses and statistics of a minibatch's parts add up to those of the whole. PPO's losses (losses.py) are means.

Shapes: P prompts, k responses to each, B = P * k rows that stand together by prompt, R response slots.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.objectives.choices import LEVELS, LOSS_TYPES, SCALES, Advantage, Level, LossType, Scale
from rlhf.objectives.losses import clipped_surrogate
from rlhf.objectives.masked import at_least_float32, check_mask, masked_mean, zero_pads

EPS = (
    1e-4  # added to a standard deviation before dividing by it, as TRL does; `masked.whiten` adds 1e-8 to the variance
)


def compared_in_groups(kind: Advantage, rewards: Tensor, judged: Tensor) -> Tensor:
    """Return the advantages of responses whose rewards are compared in their groups.

        leave_one_out        the function of this name (RLOO)
        group, batch, none   `group_relative` with this scale (GRPO and its kin)

    Shapes: rewards, judged (P, k); judged bool, False for responses without a verdict. Returns (P, k) float32 or wider.
    Raises ValueError unless k is 2 or more, or when kind is unknown.
    """
    if kind == "leave_one_out":
        return leave_one_out(rewards, judged)
    return group_relative(rewards, kind, judged)


def leave_one_out(rewards: Tensor, judged: Tensor | None = None) -> Tensor:
    """Subtract from each reward the mean of the other rewards of its group (RLOO, arXiv 2402.14740, section 3.2).

    A_i = r_i - sum_{j != i} r_j / (k - 1) = k / (k - 1) (r_i - mean(r))

    judged: False for responses without a verdict: they get 0, their rewards do not count, and k is that of the others.

    Shapes: rewards, judged (P, k); returns (P, k) float32 or wider; a group of equal rewards gets 0. Raises ValueError
    unless k is 2 or more.
    """
    judged = _all_judged(rewards) if judged is None else judged
    r = zero_pads(rewards, judged)
    others = (judged.sum(1, keepdim=True) - 1).clamp(min=1)
    return _zero_without_signal(r - (r.sum(1, keepdim=True) - r) / others, rewards, judged)


def group_relative(rewards: Tensor, scale: Scale = "group", judged: Tensor | None = None) -> Tensor:
    """Subtract the mean of its group from each reward, and divide by a standard deviation.

    A_i = (r_i - mean(r)) / (sd + 1e-4)

    scale: `group`, sd over the group (GRPO, arXiv 2402.03300, section 4.1.2); `batch`, sd over all rewards
    (2508.08221); `none`, no division (Dr. GRPO, 2503.20783, section 3). Standard deviations are unbiased.
    judged: False for responses without a verdict, which get 0 and are in no mean and no standard deviation.

    Shapes: rewards, judged (P, k); returns (P, k) float32 or wider; a group of equal rewards gets 0.
    Raises ValueError unless k is 2 or more, or when scale is unknown.
    """
    judged = _all_judged(rewards) if judged is None else judged
    centered = _zero_without_signal(
        at_least_float32(rewards) - masked_mean(rewards, judged, dim=1).unsqueeze(1), rewards, judged
    )
    if scale == "none":
        return centered
    if scale == "group":
        return centered / (group_sd(rewards, judged).unsqueeze(1) + EPS)
    if scale == "batch":
        return centered / (group_sd(rewards.view(1, -1), judged.view(1, -1)) + EPS)
    raise ValueError(f"unknown scale {scale!r}: choose one of {', '.join(SCALES)}")


def group_sd(rewards: Tensor, judged: Tensor) -> Tensor:
    """Return the unbiased standard deviation (P,) of the judged rewards (P, k) of each group; 0 for fewer than two.

    Where all are judged it is torch's, to the bit: the others stand at the mean, and the last factor is 1.
    """
    mean = masked_mean(rewards, judged, dim=1).unsqueeze(1)
    filled = torch.where(judged, at_least_float32(rewards), mean)
    counts = judged.sum(1)
    factor = ((rewards.shape[1] - 1) / (counts - 1).clamp(min=1).to(filled.dtype)).sqrt()
    return torch.where(counts > 1, filled.std(1) * factor, 0.0)


def standardize(advantages: Tensor, compared: Tensor | None = None) -> Tensor:
    """Give the advantages of a batch mean 0 and standard deviation 1: (A - mean(A)) / (sd(A) + 1e-4).

    After `group_relative(rewards, "none")` this is REINFORCE++ with a group baseline (arXiv 2501.03262, section 3.3).
    compared: False for advantages that do not count and stay 0.
    Shapes: any with two numbers or more; returns that shape. The standard deviation is unbiased.
    """
    compared = torch.ones_like(advantages, dtype=torch.bool) if compared is None else compared
    sd = group_sd(advantages.reshape(1, -1), compared.reshape(1, -1))
    return zero_pads((at_least_float32(advantages) - masked_mean(advantages, compared)) / (sd + EPS), compared)


def has_signal(rewards: Tensor, judged: Tensor | None = None) -> Tensor:
    """Return (P,) bool: whether the judged rewards (P, k) of a group differ, so that the policy can learn from it.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) replaces the other groups.
    """
    return ~_all_equal(rewards, _all_judged(rewards) if judged is None else judged)


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
    of a row hold the same number. Raises ValueError when shapes differ or level is unknown.
    """
    check_mask(mask, log_ratio=log_ratio)
    d = zero_pads(log_ratio, mask)
    if level == "token":
        return d
    if level == "sequence":
        return zero_pads(masked_mean(d, mask, dim=1).unsqueeze(1).expand_as(d), mask)
    if level == "sequence_sum":
        return zero_pads(d.sum(1, keepdim=True).expand_as(d), mask)
    raise ValueError(f"unknown level {level!r}: choose one of {', '.join(LEVELS)}")


def token_weights(mask: Tensor, loss_type: LossType, responses: int, tokens: Tensor | int, max_length: int) -> Tensor:
    """Return the weight of each token in the loss of a minibatch; a loss is the weighted sum of its tokens' losses.

        grpo      1 / (responses * tokens of its response): the mean of the responses' means (arXiv 2402.03300, eq. 3)
        dapo      1 / tokens: the mean over all tokens (2503.14476, eq. 8)
        cispo     as dapo (2506.13585, section 3.1)
        gmpo      as grpo: all tokens of a response have one ratio (2507.20673, eq. 4)
        dr_grpo   1 / (responses * max_length): no response counts less for being long (2503.20783, section 3.1)

    `responses` and `tokens` count those of the whole minibatch, of which the rows of `mask` may be a part: the weighted
    sums of its parts add up to that of the whole.

    Shapes: mask (B, R) bool, True on tokens that count; returns (B, R) float32, 0 where mask is False.
    Raises ValueError when loss_type is unknown.
    """
    check_mask(mask)
    if loss_type in ("grpo", "gmpo"):
        each = 1 / (responses * mask.sum(1, keepdim=True).clamp(min=1))
    elif loss_type in ("dapo", "cispo"):
        each = 1 / torch.as_tensor(tokens, device=mask.device).clamp(min=1)
    elif loss_type == "dr_grpo":
        each = torch.tensor(1 / (responses * max_length), device=mask.device)
    else:
        raise ValueError(f"unknown loss type {loss_type!r}: choose one of {', '.join(LOSS_TYPES)}")
    return zero_pads(each.expand(mask.shape), mask)


class ClipSums(NamedTuple):
    """Detached 0-dim sums over real tokens."""

    clipped: Tensor  # tokens whose clipped term is the smaller, so that they give no gradient; in CISPO those capped
    ratio: Tensor


def policy_loss(
    loss_type: LossType,
    logp: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    low: float,
    high: float,
) -> tuple[Tensor, ClipSums]:
    """Return the loss that a loss type stands for.

        cispo   `cispo_loss`, where `high` is the cap
        gmpo    `geometric_loss`, where `log_ratio` is the tokens' own
        others  `clipped_loss`

    Shapes: logp, log_ratio, weights, mask (B, R); advantages (B,), one per response. `weights` are `token_weights` of
    this type. Returns a 0-dim loss and sums over real tokens. Raises ValueError when shapes differ.
    """
    if loss_type == "cispo":
        return cispo_loss(logp, log_ratio, advantages, weights, mask, high)
    if loss_type == "gmpo":
        return geometric_loss(log_ratio, advantages, weights, mask, low, high)
    return clipped_loss(log_ratio, advantages, weights, mask, low, high)


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, low: float, high: float
) -> tuple[Tensor, ClipSums]:
    """Return the clipped surrogate objective, negated, with a weight for each token (arXiv 1707.06347, eq. 7).

    loss = -sum_t w_t min(ratio_t A, clamp(ratio_t, 1 - low, 1 + high) A),   ratio = exp(log_ratio)

    high above low is DAPO's "clip-higher" (2503.14476, section 3.1).

    Shapes: log_ratio, weights, mask (B, R); advantages (B,), one per response; mask bool, True on real tokens. Returns
    a 0-dim loss. Raises ValueError when shapes differ.
    """
    check_mask(mask, log_ratio=log_ratio, weights=weights)
    _check_advantages(advantages, mask)
    d = zero_pads(log_ratio, mask)
    objective, is_clipped = clipped_surrogate(d, at_least_float32(advantages).unsqueeze(1), low, high)
    loss = -(zero_pads(weights, mask) * objective).sum()
    return loss, ClipSums(clipped=(is_clipped & mask).sum(), ratio=zero_pads(d.detach().exp(), mask).sum())


def cispo_loss(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, cap: float
) -> tuple[Tensor, ClipSums]:
    """Return CISPO's loss: REINFORCE with a truncated ratio as a constant (arXiv 2506.13585, section 3.1).

    loss = -sum_t w_t min(ratio_t, cap) A log pi_t,   ratio = exp(log_ratio), without a gradient

    Unlike in `clipped_loss`, every token has a gradient. `clipped` counts the tokens whose ratio exceeds the cap.

    Shapes: logp, log_ratio, weights, mask (B, R); advantages (B,), one per response; mask bool, True on real tokens.
    Returns a 0-dim loss. Raises ValueError when shapes differ.
    """
    check_mask(mask, logp=logp, log_ratio=log_ratio, weights=weights)
    _check_advantages(advantages, mask)
    ratio = zero_pads(log_ratio.detach(), mask).exp()
    gain = ratio.clamp(max=cap) * at_least_float32(advantages).unsqueeze(1) * zero_pads(logp, mask)
    loss = -(zero_pads(weights, mask) * gain).sum()
    return loss, ClipSums(clipped=((ratio > cap) & mask).sum(), ratio=zero_pads(ratio, mask).sum())


def geometric_loss(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, low: float, high: float
) -> tuple[Tensor, ClipSums]:
    """Return GMPO's loss, with the geometric mean of a response's clipped ratios (arXiv 2507.20673, eq. 4).

    loss = -sum_t w_t exp(mean_t c_t) A,   c_t = min(d_t, high) where A > 0, max(d_t, -low) elsewhere

    d = `log_ratio`; `low` and `high` limit logarithms here, so that a ratio is limited to exp(-low) and exp(high). The
    paper takes 0.4 for both.

    Shapes: log_ratio, weights, mask (B, R); advantages (B,), one per response; mask bool, True on real tokens. Returns
    a 0-dim loss; `clipped` counts the tokens that are at their limit. Raises ValueError when shapes differ.
    """
    check_mask(mask, log_ratio=log_ratio, weights=weights)
    _check_advantages(advantages, mask)
    d, gain = zero_pads(log_ratio, mask), at_least_float32(advantages).unsqueeze(1)
    limited = torch.where(gain > 0, d.clamp(max=high), d.clamp(min=-low))
    ratio = pool_log_ratios(limited, mask, "sequence").exp()
    loss = -(zero_pads(weights, mask) * ratio * gain).sum()
    return loss, ClipSums(clipped=(limited != d).sum(), ratio=zero_pads(d.detach().exp(), mask).sum())


def _check_advantages(advantages: Tensor, mask: Tensor) -> None:
    """Raise ValueError unless there is one advantage for each row."""
    if advantages.shape != mask.shape[:1]:
        raise ValueError(f"want one advantage per row of mask {tuple(mask.shape)}, got {tuple(advantages.shape)}")


def _zero_without_signal(advantages: Tensor, rewards: Tensor, judged: Tensor) -> Tensor:
    """Return advantages (P, k) with 0 for a group of equal rewards, whose mean may be rounded: 8 times 0.1.

    Responses without a verdict get 0 too.
    """
    return zero_pads(advantages, judged & ~_all_equal(rewards, judged).unsqueeze(1))


def _all_equal(rewards: Tensor, judged: Tensor) -> Tensor:
    """Return (P,) bool: whether the judged rewards (P, k) of a group are equal. NaN equals nothing and is seen."""
    highest, lowest = (torch.where(judged, rewards, end) for end in (-math.inf, math.inf))
    return (highest.amax(1) == lowest.amin(1)) | ~judged.any(1)


def _all_judged(rewards: Tensor) -> Tensor:
    """Return the mask (P, k) of rewards that all count. Raises ValueError unless k is 2 or more."""
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"want rewards (P, k) with k of 2 or more, got {tuple(rewards.shape)}")
    return torch.ones_like(rewards, dtype=torch.bool)
