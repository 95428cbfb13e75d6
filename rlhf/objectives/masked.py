"""Statistics over the real tokens of a padded batch."""

import torch
from torch import Tensor

ROUNDING_STEPS = 64  # that sums of some hundred numbers may be off, as those of advantages


def at_least_float32(x: Tensor) -> Tensor:
    """Return x itself when it is float32 or float64, else x as float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def zero_pads(x: Tensor, mask: Tensor) -> Tensor:
    """Return x in float32 or wider, with 0 where mask is False.

    The mask selects and never multiplies: 0 * NaN is NaN, in the value and again in the gradient. Applied before any
    arithmetic, it gives padded slots a gradient of exactly 0.
    """
    return torch.where(mask, at_least_float32(x), 0.0)


def check_mask(mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless mask is bool and each named tensor has its shape (nothing is broadcast)."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, not {mask.dtype}")
    for name, x in tensors.items():
        if x.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, mask has {tuple(mask.shape)}")


def masked_mean(x: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the mean over real tokens: sum(x where mask) / count(mask), over all dimensions or over `dim`.

    Without real tokens the mean is 0. Shapes: x, mask equal; returns a 0-dim tensor, or x's shape without `dim`.
    """
    check_mask(mask, x=x)
    return zero_pads(x, mask).sum(dim) / mask.sum(dim).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance over all n real tokens: sum((x - mean)^2) / (n - 1), or / n when not unbiased.

    Shapes: x, mask equal; returns a 0-dim tensor, 0 for one real token or none.
    """
    mean = masked_mean(x, mask)
    squares = (zero_pads(x, mask) - mean) ** 2
    if not unbiased:
        return masked_mean(squares, mask)
    n = mask.sum()
    return masked_mean(squares, mask) * n / (n - 1).clamp(min=1)


def whiten(x: Tensor, mask: Tensor, size: Tensor | None = None) -> Tensor:
    """Rescale the real tokens to mean 0 and standard deviation 1: (x - mean) / sqrt(var + 1e-8), var unbiased.

    Input whose own deviation is near 1e-4 or below ends with less than 1. `groups.standardize` has TRL's 1e-4 instead.
    What differs by rounding is equal, and all of it gets 0: a deviation of at most ROUNDING_STEPS steps between
    neighbouring numbers of magnitude |mean| + size. size: that of the numbers whose difference x is.

    Shapes: x, mask equal, size 0-dim; returns the shape of x, 0 where mask is False.
    """
    mean, var = masked_mean(x, mask), masked_var(x, mask)
    rounding = ROUNDING_STEPS * torch.finfo(mean.dtype).eps * (mean.abs() if size is None else mean.abs() + size)
    scale = torch.where(var <= rounding**2, 0.0, torch.rsqrt(var + 1e-8))
    return zero_pads((zero_pads(x, mask) - mean) * scale, mask)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return the share of the returns' variance that the critic predicts: 1 - Var[R_t - V_t] / Var[R_t].

    Variances are over real tokens. 1 is a perfect critic (up to a constant), 0 no better than a constant, below 0
    worse; NaN when all R_t are equal, and without any.
    Shapes: values, returns, mask equal; returns a detached 0-dim tensor.
    """
    check_mask(mask, values=values, returns=returns)
    if not mask.any():
        return at_least_float32(returns).new_full((), torch.nan)
    v, r = zero_pads(values.detach(), mask), zero_pads(returns.detach(), mask)
    ev = 1 - masked_var(r - v, mask, unbiased=False) / masked_var(r, mask, unbiased=False)
    constant = r[mask].min() == r[mask].max()  # tested on the returns: the variance of equal numbers may round above 0
    return torch.where(constant, torch.nan, ev)
