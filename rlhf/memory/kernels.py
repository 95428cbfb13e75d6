"""What CUDA kernels allocate inside themselves, where no dispatch mode can see it: operation -> bytes(args, kwargs).

Read in the sources named at each function; a measurement on a GPU may correct them, nothing else here is fitted.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

DEQUANTISED_ABOVE = 1536  # rows of the input from which gemm_4bit always unpacks the weight (bitsandbytes 0.50.2)


def _gemm_4bit(args: Any, kwargs: Any) -> int:
    """bitsandbytes/backends/cuda/ops.py: for many rows the weight is unpacked and multiplied by cuBLAS.

    For fewer it depends on the card and on the shape; half of the limit is taken, which errs on the large side.
    """
    rows, shape = args[0].numel() // args[0].shape[-1], args[2]
    if rows <= DEQUANTISED_ABOVE // 2:
        return 0
    absmax_8bit = kwargs.get("absmax_8bit")
    scales = 2 * 4 * absmax_8bit.numel() if absmax_8bit is not None else 0
    return shape[0] * shape[1] * args[0].element_size() + scales


def _flash_backward(args: Any, kwargs: Any) -> int:
    """csrc/flash_attn/flash_api.cpp, mha_bwd: softmax_d and dq_accum in float32, dk and dv of every query head."""
    q, k = args[1], args[2]
    batch, heads, length, size = q.shape
    rows, width = -(-length // 128) * 128, -(-size // 32) * 32
    extra = 2 * batch * k.shape[2] * heads * size * q.element_size() if k.shape[1] != heads else 0
    return batch * heads * rows * 4 + batch * rows * heads * width * 4 + extra


def _gemm_4bit_flops(args: Any, kwargs: Any) -> int:
    """Of the product."""
    return 2 * args[0].numel() * args[2][0]


Count = Callable[[Any, Any], int]
INSIDE: dict[Any, Count] = {torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward}
# What torch's own table of operations does not know.
FLOPS: dict[Any, Count] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: lambda args, kwargs: sdpa_flop_count(
        *(x.shape for x in args[:3])
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        lambda args, kwargs: sdpa_backward_flop_count(*(x.shape for x in args[:4]))
    ),
}
with contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401  # registers its operations

    INSIDE[torch.ops.bitsandbytes.gemm_4bit.default] = _gemm_4bit
    FLOPS[torch.ops.bitsandbytes.gemm_4bit.default] = _gemm_4bit_flops
