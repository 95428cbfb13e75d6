"""Losses of PPO, of reward modelling, of DPO and of KTO; each is a mean to be minimised.

The PPO losses are means over real tokens: to split a minibatch, weight each part's loss by its share of the tokens. The
loss of rlhf/objectives/groups.py is a weighted sum instead, whose parts add up as they are.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.objectives.choices import DpoLoss
from rlhf.objectives.masked import at_least_float32, check_mask, masked_mean, zero_pads

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
    check_mask(mask, logp=logp, old_logp=old_logp, advantages=advantages)
    log_ratio = zero_pads(logp, mask) - zero_pads(old_logp, mask)
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


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: float | Tensor = 0.0, center_coef: float = 0.0
) -> Tensor:
    """Return the negative log-likelihood of the preferences under Bradley-Terry (arXiv 2203.02155, eq. 1).

    loss = mean(-log sigmoid(c - r - margin)) + center_coef * mean((c + r)^2)

    margin: how much better the chosen response is known to be (arXiv 2307.09288, eq. 2), one number or one per pair.
    center_coef keeps the scores, which preferences fix only up to a constant, near 0 (arXiv 2312.09244, eq. 2).

    Shapes: chosen, rejected (B,), and margin (B,) or 0-dim where it is a tensor; returns a 0-dim loss.
    Raises ValueError when shapes differ or the batch is empty.
    """
    pairs = {"chosen": chosen, "rejected": rejected}
    if isinstance(margin, Tensor) and margin.dim() > 0:
        pairs["margin"] = margin
    _check_batch(**pairs)
    c, r = at_least_float32(chosen), at_least_float32(rejected)
    return -F.logsigmoid(c - r - margin).mean() + center_coef * ((c + r) ** 2).mean()


def margin_ranking_loss(chosen: Tensor, rejected: Tensor, margin: float) -> Tensor:
    """Return the hinge loss mean(max(0, margin - (c - r))), as torch.nn.MarginRankingLoss with y = 1.

    Shapes: chosen, rejected (B,); returns a 0-dim loss. Raises ValueError when shapes differ or the batch is empty.
    """
    _check_batch(chosen=chosen, rejected=rejected)
    return F.relu(margin - (at_least_float32(chosen) - at_least_float32(rejected))).mean()


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    loss_type: DpoLoss = "sigmoid",
    label_smoothing: float = 0.0,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the loss of direct preference optimisation.

    It measures the loss on validation pairs; TRL's trainer, which trains, computes its own.

    With c = pi_c - ref_c and r = pi_r - ref_r, n the tokens of a response, e = label_smoothing:
        sigmoid       mean(-log sigmoid(beta (c - r)))                        (arXiv 2305.18290, eq. 7)
        the same, e   mean(((1 - e) l(c - r) - e l(r - c)) / (1 - 2 e)),   l(x) = -log sigmoid(beta x): unbiased where
                      a share e of the labels is flipped                      (2403.00409; TRL's `robust`)
        ipo           mean((c / n_c - r / n_r - 1 / (2 beta))^2)              (2310.12036, eq. 17, by token as in TRL)
        sigmoid_norm  mean(-log sigmoid(beta (c / n_c - r / n_r)))

    Shapes: all (B,), the log-probability of each whole response in nats, summed over its tokens; lengths: the tokens of
    chosen and rejected responses, each (B,). Returns a 0-dim loss. Raises ValueError when shapes differ or the batch is
    empty, and without lengths where the loss needs them.
    """
    _check_batch(
        policy_chosen=policy_chosen, policy_rejected=policy_rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected
    )
    chosen = at_least_float32(policy_chosen) - at_least_float32(ref_chosen)
    rejected = at_least_float32(policy_rejected) - at_least_float32(ref_rejected)
    if loss_type != "sigmoid":
        if lengths is None:
            raise ValueError(f"{loss_type} needs the lengths of the responses")
        _check_batch(policy_chosen=policy_chosen, chosen_lengths=lengths[0], rejected_lengths=lengths[1])
        chosen, rejected = chosen / lengths[0], rejected / lengths[1]
    if loss_type == "ipo":
        return ((chosen - rejected - 1 / (2 * beta)) ** 2).mean()
    loss = -F.logsigmoid(beta * (chosen - rejected))
    if label_smoothing:
        flipped = -F.logsigmoid(beta * (rejected - chosen))
        loss = ((1 - label_smoothing) * loss - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    return loss.mean()


def kto_loss(
    log_ratio: Tensor, mismatched: Tensor, good: Tensor, beta: float, good_weight: float = 1.0, bad_weight: float = 1.0
) -> Tensor:
    """Return the KTO loss of judged answers (arXiv 2402.01306, eq. 7 and 8), as TRL 1.16 computes it.

    z = max(0, mean(mismatched))
    loss = mean(w (1 - sigmoid(beta (log_ratio - z))) if good else w (1 - sigmoid(beta (z - log_ratio))))

    Shapes: all (B,). `log_ratio` is log π - log π_ref of each whole answer in nats, `mismatched` that of answers to
    other prompts, and `good` bool. Returns a 0-dim loss; z has no gradient. Raises ValueError when shapes differ or the
    batch is empty.
    """
    _check_batch(log_ratio=log_ratio, mismatched=mismatched, good=good)
    z = at_least_float32(mismatched).mean().detach().clamp(min=0)
    distance = at_least_float32(log_ratio) - z
    losses = torch.where(
        good, good_weight * torch.sigmoid(-beta * distance), bad_weight * torch.sigmoid(beta * distance)
    )
    return losses.mean()


def _check_batch(**tensors: Tensor) -> None:
    """Raise ValueError unless the named tensors share one shape and are not empty."""
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {shapes}")
    if any(x.numel() == 0 for x in tensors.values()):
        raise ValueError("the batch is empty")
