"""The paths that a stage takes on its device, for `meta` tensors in the place of the device's.

Where torch, TRL, peft or bitsandbytes would take another path on `meta`, a patch corrects that and says why.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
import trl.kernels.chunked_logprob as fused_head
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.utils import checkpoint

from rlhf.memory.card.attention import attention
from rlhf.memory.phases import CAPTURE, CAPTURED, DROPPED, PAGED
from rlhf.memory.rehearsal import passes
from rlhf.memory.rehearsal.operations import META
from rlhf.models import matmul, random_base
from rlhf.models.lean import fused_linear, layouts, trunk
from rlhf.rollout import library_decoding, own_tokens
from rlhf.rollout.cache import CacheLayer
from rlhf.rollout.library_decoding import LibraryDecoding
from rlhf.rollout.trunk_decoding import TrunkDecoding

if TYPE_CHECKING:
    from rlhf.memory.rehearsal.device import StandIn

P = ParamSpec("P")
R = TypeVar("R")


def patches(stand_in: "StandIn") -> Iterator[passes.Patch]:
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
        library_decoding.STEPS_BETWEEN_CHECKS_BY_DEVICE,
        library_decoding.WINDOW_BY_DEVICE,
        library_decoding.FEW_KERNELS_BY_DEVICE,
        own_tokens.BY_DEVICE,
        trunk.ONEDNN_BY_DEVICE,
        fused_linear.FUSED_BY_DEVICE,
        matmul.FLOAT32_OF_HALVES_BY_DEVICE,
        layouts.COPIES_HEADS_BY_DEVICE,
        layouts.WIDE_ATTENTION_BY_DEVICE,
    ):
        yield mock.patch.dict(setting, {"meta": setting[stand_in.stands_for]})
    # The kernel that is tried on a card.
    yield patch(own_tokens, "kernel_works", lambda *_: stand_in.gpu.capability >= (8, 0))
    yield patch(LibraryDecoding, "steps", lambda self: (1, self.room - 1) if self.room > 2 else range(1, self.room))
    yield patch(TrunkDecoding, "steps", lambda self: range(1, min(self.room, 3)))
    yield patch(CacheLayer, "lazy_initialization", _labelled_cache(stand_in))
    yield patch(TrunkDecoding, "__init__", _labelled_growth(stand_in))
    yield patch(checkpoint, "_recomputation_hook", _counted_hook(stand_in, checkpoint._recomputation_hook))
    yield patch(random_base, "skeleton", _untracked(stand_in, random_base.skeleton))  # on `meta`, but in earnest
    yield from _optimizers_know_meta("fused")
    yield from _bitsandbytes_patches(stand_in)
    if stand_in.stands_for == "cuda":
        yield from _cuda_patches(stand_in)


def _cuda_patches(stand_in: "StandIn") -> Iterator[passes.Patch]:
    patch = mock.patch.object
    # CUDA keeps a mask of one byte for each element; other devices one in the input's type.
    yield patch(F, "dropout", _dropout)
    # CUDA has one kernel for RMSNorm; other devices compute it in plain steps.
    yield patch(F, "rms_norm", _rms_norm)
    yield patch(fused_linear, "fused_rms_norm", _rms_norm_and_scale)
    # CUDA's softmax reads float16 and writes float32; other devices copy its input first.
    for name in ("softmax", "log_softmax"):
        yield patch(F, name, _softmax_of_halves(getattr(F, name), getattr(torch.ops.aten, f"_{name}").default))
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
    if library_decoding.GRAPHS:
        yield patch(LibraryDecoding, "advance", _captured(stand_in))
        yield patch(LibraryDecoding, "deliver", _without_graph(stand_in))


def _bitsandbytes_patches(stand_in: "StandIn") -> Iterator[passes.Patch]:
    """Yield patches for paged optimizer states: unified memory, not torch's allocator; plain tensors on a CPU."""
    try:
        import bitsandbytes.optim.optimizer as bnb
    except ImportError:
        return

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        out = torch.empty(*shape, dtype=dtype, device=META)
        if stand_in.stands_for == "cuda":
            stand_in.label(out, PAGED)
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


def _softmax_of_halves(plain: Callable[..., Tensor], kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a softmax that takes a float16 input to float32 in one kernel, as CUDA does (SoftMax.cpp, softmax)."""

    def softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        if x.device == META and dim is not None and x.dtype == torch.float16 and dtype == torch.float32:
            return kernel(x, dim, True)
        return plain(x, dim, dtype=dtype)

    return softmax


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> Tensor:
    return x * weight  # one operation with the same result in memory


def _rms_norm_and_scale(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x * weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _labelled_cache(stand_in: "StandIn") -> Callable[..., None]:
    original = CacheLayer.lazy_initialization

    def lazy_initialization(self: CacheLayer, keys: Tensor, values: Tensor) -> None:
        original(self, keys, values)
        stand_in.label(self.keys, "kv_cache")
        stand_in.label(self.values, "kv_cache")

    return lazy_initialization


def _labelled_growth(stand_in: "StandIn") -> Callable[..., None]:
    original = TrunkDecoding.__init__

    def init(self: TrunkDecoding, *arguments: Any) -> None:
        original(self, *arguments)
        for cached in (x for pair in (*self.layout.prompt_cache, *self.layout.response_cache) for x in pair):
            stand_in.label(cached, "kv_cache")

    return init


def _captured(stand_in: "StandIn") -> Callable[..., None]:
    """Return a decoding step that marks the second of two as captured, as most steps of a long response are."""
    original = LibraryDecoding.advance
    steps: weakref.WeakKeyDictionary[LibraryDecoding, int] = weakref.WeakKeyDictionary()

    def advance(self: LibraryDecoding) -> None:
        steps[self] = steps.get(self, 0) + 1
        capture = steps[self] == 2 and self.room > library_decoding.WORTH_A_GRAPH + 1
        if capture:
            stand_in.mark(CAPTURE)
        original(self)
        if capture:
            stand_in.mark(CAPTURED)

    return advance


def _without_graph(stand_in: "StandIn") -> Callable[..., None]:
    original = LibraryDecoding.deliver

    def deliver(self: LibraryDecoding) -> None:
        stand_in.mark(DROPPED)
        original(self)

    return deliver


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


def _recomputing(stand_in: "StandIn", function: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        stand_in.recomputing += 1
        try:
            return function(*args, **kwargs)
        finally:
            stand_in.recomputing -= 1

    return call


def _untracked(stand_in: "StandIn", function: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with stand_in.paused():
            return function(*args, **kwargs)

    return call


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


def _autocast_patches() -> Iterator[passes.Patch]:
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
