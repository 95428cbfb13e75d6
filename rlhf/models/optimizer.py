"""Optimizers by the names that transformers gives them, and the paging of their states."""

from collections.abc import Iterable
from typing import Any

import torch

from rlhf.errors import UserError
from rlhf.packages import install_command
from rlhf.recipe.choices import Optimizer


def new_optimizer(name: Optimizer, groups: Iterable[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW from torch, or 8-bit or paged AdamW from bitsandbytes.

    Raises UserError when bitsandbytes is needed and not installed.
    """
    if name == "adamw_torch":
        return torch.optim.AdamW(groups, **options)
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(groups, fused=True, **options)
    try:
        import bitsandbytes
    except ImportError:
        raise UserError(f"optim: {name} needs bitsandbytes: {install_command('gpu')}") from None
    kinds = {
        "adamw_8bit": bitsandbytes.optim.AdamW8bit,
        "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
        "paged_adamw_32bit": bitsandbytes.optim.PagedAdamW32bit,
    }
    optimizer: torch.optim.Optimizer = kinds[name](groups, **options)
    return optimizer


def page_states(optimizer: Any) -> None:
    """Move large states of a paged optimizer back into paged memory. Call it after `load_state_dict`.

    bitsandbytes pages states only when it creates them; loaded ones are plain tensors on the GPU, so that a run that
    fitted the card might not fit after a resume. Does nothing for other optimizers, nor on a CPU, where bitsandbytes
    pages nothing. `optimizer` may be accelerate's wrapper.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not getattr(inner, "is_paged", False):
        return
    for parameter, state in inner.state.items():
        for name in ("state1", "state2"):
            value = state.get(name)
            if value is None or hasattr(value, "is_paged"):
                continue
            buffer = inner.get_state_buffer(parameter, dtype=value.dtype)  # paged if bitsandbytes finds it large enough
            if hasattr(buffer, "is_paged"):
                state[name] = buffer.copy_(value)
