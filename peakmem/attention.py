"""The attention kernels that torch chooses on a device, as operations on `meta` tensors.

On CUDA by the rules of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash attention, else the memory-efficient
kernel, else plain steps. cuDNN's, which torch may prefer from an H100 on, is not followed: flash attention counts, and
a note says so.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from peakmem.cards import UNKNOWN, Device, Gpu

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
Backend = Literal["flash", "efficient", "math"]


CUDNN = "torch may prefer cuDNN's attention on this card; flash attention is counted in its place"


def attention(
    stands_for: Device, gpu: Gpu = UNKNOWN, assume: Callable[[str], None] = lambda _: None
) -> Callable[..., Tensor]:
    """Return the kernels that torch chooses on the device; on `meta` it would compute attention in plain steps.

    `assume` is told what is taken for true about them.
    """
    kernel = partial(_attention_on_cuda, gpu, assume) if stands_for == "cuda" else _attention_on_cpu

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Stand in for F.scaled_dot_product_attention."""
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return attend


def backend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, enable_gqa: bool, gpu: Gpu
) -> Backend:
    """Return the kernel that CUDA takes for queries, keys and values (rows, heads, tokens, size), cuDNN's being off.

    Each condition is one of the checks of use_flash_attention and use_mem_efficient_attention.
    """
    grouped = enable_gqa and q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1]
    like = len({x.dtype for x in (q, k, v)}) == 1 and len({x.shape[0] for x in (q, k, v)}) == 1
    dense = all(x.dim() == 4 and x.stride(-1) == 1 and x.shape[2] > 0 for x in (q, k, v))
    equal_heads = len({x.shape[1] for x in (q, k, v)}) == 1
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if not (like and dense):
        return "math"
    if (
        mask is None
        and q.dtype in HALF
        and gpu.capability >= (8, 0)
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and not (causal and q.shape[2] != k.shape[2])
        and (equal_heads or grouped)
        and not (needs_gradients and _no_flash_backward(q.shape[-1], dropout, gpu))
    ):
        return "flash"
    alignment = 8 if q.dtype in HALF else 4  # minimum_gemm_alignment, from compute capability 8.0 on
    whole = q.shape[-1] == k.shape[-1] and not (q.shape[-1] % alignment or v.shape[-1] % alignment)
    fitting_mask = mask is None or mask.dtype in (torch.bool, q.dtype)
    if equal_heads and whole and fitting_mask and q.dtype in (*HALF, torch.float32):
        return "efficient"
    return "math"


def _no_flash_backward(size: int, dropout: float, gpu: Gpu) -> bool:
    """Return whether a head is too large for flash attention's backward pass on 8.6, 8.9 and 12.x."""
    return (gpu.capability in ((8, 6), (8, 9)) or gpu.capability[0] == 12) and (
        192 < size <= 224 or (size > 224 and dropout > 0)
    )


def _attention_on_cuda(
    gpu: Gpu,
    assume: Callable[[str], None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return attention by the kernel that torch chooses; the memory-efficient one needs a bias aligned to 16."""
    chosen = backend(q, k, v, mask, dropout, causal, enable_gqa, gpu)
    if chosen == "flash":
        if gpu.capability[0] in (9, 10):
            assume(CUDNN)
        return cast(Tensor, aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0])
    if chosen == "math":
        options = {"scale": scale, "enable_gqa": enable_gqa}
        out = aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, None, **options)
        return cast(Tensor, out[0])
    bias = None
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=q.dtype) if mask.dtype == torch.bool else mask
        short = -bias.shape[-1] % 16
        if short:
            bias = F.pad(bias, (0, short))[..., : bias.shape[-1]]
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    needs_lse = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    out = aten._scaled_dot_product_efficient_attention(q, k, v, bias, needs_lse, dropout, causal, scale=scale)
    return cast(Tensor, out[0])


def _attention_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return cast(Tensor, kernel(q, k, v, dropout, causal, attn_mask=mask, scale=scale)[0])
