"""A stand-in for a GPU or a CPU that computes nothing and allocates nothing: `meta` tensors, watched by the tracker.

The stages run on it unchanged. Values are tracked where they are known: integers, masks, and everything computed from
them alone are also computed on the CPU, so batches have their real shapes. Values that depend on weights are unknown:
such a number reads as 1 and such a mask as all true, the largest case. Known integers keep their values when something
unknown is written into them: a response stays free of EOS. Where torch, TRL or bitsandbytes would take another path on
`meta` than on the device, a patch corrects that, says why and is undone.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar, ParamSpec, TypeVar, cast
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
import trl.kernels.chunked_logprob as fused_head
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.utils import checkpoint

from rlhf.memory import passes
from rlhf.memory.attention import attention
from rlhf.memory.cards import UNKNOWN, Gpu
from rlhf.memory.kernels import Args, Kwargs, Op, inside
from rlhf.memory.operations import tensors_in
from rlhf.memory.peaks import OUTSIDE
from rlhf.memory.replay import CAPTURE, CAPTURED, DROPPED
from rlhf.memory.shapes import Shapes
from rlhf.memory.tracker import Tracker
from rlhf.models import random_base
from rlhf.models.lean import layouts, trunk
from rlhf.rollout import decoding
from rlhf.rollout.cache import CacheLayer
from rlhf.rollout.trunk_decoding import TrunkDecoding

aten = torch.ops.aten
P = ParamSpec("P")
R = TypeVar("R")
META = torch.device("meta")
KNOWN = 2**18  # elements of a tensor up to which its values are computed beside
FACTORIES = {"arange", "zeros", "ones", "full", "empty", "eye", "scalar_tensor", "tril_indices"}
RANDOM = {"bernoulli_", "normal_", "uniform_", "random_", "rand_like", "randn_like", "native_dropout", "multinomial"}
UNASKED = {*RANDOM, "pow"}  # nor does anything ask for the angles of rotary embeddings, which begin with a power


class StandIn(Tracker):
    """The tracker of a device that is only stood in for: `cuda` or `cpu`; `gpu` is the card, where it is CUDA's."""

    def __init__(self, stands_for: str, phases: Collection[str], vocab_size: int, gpu: Gpu = UNKNOWN):
        super().__init__("meta", phases, vocab_size, inside(gpu) if stands_for == "cuda" else {})
        self.stands_for, self.gpu = stands_for, gpu
        self._shapes = Shapes()
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> "StandIn":
        for patch in _patches(self):
            self._patches.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        self._patches.close()

    def run(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        tensors = tensors_in(*args, *kwargs.values()) if kwargs else tensors_in(*args)
        on_device = [x for x in tensors if x.is_meta]
        if on_device and (answer := _ANSWERS.get(id(func))):
            return answer(*args, **kwargs)
        for x in on_device:
            if not hasattr(x, "_known"):
                return self._shapes(func, args, kwargs)
        out = self._shapes(func, args, kwargs) if on_device else func(*args, **kwargs)
        outputs = tensors_in(out)
        name = func._schema.name.removeprefix("aten::")
        if (
            any(x.is_meta for x in outputs)
            and all(x.numel() <= KNOWN for x in outputs)
            and (all(map(_is_known, tensors)) if tensors else name in FACTORIES and not _floating(outputs))
            and name not in UNASKED
        ):
            args, kwargs = tuple(map(_value, args)), {key: _value(value) for key, value in kwargs.items()}
            if kwargs.get("device") == META:
                kwargs["device"] = torch.device("cpu")
            for tensor, value in zip(outputs, tensors_in(func(*args, **kwargs)), strict=True):
                if tensor.is_meta:
                    _remember(tensor, value)
        return out


# -- values --------------------------------------------------------------------------------------------------------


def _is_known(x: Tensor) -> bool:
    """Return whether a tensor's numbers are known: integers and masks from the host are, floats may be weights."""
    if x.is_meta:
        return hasattr(x, "_known")
    return not x.is_floating_point() or not x.dim() or _is_mask(x)


def _is_mask(x: Tensor) -> bool:
    """Return whether a floating tensor of the host has zeros and ones only, and a one.

    Copies of unknown numbers are zeros.
    """
    if x.requires_grad or not 0 < x.numel() <= KNOWN:
        return False
    return bool(((x == 0) | (x == 1)).all()) and bool(x.any())


def _floating(tensors: list[Tensor]) -> bool:
    return any(x.is_floating_point() for x in tensors)


def _value(x: Any) -> Any:
    """Return the value that is known of an argument on the device; of a list, of each of its entries."""
    if isinstance(x, Tensor):
        return x._known if x.is_meta else x  # type: ignore[attr-defined]  # set by `_remember`
    return type(x)(map(_value, x)) if type(x) in (list, tuple) else x


def _remember(x: Tensor, value: Tensor) -> None:
    x._known = value  # type: ignore[attr-defined]  # an attribute of this module


def _on_device(values: Tensor) -> Tensor:
    x = values.to(META)
    _remember(x, values)
    return x


def _read(x: Tensor) -> Any:
    """Return `.item()`; 1 in the tensor's type if the number is not known."""
    if hasattr(x, "_known"):
        return x._known.item()
    return True if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1


def _to_copy(x: Tensor, *, device: Any = None, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    if device is None or torch.device(device) == META:
        out: Tensor = aten._to_copy.default(x, device=device, dtype=dtype, **options)
        if hasattr(x, "_known"):
            _remember(out, x._known.to(dtype))
        return out
    if hasattr(x, "_known"):
        return cast(Tensor, x._known.to(dtype, copy=True))
    return torch.zeros(x.shape, dtype=dtype or x.dtype)


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if target.device != META:
        return target.copy_(source._known) if hasattr(source, "_known") else target
    if _is_known(target) and _is_known(source):
        _value(target).copy_(_value(source))
    return cast(Tensor, aten.copy_.default(target, source))


def _nonzero(x: Tensor) -> Tensor:
    values = x._known if hasattr(x, "_known") else torch.ones(x.shape, dtype=torch.bool)
    return _on_device(values.nonzero())


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Index with masks whose numbers are known; all elements of others count as true, as `meta` cannot count them."""
    out: Tensor = aten.index.Tensor(x, _places(indices))
    if out.numel() <= KNOWN and all(_is_known(i) for i in (x, *indices) if i is not None):
        _remember(out, aten.index.Tensor(_value(x), [_value(i) for i in indices]))
    return out


def _index_put_(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    out: Tensor = aten.index_put_.default(x, _places(indices), values, accumulate)
    if all(_is_known(i) for i in (x, values, *indices) if i is not None):
        aten.index_put_.default(_value(x), [_value(i) for i in indices], _value(values), accumulate)
    return out


def _places(indices: list[Tensor | None]) -> list[Tensor | None]:
    places: list[Tensor | None] = []
    for i in indices:
        if i is not None and i.dtype == torch.bool:
            values = _value(i) if _is_known(i) else torch.ones(i.shape, dtype=torch.bool)
            places += map(_on_device, values.nonzero().unbind(1))
        else:
            places.append(i)
    return places


_ANSWERS: dict[int, Callable[..., Any]] = {  # by id: torch's operations live for ever, and take long to hash
    id(aten._local_scalar_dense.default): _read,
    id(aten._to_copy.default): _to_copy,
    id(aten.copy_.default): _copy_,
    id(aten.nonzero.default): _nonzero,
    id(aten.index.Tensor): _index,
    id(aten.index_put_.default): _index_put_,
    id(aten.equal.default): lambda a, b: True,
}


def _tensor(data: Any, *, device: Any = None, _real: Callable[..., Tensor] = torch.tensor, **options: Any) -> Tensor:
    """Build torch.tensor on the host first: on `meta` it would forget its numbers."""
    return _real(data, **options).to(device) if device is not None else _real(data, **options)


# -- paths ---------------------------------------------------------------------------------------------------------


def _patches(stand_in: StandIn) -> Iterator[passes.Patch]:
    """Yield context managers that put right what would go another way on `meta`."""
    patch = mock.patch.object
    yield patch(F, "scaled_dot_product_attention", attention(stand_in.stands_for, stand_in.gpu))
    # torch lists once what `with torch.device(...)` acts on: now, and not with the stand-in for torch.tensor in it.
    torch.utils._device._device_constructors()
    yield patch(torch, "tensor", _tensor)
    yield from passes.patches(stand_in)
    yield from _autocast_patches()
    # accelerate finds the trainers' device, and knows no stand-in.
    yield mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="meta")
    yield patch(transformers.TrainingArguments, "device", property(lambda self: self._setup_devices and META))
    yield patch(transformers.Trainer, "_save_checkpoint", lambda *_, **__: None)  # leaves no trace in a device's memory
    yield patch(transformers.PreTrainedModel, "save_pretrained", lambda *_, **__: None)
    # peft leaves a layer's second adapter where it is, the CPU, if the first one is on `meta`.
    yield patch(LoraLayer, "_move_adapter_to_device_of_base_layer", _move_adapter)
    for setting in (
        decoding.STEPS_BETWEEN_CHECKS_BY_DEVICE,
        decoding.WINDOW_BY_DEVICE,
        decoding.FEW_KERNELS_BY_DEVICE,
        trunk.MERGES_BY_DEVICE,
        layouts.COPIES_HEADS_BY_DEVICE,
    ):
        yield mock.patch.dict(setting, {"meta": setting[stand_in.stands_for]})
    yield patch(decoding.Decoding, "steps", lambda self: (1, self.room - 1) if self.room > 2 else range(1, self.room))
    yield patch(TrunkDecoding, "steps", lambda self: range(1, min(self.room, 3)))
    yield patch(CacheLayer, "lazy_initialization", _labelled_cache(stand_in))
    yield patch(TrunkDecoding, "__init__", _labelled_growth(stand_in))
    yield patch(checkpoint, "_recomputation_hook", _counted_hook(stand_in, checkpoint._recomputation_hook))
    yield patch(random_base, "skeleton", _untracked(stand_in, random_base.skeleton))  # on `meta`, but in earnest
    yield from _optimizers_know_meta("fused")
    yield from _bitsandbytes_patches(stand_in)
    if stand_in.stands_for == "cuda":
        yield from _cuda_patches(stand_in)


def _cuda_patches(stand_in: StandIn) -> Iterator[passes.Patch]:
    patch = mock.patch.object
    # CUDA keeps a mask of one byte for each element; other devices one in the input's type.
    yield patch(F, "dropout", _dropout)
    # CUDA has one kernel for RMSNorm; other devices compute it in plain steps.
    yield patch(F, "rms_norm", _rms_norm)
    # AdamW takes its foreach form on CUDA without being asked.
    yield from _optimizers_know_meta("foreach")
    # TRL's fused head folds its tiles in Triton kernels that allocate nothing, and in torch elsewhere.
    for name in ("_forward_tile", "_backward_tile"):
        yield patch(fused_head, name, lambda *_, **__: None)
    yield patch(
        fused_head, "_addmm_fp32", lambda acc, a, b: stand_in.count_flops(2 * a.shape[0] * a.shape[1] * b.shape[1])
    )
    # Its backward pass makes the logits again; the gradient's product is the one that is counted just above.
    head = fused_head.ChunkedLogProbFunction
    yield patch(head, "backward", staticmethod(_recomputing(stand_in, head.backward)))
    yield mock.patch("trl.trainer.utils._use_triton", lambda device: True)
    yield patch(transformers.training_args, "is_torch_bf16_gpu_available", lambda *_: True)
    if decoding.GRAPHS:
        yield patch(decoding.Decoding, "advance", _captured(stand_in))
        yield patch(decoding.Decoding, "deliver", _without_graph(stand_in))


def _bitsandbytes_patches(stand_in: StandIn) -> Iterator[passes.Patch]:
    """Yield patches for paged optimizer states: unified memory, not torch's allocator; plain tensors on a CPU."""
    try:
        import bitsandbytes.optim.optimizer as bnb
    except ImportError:
        return

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        out = torch.empty(*shape, dtype=dtype, device=META)
        if stand_in.stands_for == "cuda":
            stand_in.label(out, OUTSIDE)
        return out

    # The library keeps the code book of its scales, made on the device of the first weight that it packs.
    yield mock.patch.dict(bnb.F.name2qmap, clear=True)
    yield mock.patch.object(bnb.F, "get_paged", get_paged)
    yield mock.patch.object(bnb.F, "fill", lambda *_, **__: None)
    yield mock.patch.object(torch.cuda, "synchronize", lambda *_: None)


def _optimizers_know_meta(form: str) -> Iterator[passes.Patch]:
    for place in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        yield mock.patch(f"{place}._get_{form}_kernels_supported_devices", lambda: ["cuda", "cpu", "meta"])


def _move_adapter(self: LoraLayer, adapter_name: str, device: object = None) -> None:
    weight: Any = self.get_base_layer().weight
    dtype = weight.dtype if weight.is_floating_point() else None
    for layer in (self.lora_A, self.lora_B):
        if adapter_name in layer:
            layer[adapter_name] = layer[adapter_name].to(META, dtype)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> Tensor:
    return x * weight  # one operation with the same result in memory


def _labelled_cache(stand_in: StandIn) -> Callable[..., None]:
    original = CacheLayer.lazy_initialization

    def lazy_initialization(self: CacheLayer, keys: Tensor, values: Tensor) -> None:
        original(self, keys, values)
        stand_in.label(self.keys, "kv_cache")
        stand_in.label(self.values, "kv_cache")

    return lazy_initialization


def _labelled_growth(stand_in: StandIn) -> Callable[..., None]:
    original = TrunkDecoding.__init__

    def init(self: TrunkDecoding, *arguments: Any) -> None:
        original(self, *arguments)
        for cached in (x for pair in (*self.layout.prompt_cache, *self.layout.response_cache) for x in pair):
            stand_in.label(cached, "kv_cache")

    return init


def _captured(stand_in: StandIn) -> Callable[..., None]:
    """Return a decoding step that marks the second of two as captured, as most steps of a long response are."""
    original = decoding.Decoding.advance
    steps: weakref.WeakKeyDictionary[decoding.Decoding, int] = weakref.WeakKeyDictionary()

    def advance(self: decoding.Decoding) -> None:
        steps[self] = steps.get(self, 0) + 1
        capture = steps[self] == 2 and self.room > decoding.WORTH_A_GRAPH + 1
        if capture:
            stand_in.mark(CAPTURE)
        original(self)
        if capture:
            stand_in.mark(CAPTURED)

    return advance


def _without_graph(stand_in: StandIn) -> Callable[..., None]:
    original = decoding.Decoding.deliver

    def deliver(self: decoding.Decoding) -> None:
        stand_in.mark(DROPPED)
        original(self)

    return deliver


def _counted_hook(stand_in: StandIn, hook: Any) -> Any:
    """Return the block in which checkpointing runs a forward pass again, whose operations count as recomputed."""

    class Hook(hook):  # type: ignore[misc]  # torch makes the class, so that nothing is known of it here
        def __enter__(self) -> Any:
            stand_in.recomputing += 1
            return super().__enter__()

        def __exit__(self, *problem: Any) -> Any:
            stand_in.recomputing -= 1
            return super().__exit__(*problem)

    return Hook


def _recomputing(stand_in: StandIn, function: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        stand_in.recomputing += 1
        try:
            return function(*args, **kwargs)
        finally:
            stand_in.recomputing -= 1

    return call


def _untracked(stand_in: StandIn, function: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with stand_in.paused():
            return function(*args, **kwargs)

    return call


class _Autocast(contextlib.ContextDecorator):
    """torch.autocast for `meta`, which has none: float32 inputs of products become bfloat16, weights once a block."""

    on = False
    weights: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, device_type: str, dtype: object = None, enabled: bool = True, cache_enabled: object = None):
        self.enabled = enabled
        self.before: list[bool] = []

    def __enter__(self) -> "_Autocast":
        self.before.append(_Autocast.on)
        _Autocast.on = self.enabled
        return self

    def __exit__(self, *_: object) -> None:
        _Autocast.on = self.before.pop()
        if not any((self.before, _Autocast.on)):
            _Autocast.weights.clear()

    @staticmethod
    def cast(x: object) -> object:
        if not (_Autocast.on and isinstance(x, Tensor) and x.device == META and x.dtype == torch.float32):
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.to(torch.bfloat16)
        if id(x) not in _Autocast.weights:
            _Autocast.weights[id(x)] = x.to(torch.bfloat16)
        return _Autocast.weights[id(x)]


def _autocast_patches() -> Iterator[passes.Patch]:
    patch = mock.patch.object
    real = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return _Autocast(device_type, *args, **kwargs) if device_type == "meta" else real(device_type, *args, **kwargs)

    for module, name in ((torch, "autocast"), (torch.amp, "autocast")):
        yield patch(module, name, autocast)
    enabled, available, dtype = torch.is_autocast_enabled, torch.amp.is_autocast_available, torch.get_autocast_dtype
    yield patch(torch, "is_autocast_enabled", lambda *d: _Autocast.on if d in ((), ("meta",)) else enabled(*d))
    yield patch(torch, "get_autocast_dtype", lambda d: torch.bfloat16 if d == "meta" else dtype(d))
    yield patch(torch.amp, "is_autocast_available", lambda d: d == "meta" or available(d))
    products = [(F, "linear"), (torch, "matmul"), (torch, "bmm"), (torch, "mm"), (torch.Tensor, "__matmul__")]
    products.append((F, "scaled_dot_product_attention"))
    for place, name in products:
        yield patch(place, name, _casting(getattr(place, name)))


def _casting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cast(*args: object, **kwargs: object) -> Tensor:
        return function(*map(_Autocast.cast, args), **{key: _Autocast.cast(value) for key, value in kwargs.items()})

    return cast
