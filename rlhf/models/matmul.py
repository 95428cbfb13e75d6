"""Products of matrices: by the faster library for float32 on a CPU, and without a rounding in between on CUDA.

torch multiplies float32 matrices with MKL, which uses AVX2 on AMD's processors. oneDNN, which torch is built with as
well, uses AVX-512 there. Measured on an AMD EPYC, one thread, GFLOP/s: 87 and 221 for 2048 x 2048 x 2048, 91 and 217
for 1024 rows of a layer of 256 x 1280, 88 and 143 for 32 rows of one of 256 x 768. torch itself calls oneDNN for
float32 in compiled models with frozen weights only; the operation that those use is called here.
"""

import torch
from torch import Tensor

FLOAT32_OF_HALVES_BY_DEVICE = {"cpu": False, "cuda": True}  # whether torch.mm has `out_dtype`
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def matmul(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x y (N, M) of x (N, K) and y (K, M), in `out` if it is given.

    Raises ValueError where autograd would need the product's gradient, which oneDNN's operation does not have.
    """
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        raise ValueError("matmul has no gradient: use it under torch.no_grad() or in an autograd function")
    if not (ONEDNN and _suits(x) and _suits(y)):
        return torch.mm(x, y) if out is None else torch.mm(x, y, out=out)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, y.t(), None, "none", [], "")
    return product if out is None else out.copy_(product)


def scaled_matmul(x: Tensor, y: Tensor, scaling: float, out: Tensor | None = None) -> Tensor:
    """Return scaling x y (N, M) of x (N, K) and y (K, M), in `out` if it is given: one kernel, one rounding."""
    out = x.new_empty(len(x), y.shape[1]) if out is None else out
    return out.addmm_(x, y, beta=0, alpha=scaling)  # with beta = 0 nothing is read of `out`


def matmul_to(dtype: torch.dtype, x: Tensor, y: Tensor) -> Tensor:
    """Return x y (N, M) of x (N, K) and y (K, M) as `dtype`.

    On CUDA 16-bit matrices have float32 sums, which leave the product as they are if `dtype` is float32. Elsewhere they
    are rounded to 16 bits first.
    """
    if dtype == torch.float32 != x.dtype and FLOAT32_OF_HALVES_BY_DEVICE[x.device.type]:
        return torch.mm(x, y, out_dtype=dtype)
    return torch.mm(x, y).to(dtype)


def wide_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return `matmul_to` in float32, or in float64 for such matrices."""
    return matmul_to(torch.promote_types(x.dtype, torch.float32), x, y)


def _suits(x: Tensor) -> bool:
    """Return whether oneDNN has a fast kernel for x: it takes 100 times as long for a part of a wider matrix."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and (x.is_contiguous() or x.t().is_contiguous())


def round_to_few_sizes(count: int) -> int:
    """Return `count` rounded up by at most 3, or by less than a sixteenth.

    oneDNN compiles code for every shape that it meets, in 0.3 ms, and keeps it: about 0.5 MB for each, with no end
    in sight after 3,400 shapes (torch 2.13; a smaller cache of primitives frees little of it).
    """
    grain = max(4, 1 << max(count.bit_length() - 5, 0))
    return -(-count // grain) * grain
