"""The paths that torch takes on a device, for `meta` tensors in the place of the device's.

Where torch would take another path on `meta`, a patch corrects that and says why.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _device, checkpoint

from peakmem.attention import attention
from peakmem.patches import accelerate
from peakmem.patches.replacing import Patch
from peakmem.tensors import on_stand_in

if TYPE_CHECKING:
    from peakmem.device import StandIn


def patches(stand_in: "StandIn") -> Iterator[Patch]:
    """Yield context managers that put right what would go another way on `meta`."""
    patch = mock.patch.object
    yield patch(F, "scaled_dot_product_attention", attention(stand_in.stands_for, stand_in.gpu))
    # torch lists once what `with torch.device(...)` acts on: now, and not with the stand-in for torch.tensor in it.
    _device._device_constructors()
    yield patch(torch, "tensor", _tensor)
    yield from _autocast_patches(stand_in.as_cuda)
    if not stand_in.as_cuda:
        yield mock.patch.dict(os.environ, accelerate.DEVICE)
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
    """torch.autocast for `meta`, which has none: inputs of products become half as wide, weights once a block."""

    def __init__(self, default: torch.dtype) -> None:
        self.on = False
        self.default = self.dtype = default
        self._blocks = 0  # that are open
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a weight, which keeps its id taken, and its cast

    @contextlib.contextmanager
    def block(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> Iterator[None]:
        """Be on, or off, inside the block; at the end of the outermost one the casts of weights are forgotten.

        It has the arguments of torch.autocast.
        """
        before = self.on, self.dtype
        self.on, self.dtype = enabled, dtype or self.default
        self._blocks += 1
        try:
            yield
        finally:
            self.on, self.dtype = before
            self._blocks -= 1
            if not self._blocks:
                self._weights.clear()

    def lowered(self, x: object) -> object:
        """Return an input of a product as it is multiplied."""
        if not (self.on and isinstance(x, Tensor) and on_stand_in(x) and x.dtype == torch.float32):
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.to(self.dtype)
        if id(x) not in self._weights:
            self._weights[id(x)] = x, x.to(self.dtype)
        return self._weights[id(x)][1]

    def raised(self, x: object) -> object:
        """Return an input of an operation that is computed in float32."""
        narrow = self.on and isinstance(x, Tensor) and on_stand_in(x) and x.dtype in (torch.float16, torch.bfloat16)
        return x.float() if narrow else x  # type: ignore[attr-defined]  # a tensor

    def casting(self, function: Callable[..., Any], cast: Callable[[object], object]) -> Callable[..., Any]:
        """Return an operation whose inputs are cast, those in a list too."""

        def one(x: object) -> object:
            return type(x)(map(cast, x)) if type(x) in (list, tuple) else cast(x)  # type: ignore[call-arg, call-overload]

        @functools.wraps(function)
        def operation(*args: object, **kwargs: object) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            return function(*map(one, args), **{key: one(value) for key, value in kwargs.items()})

        return operation


PRODUCTS = [(F, "linear"), (torch, "matmul"), (torch, "bmm"), (torch, "mm"), (Tensor, "__matmul__")]
PRODUCTS.append((F, "scaled_dot_product_attention"))
# Of torch's lists of what autocast casts on CUDA (torch.org, Automatic Mixed Precision, CUDA Op-Specific Behavior),
# beside those above.
MORE_PRODUCTS: list[tuple[Any, str]] = [
    (torch, name) for name in ("addmm", "addbmm", "baddbmm", "addmv", "mv", "chain_matmul", "einsum")
]
MORE_PRODUCTS += [(F, f"conv{kind}{n}d") for kind in ("", "_transpose") for n in (1, 2, 3)]
MORE_PRODUCTS += [(Tensor, name) for name in ("matmul", "bmm", "mm", "addmm", "baddbmm", "mv", "__rmatmul__")]
IN_FLOAT32: list[tuple[Any, str]] = [(F, "binary_cross_entropy_with_logits"), (Tensor, "__pow__")]
for _names, _places in (
    ("layer_norm group_norm softmin softplus cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss", (F,)),
    ("kl_div cosine_similarity normalize", (F,)),
    ("softmax log_softmax", (F, torch, Tensor)),
    ("exp expm1 log log10 log2 log1p pow rsqrt reciprocal cumsum cumprod norm prod sum", (torch, Tensor)),
):
    IN_FLOAT32 += [(place, name) for name in _names.split() for place in _places]


def _autocast_patches(as_cuda: bool) -> Iterator[Patch]:
    patch = mock.patch.object
    devices = ("meta", "cuda") if as_cuda else ("meta",)
    real, stand_in = torch.autocast, _Autocast(torch.float16 if as_cuda else torch.bfloat16)

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return (stand_in.block if device_type in devices else real)(device_type, *args, **kwargs)

    for module, name in ((torch, "autocast"), (torch.amp, "autocast")):
        yield patch(module, name, autocast)
    enabled, available, dtype = torch.is_autocast_enabled, torch.amp.is_autocast_available, torch.get_autocast_dtype
    ours = ((), *((device,) for device in devices))
    yield patch(torch, "is_autocast_enabled", lambda *d: stand_in.on if d in ours else enabled(*d))
    yield patch(torch, "get_autocast_dtype", lambda d: stand_in.dtype if d in devices else dtype(d))
    yield patch(torch.amp, "is_autocast_available", lambda d: d in devices or available(d))
    for place, name in PRODUCTS:
        yield patch(place, name, stand_in.casting(getattr(place, name), stand_in.lowered))
    if as_cuda:
        yield patch(torch.cuda.amp, "autocast", functools.partial(autocast, "cuda"))
        yield patch(torch, "get_autocast_gpu_dtype", lambda: stand_in.dtype)
        for place, name in MORE_PRODUCTS:
            yield patch(place, name, stand_in.casting(getattr(place, name), stand_in.lowered))
        for place, name in IN_FLOAT32:
            yield patch(place, name, stand_in.casting(getattr(place, name), stand_in.raised))


def _tensor(data: Any, *, device: Any = None, _real: Callable[..., Tensor] = torch.tensor, **options: Any) -> Tensor:
    """Build torch.tensor on the host first: on `meta` it would forget its numbers."""
    return _real(data, **options).to(device) if device is not None else _real(data, **options)
