"""torch.autocast for `meta`, which has none: what it casts on CUDA, by torch's own lists."""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from peakmem.patches.replacing import Patch
from peakmem.tensors import on_stand_in

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


class _Casting:
    """What is cast now: inputs of products become half as wide, weights once in an outermost block."""

    def __init__(self, default: torch.dtype) -> None:
        self.on = False
        self.default = self.dtype = default
        self.blocks = 0  # that are open
        self.weights: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a weight, which keeps its id taken, and its cast

    def lowered(self, x: object) -> object:
        """Return an input of a product as it is multiplied."""
        if not (self.on and isinstance(x, Tensor) and on_stand_in(x) and x.dtype == torch.float32):
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.to(self.dtype)
        if id(x) not in self.weights:
            self.weights[id(x)] = x, x.to(self.dtype)
        return self.weights[id(x)][1]

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


def _class(casting: _Casting, devices: tuple[str, ...], real: Any) -> Any:
    """Return the class in the place of torch.autocast: a block or a decorator, which can be used again and nested.

    On other devices it is torch's own, of which it is a subclass.
    """

    class autocast(real):  # type: ignore[misc]  # torch's name, and a class that is found when this runs
        def __init__(
            self,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ):
            self._ours = device_type in devices
            self._before: list[tuple[bool, torch.dtype]] = []
            if self._ours:
                self.device, self._enabled, self.fast_dtype = device_type, enabled, dtype or casting.default
            else:
                super().__init__(device_type, dtype, enabled, cache_enabled)

        def __enter__(self) -> Any:
            if not self._ours:
                return super().__enter__()
            self._before.append((casting.on, casting.dtype))
            casting.on, casting.dtype = self._enabled, self.fast_dtype
            casting.blocks += 1
            return self

        def __exit__(self, *problem: Any) -> Any:
            if not self._ours:
                return super().__exit__(*problem)
            casting.on, casting.dtype = self._before.pop()
            casting.blocks -= 1
            if not casting.blocks:
                casting.weights.clear()
            return None

        def __call__(self, function: Any) -> Any:
            @functools.wraps(function)
            def decorated(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

            return decorated

    return autocast


def patches(as_cuda: bool) -> Iterator[Patch]:
    """Yield patches of torch.autocast, of what asks for its state, and of the operations that it casts."""
    patch = mock.patch.object
    devices = ("meta", "cuda") if as_cuda else ("meta",)
    casting = _Casting(torch.float16 if as_cuda else torch.bfloat16)
    autocast = _class(casting, devices, torch.autocast)
    for module in (torch, torch.amp, torch.amp.autocast_mode):
        yield patch(module, "autocast", autocast)
    enabled, available, dtype = torch.is_autocast_enabled, torch.amp.is_autocast_available, torch.get_autocast_dtype
    ours = ((), *((device,) for device in devices))
    yield patch(torch, "is_autocast_enabled", lambda *d: casting.on if d in ours else enabled(*d))
    yield patch(torch, "get_autocast_dtype", lambda d: casting.dtype if d in devices else dtype(d))
    yield patch(torch.amp, "is_autocast_available", lambda d: d in devices or available(d))
    for place, name in PRODUCTS:
        yield patch(place, name, casting.casting(getattr(place, name), casting.lowered))
    if as_cuda:
        yield patch(torch.cuda.amp, "autocast", _of_cuda(autocast))
        yield patch(torch, "get_autocast_gpu_dtype", lambda: casting.dtype)
        for place, name in MORE_PRODUCTS:
            yield patch(place, name, casting.casting(getattr(place, name), casting.lowered))
        for place, name in IN_FLOAT32:
            yield patch(place, name, casting.casting(getattr(place, name), casting.raised))


def _of_cuda(autocast: Any) -> Any:
    class of_cuda(autocast):  # type: ignore[misc]  # the class above
        def __init__(
            self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool | None = None
        ) -> None:
            super().__init__("cuda", dtype, enabled, cache_enabled)

    return of_cuda
