"""The attention kernels that torch chooses on a device, as operations on `meta` tensors."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def attention(stands_for: str) -> Callable[..., Tensor]:
    """The kernels that torch chooses on the device; on `meta` it would compute attention in plain steps."""
    kernel = _attention_on_cuda if stands_for == "cuda" else _attention_on_cpu

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return kernel(q, k, v, attn_mask, dropout_p, is_causal, scale)

    return attend


def _attention_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Flash attention where it can be, else the memory-efficient kernel, whose bias is aligned to 16 elements."""
    if mask is None and q.dtype in HALF:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    bias = None
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=q.dtype) if mask.dtype == torch.bool else mask
        short = -bias.shape[-1] % 16
        if short:
            bias = F.pad(bias, (0, short))[..., : bias.shape[-1]]
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    needs_lse = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, needs_lse, dropout, causal, scale=scale)[0]


def _attention_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, dropout, causal, attn_mask=mask, scale=scale)[0]
