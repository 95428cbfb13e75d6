"""The paths that torch takes on a device, for `meta` tensors in the place of the device's.

Where torch would take another path on `meta`, a patch corrects that and says why.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _device, checkpoint

from peakmem.attention import attention
from peakmem.patches.replacing import Patch
from peakmem.tensors import META

if TYPE_CHECKING:
    from peakmem.device import StandIn


def patches(stand_in: "StandIn") -> Iterator[Patch]:
    """Yield context managers that put right what would go another way on `meta`."""
    patch = mock.patch.object
    yield patch(F, "scaled_dot_product_attention", attention(stand_in.stands_for, stand_in.gpu))
    # torch lists once what `with torch.device(...)` acts on: now, and not with the stand-in for torch.tensor in it.
    _device._device_constructors()
    yield patch(torch, "tensor", _tensor)
    yield from _autocast_patches()
    yield patch(checkpoint, "_recomputation_hook", _counted_hook(stand_in, checkpoint._recomputation_hook))
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


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _softmax_of_halves(plain: Callable[..., Tensor], kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a softmax that takes a float16 input to float32 in one kernel, as CUDA does (SoftMax.cpp, softmax)."""

    def softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        if x.device == META and dim is not None and x.dtype == torch.float16 and dtype == torch.float32:
            return kernel(x, dim, True)
        return plain(x, dim, dtype=dtype)

    return softmax


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> Tensor:
    return x * weight  # one operation with the same result in memory


def _counted_hook(stand_in: "StandIn", hook: Any) -> Any:
    """Return the block in which checkpointing runs a forward pass again, whose operations count as recomputed."""

    class Hook(hook):  # type: ignore[misc]  # torch makes the class, so that nothing is known of it here
        def __enter__(self) -> Any:
            stand_in.recomputing += 1
            return super().__enter__()

        def __exit__(self, *problem: Any) -> Any:
            stand_in.recomputing -= 1
            return super().__exit__(*problem)

    return Hook


class _Autocast:
    """torch.autocast for `meta`, which has none: float32 inputs of products become bfloat16, weights once a block."""

    def __init__(self) -> None:
        self.on = False
        self._blocks = 0  # that are open
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a weight, which keeps its id taken, and its cast

    @contextlib.contextmanager
    def block(
        self, device_type: str, dtype: object = None, enabled: bool = True, cache_enabled: object = None
    ) -> Iterator[None]:
        """Be on, or off, inside the block; at the end of the outermost one the casts of weights are forgotten.

        It has the arguments of torch.autocast.
        """
        before, self.on = self.on, enabled
        self._blocks += 1
        try:
            yield
        finally:
            self.on = before
            self._blocks -= 1
            if not self._blocks:
                self._weights.clear()

    def cast(self, x: object) -> object:
        """Return an input of a product as it is multiplied."""
        if not (self.on and isinstance(x, Tensor) and x.device == META and x.dtype == torch.float32):
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.to(torch.bfloat16)
        if id(x) not in self._weights:
            self._weights[id(x)] = x, x.to(torch.bfloat16)
        return self._weights[id(x)][1]

    def casting(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a product that casts its inputs."""

        def product(*args: object, **kwargs: object) -> Tensor:
            return function(*map(self.cast, args), **{key: self.cast(value) for key, value in kwargs.items()})

        return product


def _autocast_patches() -> Iterator[Patch]:
    patch = mock.patch.object
    real, stand_in = torch.autocast, _Autocast()

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return (stand_in.block if device_type == "meta" else real)(device_type, *args, **kwargs)

    for module, name in ((torch, "autocast"), (torch.amp, "autocast")):
        yield patch(module, name, autocast)
    enabled, available, dtype = torch.is_autocast_enabled, torch.amp.is_autocast_available, torch.get_autocast_dtype
    yield patch(torch, "is_autocast_enabled", lambda *d: stand_in.on if d in ((), ("meta",)) else enabled(*d))
    yield patch(torch, "get_autocast_dtype", lambda d: torch.bfloat16 if d == "meta" else dtype(d))
    yield patch(torch.amp, "is_autocast_available", lambda d: d == "meta" or available(d))
    products = [(F, "linear"), (torch, "matmul"), (torch, "bmm"), (torch, "mm"), (torch.Tensor, "__matmul__")]
    products.append((F, "scaled_dot_product_attention"))
    for place, name in products:
        yield patch(place, name, stand_in.casting(getattr(place, name)))


def _tensor(data: Any, *, device: Any = None, _real: Callable[..., Tensor] = torch.tensor, **options: Any) -> Tensor:
    """Build torch.tensor on the host first: on `meta` it would forget its numbers."""
    return _real(data, **options).to(device) if device is not None else _real(data, **options)
