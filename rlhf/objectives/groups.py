"""Advantages within groups of responses to one prompt, and the policy losses of the critic-free methods.

RLOO (arXiv 2402.14740), GRPO (2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), GSPO (2507.18071), CISPO
(2506.13585), GMPO (2507.20673) and REINFORCE++ with a group baseline (2501.03262) differ in few choices: how rewards
become advantages (`ADVANTAGES`), what the importance ratio is of (`importance.pool_log_ratios`), how tokens are
weighted (`token_weights`), and whether the ratio is clipped or a constant (`POLICY_LOSSES`).

A loss here is a weighted sum over tokens, and the weights hold the denominator. So the losses of a minibatch's parts
add up to that of the whole. PPO's losses (losses.py) are means.

Shapes: P prompts, k responses to each (2 or more), B = P * k rows that stand together by prompt, R response slots.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.objectives.choices import Advantage, LossType
from rlhf.objectives.importance import pool_log_ratios
from rlhf.objectives.losses import clipped_surrogate
from rlhf.objectives.masked import at_least_float32, check_mask, masked_mean, zero_pads

# Added to a standard deviation before dividing by it, as TRL does; `masked.whiten` adds 1e-8 to the variance.
EPS = 1e-4

# -- advantages --------------------------------------------------------------------------------------------------------
# Shapes: rewards, judged (P, k), judged bool: False for responses without a verdict, which get 0 and are in no mean and
# no standard deviation. Each returns (P, k) in float32 or wider; a group of equal rewards gets 0.


def leave_one_out(rewards: Tensor, judged: Tensor) -> Tensor:
    """Subtract from each reward the mean of the other rewards of its group (RLOO, arXiv 2402.14740, section 3.2).

    A_i = r_i - sum_{j != i} r_j / (k - 1) = k / (k - 1) (r_i - mean(r)),   k: the judged responses of the group
    """
    r = zero_pads(rewards, judged)
    others = (judged.sum(1, keepdim=True) - 1).clamp(min=1)
    return _zero_without_signal(r - (r.sum(1, keepdim=True) - r) / others, rewards, judged)


def centered(rewards: Tensor, judged: Tensor) -> Tensor:
    """Subtract from each reward the mean of its group: A_i = r_i - mean(r) (Dr. GRPO, arXiv 2503.20783, section 3)."""
    mean = masked_mean(rewards, judged, dim=1).unsqueeze(1)
    return _zero_without_signal(at_least_float32(rewards) - mean, rewards, judged)


def scaled_by_group(rewards: Tensor, judged: Tensor) -> Tensor:
    """Divide by the group's deviation: A_i = (r_i - mean(r)) / (sd + 1e-4) (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return centered(rewards, judged) / (group_sd(rewards, judged).unsqueeze(1) + EPS)


def scaled_by_batch(rewards: Tensor, judged: Tensor) -> Tensor:
    """Divide by the deviation of all rewards: A_i = (r_i - mean(r)) / (sd of the batch + 1e-4) (arXiv 2508.08221)."""
    return centered(rewards, judged) / (group_sd(rewards.view(1, -1), judged.view(1, -1)) + EPS)


ADVANTAGES: dict[Advantage, Callable[[Tensor, Tensor], Tensor]] = {
    "leave_one_out": leave_one_out,
    "group": scaled_by_group,
    "batch": scaled_by_batch,
    "none": centered,
}


def group_sd(rewards: Tensor, judged: Tensor) -> Tensor:
    """Return the unbiased standard deviation (P,) of the judged rewards (P, k) of each group; 0 for fewer than two.

    Where all are judged it is torch's, to the bit: the others stand at the mean, and the last factor is 1.
    """
    mean = masked_mean(rewards, judged, dim=1).unsqueeze(1)
    filled = torch.where(judged, at_least_float32(rewards), mean)
    counts = judged.sum(1)
    factor = ((rewards.shape[1] - 1) / (counts - 1).clamp(min=1).to(filled.dtype)).sqrt()
    return torch.where(counts > 1, filled.std(1) * factor, 0.0)


def standardize(advantages: Tensor, compared: Tensor) -> Tensor:
    """Give the advantages of a batch mean 0 and standard deviation 1: (A - mean(A)) / (sd(A) + 1e-4).

    After `centered` this is REINFORCE++ with a group baseline (arXiv 2501.03262, section 3.3).
    compared: bool, False for advantages that do not count and stay 0.
    Shapes: any with two numbers or more; returns that shape. The standard deviation is unbiased.
    """
    sd = group_sd(advantages.reshape(1, -1), compared.reshape(1, -1))
    return zero_pads((at_least_float32(advantages) - masked_mean(advantages, compared)) / (sd + EPS), compared)


def has_signal(rewards: Tensor, judged: Tensor) -> Tensor:
    """Return (P,) bool: whether the judged rewards (P, k) of a group differ, so that the policy can learn from it.

    NaN differs from everything and is seen. DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) replaces the other
    groups.
    """
    highest, lowest = (torch.where(judged, rewards, end) for end in (-math.inf, math.inf))
    return (highest.amax(1) != lowest.amin(1)) & judged.any(1)


def _zero_without_signal(advantages: Tensor, rewards: Tensor, judged: Tensor) -> Tensor:
    """Return advantages (P, k) with 0 for a group of equal rewards, whose mean may be rounded: 8 times 0.1.

    Responses without a verdict get 0 too.
    """
    return zero_pads(advantages, judged & has_signal(rewards, judged).unsqueeze(1))


# -- weights of tokens -------------------------------------------------------------------------------------------------


def token_weights(mask: Tensor, loss_type: LossType, responses: int, tokens: Tensor, max_length: int) -> Tensor:
    """Return the weight of each token in the loss of a minibatch; a loss is the weighted sum of its tokens' losses.

        grpo      1 / (responses * tokens of its response): the mean of the responses' means (arXiv 2402.03300, eq. 3)
        gmpo      as grpo: all tokens of a response have one ratio (2507.20673, eq. 4)
        dapo      1 / tokens: the mean over all tokens (2503.14476, eq. 8)
        cispo     as dapo (2506.13585, section 3.1)
        dr_grpo   1 / (responses * max_length): no response counts less for being long (2503.20783, section 3.1)

    `responses` and `tokens` (0-dim) count those of the whole minibatch, of which the rows of `mask` may be a part: the
    weighted sums of its parts add up to that of the whole.

    Shapes: mask (B, R) bool, True on tokens that count; returns (B, R) float32, 0 where mask is False.
    """
    check_mask(mask)
    if loss_type in ("grpo", "gmpo"):
        each = 1 / (responses * mask.sum(1, keepdim=True).clamp(min=1))
    elif loss_type in ("dapo", "cispo"):
        each = 1 / tokens.clamp(min=1)
    else:
        each = torch.tensor(1 / (responses * max_length), device=mask.device)
    return zero_pads(each.expand(mask.shape), mask)


# -- losses ------------------------------------------------------------------------------------------------------------


class LossTerms(NamedTuple):
    """What a policy loss is computed from: tensors (B, R) unless noted."""

    logp: Tensor  # log-probabilities under the policy, by which CISPO differentiates
    log_ratio: Tensor  # `pool_log_ratios`; for CISPO and GMPO the tokens' own
    advantages: Tensor  # (B,), one per response
    weights: Tensor  # `token_weights` of the loss type
    mask: Tensor  # bool, True on tokens that count
    low: float  # the clip range below
    high: float  # and above


def policy_loss(loss_type: LossType, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Return the 0-dim loss of a loss type, and which tokens (B, R) are clipped: they give no gradient.

    In CISPO these are the tokens whose ratio is capped. Raises ValueError when shapes differ.
    """
    mask = terms.mask
    check_mask(mask, logp=terms.logp, log_ratio=terms.log_ratio, weights=terms.weights)
    check_mask(mask[:, 0], advantages=terms.advantages)
    logp, log_ratio, weights = (zero_pads(x, mask) for x in (terms.logp, terms.log_ratio, terms.weights))
    advantages = at_least_float32(terms.advantages)
    padless = terms._replace(logp=logp, log_ratio=log_ratio, weights=weights, advantages=advantages)
    loss, clipped = POLICY_LOSSES[loss_type](padless)
    return loss, clipped & mask


# Each returns its loss, and which tokens (B, R) are clipped, of which padded ones do not count.


def clipped_loss(terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate objective, negated, with a weight for each token (arXiv 1707.06347, eq. 7).

    loss = -sum_t w_t min(ratio_t A, clamp(ratio_t, 1 - low, 1 + high) A),   ratio = exp(log_ratio)

    high above low is DAPO's "clip-higher" (2503.14476, section 3.1).
    """
    gains = terms.advantages.unsqueeze(1)
    objective, is_clipped = clipped_surrogate(terms.log_ratio, gains, terms.low, terms.high)
    return -(terms.weights * objective).sum(), is_clipped


def cispo_loss(terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Return CISPO's loss: REINFORCE with a truncated ratio as a constant (arXiv 2506.13585, section 3.1).

    loss = -sum_t w_t min(ratio_t, high) A log pi_t,   ratio = exp(log_ratio), without a gradient

    Unlike in `clipped_loss`, every token has a gradient. Those are clipped whose ratio exceeds `high`, which is the
    largest ratio itself here.
    """
    ratio = terms.log_ratio.detach().exp()
    gain = ratio.clamp(max=terms.high) * terms.advantages.unsqueeze(1) * terms.logp
    return -(terms.weights * gain).sum(), ratio > terms.high


def geometric_loss(terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Return GMPO's loss, with the geometric mean of a response's clipped ratios (arXiv 2507.20673, eq. 4).

    loss = -sum_t w_t exp(mean_t c_t) A,   c_t = min(d_t, high) where A > 0, max(d_t, -low) elsewhere

    d = `log_ratio`; `low` and `high` limit logarithms here, so that a ratio is limited to exp(-low) and exp(high). The
    paper takes 0.4 for both. Tokens at their limit are clipped.
    """
    d, gain = terms.log_ratio, terms.advantages.unsqueeze(1)
    limited = torch.where(gain > 0, d.clamp(max=terms.high), d.clamp(min=-terms.low))
    ratio = pool_log_ratios(limited, terms.mask, "sequence").exp()
    return -(terms.weights * ratio * gain).sum(), limited != d


POLICY_LOSSES: dict[LossType, Callable[[LossTerms], tuple[Tensor, Tensor]]] = {
    "grpo": clipped_loss,
    "dapo": clipped_loss,
    "dr_grpo": clipped_loss,
    "cispo": cispo_loss,
    "gmpo": geometric_loss,
}
