"""What CUDA kernels allocate inside themselves, where no dispatch mode can see it: operation -> bytes(args, kwargs).

The bytes are derived from the sources named at each function; nothing here was measured or fitted.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from peakmem.cards import Gpu
from peakmem.patches import bitsandbytes
from peakmem.tensors import Args, Blocks, Kwargs, Op

Shape = Sequence[int]
aten = torch.ops.aten
# Flash attention to sequences of different lengths, and torch.nn.attention.varlen around it. Both have the arguments
# that are read here in the same places.
VARIABLE_LENGTHS = ("aten::_flash_attention_forward", "torch_attn::_varlen_attn")
OF_VARIABLE_LENGTHS = "aten::_flash_attention_backward"  # the gradient of both


def inside(gpu: Gpu) -> dict[str, Blocks]:
    """Return what each operation, by its name, allocates inside its kernels on a card: bytes of its blocks."""
    return {
        "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
        "aten::_scaled_dot_product_efficient_attention_backward": functools.partial(_efficient_backward, gpu),
        "aten::_softmax_backward_data": _softmax_backward,
        "aten::_safe_softmax": _safe_softmax,
        **dict.fromkeys(VARIABLE_LENGTHS, _variable_lengths),
        OF_VARIABLE_LENGTHS: _variable_lengths_backward,
        bitsandbytes.PRODUCT: functools.partial(bitsandbytes.inside, gpu),
    }


def multiplies(func: Op) -> bool:
    """Return whether an operation is a product, for which cuBLAS may take its workspace.

    Torch lists no product that is added in place, such as `addmm_`: it is one as the operation without underscore is.
    """
    name = func._schema.name
    plain = getattr(aten, name.removeprefix("aten::").removesuffix("_"), None)
    attention = "_scaled_dot_product_" in name or name in (*VARIABLE_LENGTHS, OF_VARIABLE_LENGTHS)
    return attention or name == bitsandbytes.PRODUCT or func._overloadpacket in flop_registry or plain in flop_registry


FOLLOWED = {"aten", "prim", "prims", "profiler", "torch_attn", "bitsandbytes"}  # namespaces, whose kernels are known
LIBRARIES = {  # that take a workspace which is not known, by the beginnings of torch's names for what they do
    "cuDNN's workspace": ("convolution", "cudnn_", "_cudnn_"),
    "cuSOLVER's workspace": (
        "linalg_cholesky",
        "linalg_qr",
        "linalg_eig",
        "linalg_l",
        "linalg_inv",
        "_linalg_",
        "geqrf",
    ),
    "cuFFT's workspace": ("_fft_",),
    "what CUB sorts in": ("sort", "topk", "_unique", "unique"),
}


def uncounted(func: Op) -> str | None:
    """Return what an operation allocates inside its kernels that is not known; None where all is."""
    space, _, name = func._schema.name.partition("::")
    if space not in FOLLOWED:
        return f"what {func} allocates inside its kernels"
    return next((what for what, names in LIBRARIES.items() if space == "aten" and name.startswith(names)), None)


# -- attention -----------------------------------------------------------------------------------------------------


def _variable_lengths(args: Args, kwargs: Kwargs) -> int:
    """Return the bytes of grouped queries and of their results in another order, and of partial sums; at most.

    Source: flash_attn/flash_api.cpp, mha_varlen_fwd, which does so for one query a row. Keys are split into as many
    parts as fill the card, at most one for each block of them.
    """
    query, key, queries, longest = args[0], args[1], args[5], args[6]
    heads, size = query.shape[-2:]
    if heads == key.shape[-2] or queries > 1:
        return 0
    rows = query.numel() // (heads * size)
    width = -(-size // 32) * 32 if size <= 128 else -(-size // 64) * 64
    block = 256 if size <= 64 else 128 if size <= 128 else 64
    parts = -(-longest // block)
    size_of_sums: int = (parts > 1) * parts * rows * heads * (width + 1) * 4
    return size_of_sums + 2 * int(query.nbytes)


def _variable_lengths_backward(args: Args, kwargs: Kwargs) -> int:
    """Return the bytes of float32 softmax_d and dq_accum, and of dk and dv of every query head.

    Source: flash_attn/flash_api.cpp, mha_varlen_bwd. Queries have 128 places more for each sequence.
    """
    q, k, ends = args[1], args[2], args[6]
    heads, size = q.shape[-2:]
    rows, width = len(q) + 128 * (len(ends) - 1), -(-int(size) // 32) * 32
    copied: int = 2 * len(k) * heads * size * q.element_size() if k.shape[-2] != heads else 0
    return rows * int(heads) * (1 + width) * 4 + copied


def _softmax_backward(args: Args, kwargs: Kwargs) -> int:
    """Return the bytes of gradient times output, which is written out (SoftMax.cu, softmax_backward_cuda_out)."""
    size: int = args[0].nbytes
    return size


def _safe_softmax(args: Args, kwargs: Kwargs) -> tuple[int, int]:
    """Return the bytes of the softmax before its masked rows are set to zero, and of the mask that finds them.

    Source: aten/src/ATen/native/SoftMax.cpp, _safe_softmax. Attention in plain steps uses it. As one block, they would
    not fit where the softmax alone does.
    """
    return args[0].nbytes, args[0].numel()


def _flash_backward(args: Args, kwargs: Kwargs) -> int:
    """Return the bytes of float32 softmax_d and dq_accum, and of dk and dv of every query head.

    Source: csrc/flash_attn/flash_api.cpp, mha_bwd.
    """
    q: Tensor = args[1]
    k: Tensor = args[2]
    batch, heads, length, size = q.shape
    rows, width = -(-length // 128) * 128, -(-size // 32) * 32
    extra = 2 * batch * k.shape[2] * heads * size * q.element_size() if k.shape[1] != heads else 0
    return batch * heads * rows * 4 + batch * rows * heads * width * 4 + extra


class _Blocks(NamedTuple):
    """Tile of the memory-efficient kernel's backward pass."""

    queries: int
    keys: int
    in_registers: bool  # whether gradients of keys and values are added up in registers, and not in memory


def _blocks(gpu: Gpu, size: int) -> _Blocks:
    """Return the kernel for bfloat16 and a head size.

    From mem_eff_attention/kernels/cutlassB.h, dispatch_cutlassB_bf16_sm80: torch takes the first in the list whose
    shared memory the card has. That those of 128 x 128 fit in 227 KB (9.0) and not in 99 KB (8.6, 8.9) is inferred: 8.6
    and 8.9 have an entry of their own for size 96.
    """
    small_shared_memory = gpu.capability in ((8, 6), (8, 9))
    if size <= 64:
        return _Blocks(64, 64, in_registers=True)
    if small_shared_memory:
        return _Blocks(128, 64, in_registers=True) if size <= 96 else _Blocks(64, 64, in_registers=False)
    return _Blocks(128, 128, in_registers=True) if size <= 128 else _Blocks(128, 64, in_registers=False)


def _efficient_backward(gpu: Gpu, args: Args, kwargs: Kwargs) -> int:
    """Return the bytes of the memory-efficient kernel's float32 sums, and of one number per query.

    In float32 the gradients themselves are the sums (kNeedsAccumGradQ), and the number per query comes from a product
    of output and gradient that is written out (kKernelComputesDelta).

    kernel_backward.h, Params::workspace_size, and attention_backward.cu: `delta`; for each block of queries a tile of
    sums with a lock of 16 bytes; where keys' and values' gradients do not stay in registers, a tile of each for every
    part that the keys are split into, which are few or one.
    """
    qkv: tuple[Tensor, Tensor, Tensor] = args[1:4]
    q, k, v = qkv
    batch, heads, length, size = q.shape
    if q.dtype == torch.float32:
        return batch * heads * length * (v.shape[-1] + 1) * 4
    queries, keys, in_registers = _blocks(gpu, max(size, v.shape[-1]))
    tile = 16 + queries * keys * 4
    space = -(-length // queries) * -(-size // keys) * tile
    if not in_registers:
        parts = max(1, min(-(-k.shape[2] // keys), 200 // (batch * heads)))
        space += 2 * parts * keys * -(-size // queries) * queries * 4
    return batch * heads * (space + length * 4)
