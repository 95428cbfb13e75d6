"""bitsandbytes: 4-bit products and the memory inside them, and optimizer states in unified memory.

Nothing is imported before a function here is called.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn

from peakmem.cards import Gpu
from peakmem.events import PAGED
from peakmem.tensors import META, Args, Kwargs

if TYPE_CHECKING:
    from peakmem.device import StandIn

PRODUCT = "bitsandbytes::gemm_4bit"
FUNCTIONS = "bitsandbytes.functional"
ABSMAX_8BIT = 7  # place of this argument of gemm_4bit


def replacements(stand_in: "StandIn") -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield symbols, and what stands in the place of each.

    Paged optimizer states are in unified memory, not torch's allocator; on a CPU they are plain tensors.
    """

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        with torch._C.DisableTorchFunction():  # on the stand-in, whatever a program may call it
            out = torch.empty(*shape, dtype=dtype, device=META)
        if stand_in.stands_for == "cuda":
            stand_in.label(out, PAGED)
        return out

    # The library keeps the code book of its scales, made on the device of the first weight that it packs.
    yield f"{FUNCTIONS}:name2qmap", lambda _: {}
    yield f"{FUNCTIONS}:get_paged", lambda _: get_paged
    yield f"{FUNCTIONS}:fill", lambda _: lambda *_, **__: None


def scales(parameter: nn.Parameter) -> list[Tensor | None]:
    """Return what the library keeps beside a packed weight: scales and code book, and those of the scales."""
    state = getattr(parameter, "quant_state", None)
    parts = () if state is None else (state, state.state2)
    return [tensor for part in parts if part is not None for tensor in (part.absmax, part.code, part.offset)]


# -- 4-bit products ------------------------------------------------------------------------------------------------


def inside(gpu: Gpu, args: Args, kwargs: Kwargs) -> int:
    """Return the unpacked weight and its scales, twice in float32, if it is unpacked (_dequant_linear_fallback)."""
    x, shape, blocksize = args[0], args[2], args[4]
    if not unpacks_4bit(gpu, x.dtype, x.numel() // x.shape[-1], shape[0], shape[1], blocksize):
        return 0
    scales = args[ABSMAX_8BIT] if len(args) > ABSMAX_8BIT else None  # a dispatch mode gets keywords by position
    size: int = shape[0] * shape[1] * x.element_size() + (2 * 4 * scales.numel() if scales is not None else 0)
    return size


@functools.cache
def unpacks_4bit(gpu: Gpu, dtype: torch.dtype, rows: int, out: int, inner: int, blocksize: int = 64) -> bool:
    """Return whether bitsandbytes unpacks a whole 4-bit weight (out, inner) to multiply `rows` inputs with it.

    The alternative is one fused kernel. The library decides by shape and card (bitsandbytes/backends/cuda/ops.py, the
    kernel of gemm_4bit); its own function is asked, with the card's properties in place of a real device's. A version
    without that function counts as always unpacking, which takes more memory.
    """
    library = cuda_backend()
    if library is None or rows > library._gemm_4bit_custom_max_m or inner % blocksize:
        return True
    properties = (gpu.multiprocessors, *gpu.capability)
    with mock.patch.object(library, "_gpu_dispatch_props", lambda index: properties):
        # past its cache, which knows a device by its index only
        return not library._gemm_4bit_use_custom_cuda.__wrapped__(0, dtype, rows, out, inner)


@functools.cache
def cuda_backend() -> ModuleType | None:
    """Return bitsandbytes' CUDA backend; None if it cannot be used.

    Its import looks up a function that a torch without CUDA lacks, without calling it.
    """
    name = "_cuda_getCurrentRawStream"
    missing = not hasattr(torch._C, name)
    with mock.patch.object(torch._C, name, None, create=True) if missing else contextlib.nullcontext():
        try:
            import bitsandbytes.backends.cuda.ops as library
        except (ImportError, AttributeError):
            return None
    needed = ("_gpu_dispatch_props", "_gemm_4bit_use_custom_cuda", "_gemm_4bit_custom_max_m")
    return library if all(hasattr(library, name) for name in needed) else None
