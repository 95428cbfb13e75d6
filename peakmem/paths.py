"""The paths that torch takes on a device, for `meta` tensors in the place of the device's.

Where torch would take another path on `meta`, a patch corrects that and says why.
"""

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _device

from peakmem import autocast
from peakmem.attention import attention
from peakmem.patches import accelerate
from peakmem.patches.replacing import Patch
from peakmem.tensors import on_stand_in

if TYPE_CHECKING:
    from peakmem.device import StandIn


def patches(stand_in: "StandIn") -> Iterator[Patch]:
    """Yield context managers that put right what would go another way on `meta`."""
    patch = mock.patch.object
    yield patch(F, "scaled_dot_product_attention", attention(stand_in.stands_for, stand_in.gpu, stand_in.assume))
    # torch lists once what `with torch.device(...)` acts on: now, and not with the stand-in for torch.tensor in it.
    _device._device_constructors()
    yield patch(torch, "tensor", _tensor)
    yield from autocast.patches(stand_in.as_cuda)
    if not stand_in.as_cuda:
        yield mock.patch.dict(os.environ, accelerate.DEVICE)
    if not stand_in.as_cuda:
        yield patch(torch.cuda, "synchronize", lambda *_: None)  # by programs and libraries that wait for a card
    yield from _optimizers_know_meta("fused")
    if stand_in.stands_for == "cuda":
        yield from _cuda_patches()


def _cuda_patches() -> Iterator[Patch]:
    patch = mock.patch.object
    # CUDA keeps a mask of one byte for each element; other devices one in the input's type.
    yield patch(F, "dropout", _dropout)
    # CUDA has one kernel for RMSNorm; other devices compute it in plain steps.
    yield patch(F, "rms_norm", _rms_norm)
    # CUDA's softmax reads float16 and writes float32; other devices copy its input first.
    for name in ("softmax", "log_softmax"):
        yield patch(F, name, _softmax_of_halves(getattr(F, name), getattr(torch.ops.aten, f"_{name}").default))
    # AdamW takes its foreach form on CUDA without being asked.
    yield from _optimizers_know_meta("foreach")


def _optimizers_know_meta(form: str) -> Iterator[Patch]:
    for place in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        yield mock.patch(f"{place}._get_{form}_kernels_supported_devices", lambda: ["cuda", "cpu", "meta"])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _softmax_of_halves(plain: Callable[..., Tensor], kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a softmax that takes a float16 input to float32 in one kernel, as CUDA does (SoftMax.cpp, softmax)."""

    def softmax(
        input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tensor:
        if on_stand_in(input) and dim is not None and input.dtype == torch.float16 and dtype == torch.float32:
            return kernel(input, dim, True)
        return plain(input, dim, dtype=dtype)

    return softmax


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return input * (1.0 if weight is None else weight)  # one operation with the same result in memory


def _tensor(data: Any, *, device: Any = None, _real: Callable[..., Tensor] = torch.tensor, **options: Any) -> Tensor:
    """Build torch.tensor on the host first: on `meta` it would forget its numbers."""
    return _real(data, **options).to(device) if device is not None else _real(data, **options)
