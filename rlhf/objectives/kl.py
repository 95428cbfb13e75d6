"""Estimates of the divergence from the reference policy, per token."""

from torch import Tensor

from rlhf.objectives.choices import KlEstimator
from rlhf.objectives.masked import at_least_float32


def estimate_kl(logp: Tensor, ref_logp: Tensor, kind: KlEstimator) -> Tensor:
    """Estimate KL(pi || ref) at each token sampled from pi.

    Source: Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html.

    With d = ref_logp - logp:
        k1 = -d                 unbiased; negative at single tokens, high variance
        k2 = d^2 / 2            biased, but little while the policies are close; never negative
        k3 = exp(d) - 1 - d     unbiased; never negative; unbounded where ref puts far more mass than pi

    Shapes: logp, ref_logp equal; returns that shape, elementwise. There is no mask: the content of a padded slot stays
    there, for the caller's masked mean to drop. Zero the pads of both inputs before differentiating.

    All kinds estimate the value, for a penalty or a metric. As a loss on the policy's own samples they differ in the
    expected gradient:
        k1    zero
        k2    that of a token's KL given its prefix
        k3    that of the other direction, KL(ref || pi)

    Raises ValueError when shapes differ.
    """
    if logp.shape != ref_logp.shape:
        raise ValueError(f"logp has shape {tuple(logp.shape)}, ref_logp has {tuple(ref_logp.shape)}")
    d = at_least_float32(ref_logp) - at_least_float32(logp)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d**2 / 2
    return d.expm1() - d  # exp(d) - 1 would round to 0 for the small d of a young policy


def adapt(coef: float, measured: float, target: float) -> float:
    """Return the next KL coefficient of a controller that steers the divergence to a target.

    e = clip((measured - target) / target, -0.2, 0.2);   coef <- coef (1 + 0.1 e)   (arXiv 1909.08593, section 2.2)

    measured, target: the divergence in one unit, here nats per token; target above 0.
    """
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coef * (1 + 0.1 * error)
