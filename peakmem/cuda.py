"""A card as a program sees it that says `cuda`: the devices of tensors, and torch.cuda's answers.

Tensors are on `meta`. Where a program asks, they are on `cuda:0`, so that it takes the paths that it takes on a card.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._weights_only_unpickler import _get_allowed_globals
from torch.overrides import TorchFunctionMode
from torch.utils import _device as _device_contexts
from torch.utils._python_dispatch import _disable_current_modes

from peakmem.cards import Card
from peakmem.events import EMPTIED
from peakmem.patches.replacing import Patch, Replaced
from peakmem.tensors import META, Args, Kwargs, on_stand_in

if TYPE_CHECKING:
    from peakmem.script import Followed

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# Everything public in these answers, or is refused by its name.
MODULES = (
    torch.cuda,
    torch.cuda.memory,
    torch.cuda.random,
    torch.cuda.streams,
    torch.cuda.graphs,
    torch.cuda.nvtx,
    torch.cuda.profiler,
    torch.accelerator,
    torch.accelerator.memory,
)
NOTHING = """
    init _lazy_init _lazy_call set_device set_device_index set_device_idx set_stream synchronize ipc_collect
    manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all set_sync_debug_mode
    reset_accumulated_memory_stats reset_accumulated_host_memory_stats reset_peak_host_memory_stats empty_host_cache
    set_per_process_memory_fraction mark range_push range_pop range_start range_end start stop _record_memory_history
"""
REFUSED = ("_snapshot", "_dump_snapshot")
TENSOR_TYPE = type(vars(torch.cuda)["FloatTensor"])


class SaysCuda(TorchFunctionMode):
    """Puts on `meta` whatever a program puts on `cuda`, and says `cuda:0` of what is there.

    What a program itself puts on `meta` takes no memory of the card, and lies on the host.
    """

    def __init__(self, stand_in: "Followed"):
        super().__init__()
        self._stand_in = stand_in

    def __torch_function__(self, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if (answer := _ANSWERS.get(func)) is not None:
            return answer(*args, **kwargs)
        if func in _HANDED_OVER and on_stand_in(args[0]):
            self._stand_in.refuse("native code gets a tensor's memory, which has no known size")
        if func is Tensor.data_ptr and on_stand_in(args[0]):
            self._stand_in.assume("what is done with a tensor's address is not followed")
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], META, *args[2:])
        if any(_is_place(x) for x in args) or any(_is_place(x) for x in kwargs.values()):
            args = tuple(_placed(x) for x in args)
            kwargs = {key: _placed(x) for key, x in kwargs.items()}
        if kwargs:
            kwargs.pop("pin_memory", None)
            if type(kwargs.get("device")) is int:
                kwargs["device"] = META
            if kwargs.get("device") == META:
                kwargs.pop("generator", None)
        return func(*args, **kwargs)


_device_of, _device = Tensor.device.__get__, torch.device


def _device_that_is_said(x: Tensor, *_: object) -> torch.device:
    device: torch.device = _device_of(x)
    return CUDA if device.type == "meta" else device


def _named_device(*args: Any, **kwargs: Any) -> torch.device:
    return CUDA if args and type(args[0]) is int else _device(*args, **kwargs)


def _set_data(x: Tensor, value: Tensor) -> None:
    """Stand in for `x.data = value`: from the host to the card it is the same tensor, which torch refuses on `meta`."""
    if x.is_meta == value.is_meta:
        x.data = value
    else:
        new = torch.Tensor._make_subclass(type(x), value.detach(), x.requires_grad)
        vars(new).update(vars(x))
        torch.utils.swap_tensors(x, new)


def _formatted(x: Tensor, form: str) -> str:
    """Stand in for what an f-string asks of a tensor; torch formats no number that is on `meta`."""
    text: str = x.item().__format__(form) if x.dim() == 0 else object.__format__(x, form)
    return text


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _device_of: _device_that_is_said,
    Tensor.is_meta.__get__: lambda x, *_: False,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda x, *_: x.is_meta,  # type: ignore[attr-defined]
    torch.device: _named_device,
    torch._C._nn._parse_to: torch._C._nn._parse_to,  # it only reads what a program names
    Tensor.cuda: lambda x, *_, **__: x.to(META),
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.pin_memory: lambda x, *_, **__: x,
    Tensor.__format__: _formatted,
    Tensor.get_device: lambda x: 0 if x.is_meta else -1,
}


_HANDED_OVER = (Tensor.__dlpack__, Tensor.__cuda_array_interface__.__get__)


def _is_place(x: object) -> bool:
    kind = type(x)
    if kind is torch.device:
        return x.type in ("cuda", "meta")  # type: ignore[attr-defined]
    return kind is str and (x.startswith("cuda") or x == "meta")  # type: ignore[attr-defined]


def _placed(x: Any) -> Any:
    """Return where a tensor is put: one of the card on `meta`; one that a program puts there itself on the host."""
    if not _is_place(x):
        return x
    return CPU if str(x) == "meta" else META


def patches(stand_in: "Followed", card: Card) -> Iterator[Patch]:
    """Yield patches by which torch.cuda and torch.accelerator answer as on a card with nothing else on it."""
    assert card.memory
    total = int(card.memory.gb * 1e9)
    properties = SimpleNamespace(
        name=f"NVIDIA {card.words}",
        major=card.gpu.capability[0],
        minor=card.gpu.capability[1],
        total_memory=total,
        multi_processor_count=card.gpu.multiprocessors,
        warp_size=32,
        is_integrated=0,
        L2_cache_size=64 << 20,
        max_threads_per_multi_processor=1536,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=99 << 10,
        shared_memory_per_multiprocessor=100 << 10,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )

    yield _as_before()
    answers = _answers(stand_in, card, properties)
    for module in MODULES:
        yield from _answering(module, answers, stand_in)
    for name, real in vars(torch.cuda).items():
        if isinstance(real, TENSOR_TYPE):
            yield mock.patch.object(torch.cuda, name, _LegacyTensor(real))
    yield mock.patch.object(torch.version, "cuda", "13.0")
    yield mock.patch.object(torch, "Stream", _Stream)
    yield mock.patch.object(torch, "Event", _Event)
    yield mock.patch.object(torch.distributed, "is_nccl_available", lambda: True)
    yield mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    # A torch without CUDA lacks it, and bitsandbytes looks it up; kernels are not launched.
    yield mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0, create=True)
    yield mock.patch.object(torch, "Generator", _Generator)
    yield mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _step_of_scaler)  # no number is infinite
    yield mock.patch.object(_device_contexts.DeviceContext, "__init__", _default_device)
    yield mock.patch.object(torch, "get_default_device", _named_default(torch.get_default_device))
    yield mock.patch.object(nn.DataParallel, "scatter", _scatter)
    yield mock.patch.object(torch, "save", _saved(torch.save))
    yield mock.patch.object(torch._utils, "_rebuild_meta_tensor_no_storage", _loaded)
    yield mock.patch.object(torch._utils, "_rebuild_tensor", _on_host(torch._utils._rebuild_tensor))
    yield mock.patch.object(torch.autograd.graph.save_on_cpu, "__init__", _unpinned(torch.autograd.graph.save_on_cpu))
    # Whether a number is a probability is not known; the program's own numbers are.
    yield Replaced("torch.distributions.distribution:Distribution._validate_args", lambda _: False)
    loader = torch.utils.data.DataLoader
    yield mock.patch.object(loader, "__init__", _loading_here(loader.__init__))
    for name, answer in (("isnan", False), ("isinf", False), ("isfinite", True)):
        for place in (torch, Tensor):
            yield mock.patch.object(place, name, _finite(getattr(place, name), answer))
    yield mock.patch.object(nn.Parameter, "__new__", _keeping_its_class(nn.Parameter.__new__))
    yield SaysCuda(stand_in)


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Around a program: what torch.load may call, which torch keeps from the first file on, and no default device."""
    _get_allowed_globals.cache_clear()
    try:
        yield
    finally:
        _get_allowed_globals.cache_clear()
        torch.set_default_device(None)


def _answers(stand_in: "Followed", card: Card, properties: object) -> dict[str, Any]:
    """Return what names of `MODULES` answer; whatever is not among them is refused by its name."""
    assert card.memory
    total = int(card.memory.gb * 1e9)

    def now(*_: object, **__: object) -> int:
        return stand_in.alive

    def most(*_: object, **__: object) -> int:
        return stand_in.most

    def reset(*_: object, **__: object) -> None:
        stand_in.reset_most()

    def nothing(*_: object, **__: object) -> None:
        """Do what a card does here: nothing that takes memory."""

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    return {
        **dict.fromkeys(NOTHING.split(), nothing),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached", "device_memory_used"), now),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), most),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), reset),
        **dict.fromkeys(("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), always(0)),
        **dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), always(0)),
        **dict.fromkeys(("is_available", "is_initialized", "is_tf32_supported", "_is_compiled"), always(True)),
        **dict.fromkeys(("current_stream", "default_stream", "get_stream_from_external"), lambda *_, **__: _Stream()),
        **dict.fromkeys(("stream", "StreamContext"), lambda *_, **__: contextlib.nullcontext()),
        **dict.fromkeys(("device", "device_of", "device_index"), _NoDevice),
        "device_count": always(1),
        "current_accelerator": always(torch.device("cuda")),
        "get_device_name": always(f"NVIDIA {card.words}"),
        "get_device_capability": always(card.gpu.capability),
        "get_device_properties": always(properties),
        "_get_device_properties": always(properties),
        "get_arch_list": always([f"sm_{card.gpu.capability[0]}{card.gpu.capability[1]}"]),
        "get_gencode_flags": always(""),
        "is_bf16_supported": always(card.gpu.capability >= (8, 0)),
        "can_device_access_peer": always(False),
        "is_current_stream_capturing": always(False),
        "get_sync_debug_mode": always(0),
        "get_allocator_backend": always("native"),
        "get_per_process_memory_fraction": always(1.0),
        "mem_get_info": lambda *_, **__: (total - stand_in.alive, total),
        "get_memory_info": lambda *_, **__: (total - stand_in.alive, total),
        "memory_stats": lambda *_, **__: _Statistics(stand_in),
        "memory_summary": always(""),
        "memory_snapshot": lambda *_, **__: [],
        "list_gpu_processes": always(""),
        "empty_cache": lambda *_, **__: stand_in.mark(EMPTIED),
        "initial_seed": lambda *_, **__: torch.initial_seed(),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "get_rng_state_all": lambda *_, **__: [torch.get_rng_state()],
        "range": lambda *_, **__: contextlib.nullcontext(),
        "profile": lambda *_, **__: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
    }


def _answering(module: ModuleType, answers: dict[str, Any], stand_in: "Followed") -> Iterator[Patch]:
    """Yield patches by which every public function and class of a module answers, or is refused by its name.

    An answer takes what torch's own function takes, by its signature. Exceptions and types of storages stay.
    """
    for name, real in list(vars(module).items()):
        of_torch = str(getattr(real, "__module__", "")).startswith(("torch.cuda", "torch.accelerator"))
        if isinstance(real, TENSOR_TYPE) or not callable(real) or not of_torch:
            continue
        if name in answers:
            yield mock.patch.object(module, name, _with_signature(real, answers[name]))
        elif name.startswith("_") and name not in REFUSED:
            continue
        elif not isinstance(real, type):
            yield mock.patch.object(
                module, name, functools.wraps(real)(_refusing(f"{module.__name__}.{name}", stand_in))
            )
        elif not issubclass(real, (Exception, torch.storage._LegacyStorage)):
            refused = type(name, (real,), {"__new__": _refusing(f"{module.__name__}.{name}", stand_in)})
            yield mock.patch.object(module, name, refused)


def _with_signature(real: Any, answer: Any) -> Any:
    """Return an answer that takes the arguments of torch's own function, and is no other's.

    torch's compiler keeps a table of torch's functions by identity.
    """
    if isinstance(answer, type):
        return answer
    try:
        signature = inspect.signature(real)
    except ValueError:  # of a function in C
        return lambda *args, **kwargs: answer(*args, **kwargs)

    @functools.wraps(real)
    def answered(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return answer(*args, **kwargs)

    return answered


def _refusing(name: str, stand_in: "Followed") -> Any:
    def refused(*_: object, **__: object) -> Any:
        stand_in.refuse(f"{name} is not followed")

    return refused


def _default_device(context: Any, device: Any) -> None:
    """Make the block in which tensors are put on a device: those of the card on `meta`."""
    context.device, context.prev_mode = _placed(torch.device(device)), None


def _named_default(real: Callable[[], torch.device]) -> Callable[[], torch.device]:
    return lambda: CUDA if real() == META else real()


def _scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
    """Stand in for DataParallel.scatter on one card, which moves what lies on the host."""

    def moved(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.cuda()
        if isinstance(x, dict):
            return {key: moved(value) for key, value in x.items()}
        return type(x)(map(moved, x)) if type(x) in (list, tuple) else x

    return (moved(tuple(inputs)),), (moved(dict(kwargs or {})),)


def _unpinned(block: Any) -> Callable[..., None]:
    """Return the constructor of save_on_cpu without pinned memory, which a machine without a card lacks."""
    make = block.__init__
    return lambda self, pin_memory=False, device_type="cuda": make(self, False, device_type)


def _saved(save: Callable[..., None]) -> Callable[..., None]:
    """Return a torch.save that writes tensors of the card without their numbers, which are not known."""

    def saved(*args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            save(*args, **kwargs)

    return saved


@functools.wraps(torch._utils._rebuild_meta_tensor_no_storage)
def _loaded(dtype: torch.dtype, size: Any, stride: Any, requires_grad: bool) -> Tensor:
    """Make a tensor again that was saved from the card."""
    return torch.empty_strided(size, stride, dtype=dtype, device=CUDA, requires_grad=requires_grad)


def _on_host(rebuild: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that puts a tensor of a file on the host where a program asks for it on `meta`."""

    def rebuilt(storage: Any, offset: int, size: Any, stride: Any) -> Tensor:
        if storage._untyped_storage.device == META:
            return torch.empty_strided(size, stride, dtype=storage.dtype)
        return rebuild(storage, offset, size, stride)

    return rebuilt


class _LegacyTensor:
    """torch.cuda.FloatTensor and its like: makes a tensor of a type on the card."""

    def __init__(self, kind: Any):
        self.dtype = kind.dtype

    def __call__(self, *args: Any) -> Tensor:
        if len(args) == 1 and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=self.dtype).cuda()
        return torch.empty(args, dtype=self.dtype, device=CUDA)


def _finite(ask: Callable[[Tensor], Tensor], answer: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that takes every number on the card to be finite."""

    def finite(x: Tensor) -> Tensor:
        if not on_stand_in(x):
            return ask(x)
        with torch._C.DisableTorchFunction():
            return torch.full(x.shape, answer, device=META)

    return finite


def _keeping_its_class(make: Any) -> Any:
    """Return a constructor of parameters that leaves one of a class of its own as it is, as assigning its data does."""

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if cls is nn.Parameter and isinstance(data, nn.Parameter) and type(data) is not nn.Parameter:
            return data.requires_grad_(requires_grad)
        return make(cls, data, requires_grad)

    return new


class _NoDevice(contextlib.AbstractContextManager["_NoDevice"]):
    """torch.cuda.device, of which there is one."""

    def __init__(self, device: object = None):
        self.idx = self.prev_idx = 0

    def __exit__(self, *problem: object) -> None:
        """Leave the one device."""


class _Statistics(dict[str, int]):
    """torch.cuda.memory_stats: what is asked most, and zero for the rest."""

    def __init__(self, stand_in: "Followed"):
        super().__init__()
        for kind in ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes"):
            self[f"{kind}.all.current"], self[f"{kind}.all.peak"] = stand_in.alive, stand_in.most

    def __missing__(self, key: str) -> int:
        return 0


class _Stream(contextlib.AbstractContextManager["_Stream"]):
    """torch.cuda.Stream: all that is launched on any stream has been done."""

    device, cuda_stream, priority = CUDA, 0, 0

    def __init__(self, *_: object, **__: object):
        pass

    def __exit__(self, *problem: object) -> None:
        """Leave the stream."""

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        """Return an event that is past."""
        return event or _Event()

    def query(self) -> bool:
        """Return True: nothing is waited for."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no graph is captured."""
        return False

    def synchronize(self) -> None:
        """Wait for nothing."""

    wait_event = wait_stream = lambda self, *_: None


class _Event:
    """torch.cuda.Event, which is past; the time between two is a millisecond."""

    def __init__(self, *_: object, **__: object):
        pass

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, other: object) -> float:
        """Return a millisecond."""
        return 1.0

    record = wait = synchronize = lambda self, *_: None


class _Generator(torch.Generator):
    """A generator of random numbers, which lies on the host: numbers on the card are not known."""

    def __new__(cls, device: object = "cpu") -> "_Generator":
        return super().__new__(cls)


def _step_of_scaler(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)


def _loading_here(make: Callable[..., None]) -> Callable[..., None]:
    """Return a data loader that reads in this process: what others do leaves the card alone."""

    def init(self: Any, *args: Any, **options: Any) -> None:
        changed = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
        for name in ("timeout", "multiprocessing_context", "pin_memory_device"):
            options.pop(name, None)
        if len(args) > 5:  # num_workers by position
            args = (*args[:5], 0, *args[6:7], *([False] if len(args) > 7 else []))
            changed.pop("num_workers")
        make(self, *args, **{**options, **{k: v for k, v in changed.items() if k in options or k == "num_workers"}})

    return init
