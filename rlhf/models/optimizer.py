"""Optimizers by the names that transformers gives them."""

from collections.abc import Iterable
from typing import Any

import torch

from rlhf.run import RunError


def new_optimizer(name: str, groups: Iterable[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """AdamW from torch, or 8-bit and paged AdamW from bitsandbytes. Raises RunError when that is not installed."""
    if name == "adamw_torch":
        return torch.optim.AdamW(groups, **options)
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(groups, fused=True, **options)
    try:
        import bitsandbytes
    except ImportError:
        raise RunError(f"optim: {name} needs bitsandbytes: pip install '.[gpu]'") from None
    kinds = {
        "adamw_8bit": bitsandbytes.optim.AdamW8bit,
        "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
        "paged_adamw_32bit": bitsandbytes.optim.PagedAdamW32bit,
    }
    return kinds[name](groups, **options)
