"""Optimizers by the names that transformers gives them."""

from collections.abc import Iterable
from typing import Any

import torch

from rlhf.packages import install_command, require
from rlhf.recipe.choices import Optimizer


def new_optimizer(name: Optimizer, groups: Iterable[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW from torch, or 8-bit or paged AdamW from bitsandbytes.

    Raises UserError when bitsandbytes is needed and not installed.
    """
    if name == "adamw_torch":
        return torch.optim.AdamW(groups, **options)
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(groups, fused=True, **options)
    require(["bitsandbytes"], f"optim: {name}", install_command("gpu"))
    import bitsandbytes

    kinds = {
        "adamw_8bit": bitsandbytes.optim.AdamW8bit,
        "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
        "paged_adamw_32bit": bitsandbytes.optim.PagedAdamW32bit,
    }
    optimizer: torch.optim.Optimizer = kinds[name](groups, **options)
    return optimizer
