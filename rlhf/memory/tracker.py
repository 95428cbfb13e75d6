"""Follows every storage on one device from its allocation to its release, and says what was alive at each peak.

A dispatch mode sees each operation below autograd, on real tensors and on `meta` tensors alike. What kernels allocate
inside themselves it cannot see; rlhf/memory/kernels.py says that for those that matter.

torch's own MemTracker sees the same storages, on `meta` too. It keeps totals by kind and module: neither the order of
allocations, which the allocator's replay needs, nor a peak for each phase. FakeTensorMode, its usual companion, fails
where peft adds an adapter and where bitsandbytes packs weights (torch 2.13, peft 0.21, bitsandbytes 0.50).
"""

import copy
import functools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.memory.kernels import Args, Count, Kwargs, Op
from rlhf.memory.operations import Counts, tensors_in
from rlhf.memory.peaks import OUTSIDE, OperationCounts, Storage, around, peaks_of
from rlhf.memory.phases import Event, Peak
from rlhf.memory.replay import BEGIN, PRODUCT

ROUND = 512  # bytes: torch's CUDA allocator hands out multiples of it (kMinBlockSize in CUDACachingAllocator)
ENTER_BLOCK = torch.ops.profiler._record_function_enter_new.default
LEAVE_BLOCK = torch.ops.profiler._record_function_exit._RecordFunction
ADD = torch.ops.aten.add.Tensor


class Tracker(TorchDispatchMode):
    """Use it as a context manager around the code, and ask for `peaks()` afterwards.

    A phase is a block that the code marks with `torch.profiler.record_function`, if its name is among `phases`; phases
    inside others are joined by a slash and count towards the outer ones as well. `kernels` maps an operation to the
    bytes that it allocates inside itself, given (args, kwargs).
    """

    def __init__(self, device: str, phases: Collection[str], vocab_size: int, kernels: Mapping[Op, Count] = {}):
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no annotations
        self.device_type, self.phases, self.vocab_size, self.kernels = device, phases, vocab_size, kernels
        self._is_here = operator.attrgetter(f"is_{device}")  # of a tensor; `x.device.type` takes four times as long
        self._entered: list[str | None] = []  # blocks, None for those that are not phases
        self._phase: tuple[str, ...] = ()
        self._storages: list[Storage] = []
        self._events: list[Event] = []
        self._names: dict[int, str] = {}  # of operations, by id
        self._counts: dict[int, Counts] = {}  # by an operation's id
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # id of a live storage -> its index
        self._sum: tuple[int, int, int] | None = None  # key of a gradients' sum, its index, that of its first summand
        self._multiplied: set[bool] = set()  # threads that have: the program's own (False), autograd's (True)
        self._flops: Counter[tuple[str, ...]] = Counter()
        self._recomputed: Counter[tuple[str, ...]] = Counter()
        self._moved: Counter[tuple[str, ...]] = Counter()
        self._launched: Counter[tuple[str, ...]] = Counter()
        self.recomputing = 0  # above 0 while a forward pass is computed again
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._paused = False
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap `__torch_dispatch__` for torch.compile: the wrapper is slow."""
        return False

    # -- while it runs ---------------------------------------------------------------------------------------------

    def __enter__(self) -> "Tracker":
        for kind, instances in ((nn.Module, self._modules), (torch.optim.Optimizer, self._optimizers)):
            self._undo.append(_note_instances(kind, instances))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no annotations
        return self

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]  # torch gives it no annotations
        self.label_what_is_known()
        while self._undo:
            self._undo.pop()()

    def __torch_dispatch__(self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if func is ENTER_BLOCK:
            self._enter_block(args[0])
            return func(*args, **kwargs)
        if func is LEAVE_BLOCK:
            self._leave_block()
            return func(*args, **kwargs)
        out = self.run(func, args, kwargs)
        allocated = False
        for tensor in (out,) if type(out) is Tensor else tensors_in(out):
            allocated |= self._see(tensor, func)
        if func is ADD and _in_backward() and _called_by_engine():
            self._note_sum(out, args[0])
        counts = self._counts.get(id(func))  # torch's operations live for ever, and take long to hash
        if counts is None:
            counts = self._counts[id(func)] = Counts.of(func, self.kernels.get(func))
        if counts.flops is not None:
            self.count_flops(counts.flops(args, kwargs, out), recomputed=self.recomputing > 0)
        if allocated or counts.writes:
            self._count_traffic(counts, args, kwargs, out)
        if counts.inside is not None:
            self._inside(counts.inside(args, kwargs), f"{func} (inside)")
        return out

    def run(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Execute one operation. A device without memory of its own overrides this."""
        return func(*args, **kwargs)

    def count_flops(self, flops: int, recomputed: bool = False) -> None:
        """Add floating-point operations to the phase that runs; `recomputed`: a backward pass repeats them.

        The first of the forward and of the backward thread are marked as PRODUCT.
        """
        if _in_backward() not in self._multiplied:
            self._multiplied.add(_in_backward())
            self.mark(PRODUCT)
        self._flops[self._phase] += flops
        self._recomputed[self._phase] += flops if recomputed else 0

    def _count_traffic(self, counts: "Counts", args: Args, kwargs: Kwargs, out: object) -> None:
        """Count an operation that works on the device, and what it moves unless it is a product.

        One that picks rows reads as much as it writes; others read every input once.
        """
        if counts.allocates:
            return
        self._launched[self._phase] += 1
        if counts.flops is None:
            written = self._bytes_of(out)
            read = written if counts.picks else self._bytes_of(args) + self._bytes_of(tuple(kwargs.values()))
            self._moved[self._phase] += read + written

    def _bytes_of(self, things: object) -> int:
        total = 0
        for x in tensors_in(things):
            if self._is_here(x):
                total += x.nbytes
        return total

    def mark(self, name: str) -> None:
        """Put a mark among the events (rlhf/memory/replay.py)."""
        self._events.append(Event(None, 0, self._phase, name))

    def label(self, tensor: Tensor | None, component: str) -> None:
        """Label a tensor's storage with a component, at any time while it lives; the first label wins."""
        if tensor is None or not self._is_here(tensor):
            return
        key = id(tensor.untyped_storage())
        if key not in self._live and not self._see(tensor, component):
            return
        storage = self._storages[self._live[key][0]]
        if storage.component is None:
            storage.component = component

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Track nothing inside the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def label_what_is_known(self) -> None:
        """Label the weights, gradients and optimizer states that are there now."""
        modules = self._all_modules()
        adapters = {
            id(part)
            for module in modules
            if isinstance(module, LoraLayer)
            for side in (module.lora_A, module.lora_B)
            for part in side._modules.values()
        }
        for module in modules:
            head = isinstance(module, nn.Linear) and module.out_features == 1
            component = "adapters" if id(module) in adapters else "heads" if head else "base"
            for own in module._parameters.values():  # torch's own walks take many times as long
                if own is not None:
                    self._label_parameter(own, component)
            for buffer in module._buffers.values():
                self.label(buffer, "base")
        for optimizer in list(self._optimizers):
            for state in optimizer.state.values():
                for value in tensors_in(*state.values()):
                    self.label(value, "optimizer")

    # -- what was seen so far, and what is repeated (rlhf/memory/passes.py) ----------------------------------------

    @property
    def phase(self) -> tuple[str, ...]:
        """Return the phase that runs, from the outermost name to the innermost."""
        return self._phase

    def position(self) -> int:
        """Return the number of events so far."""
        return len(self._events)

    def events_since(self, position: int) -> list[Event]:
        """Return the events after the first `position`."""
        return self._events[position:]

    def storage_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, or None if it is not followed."""
        index, _ = self._live.get(id(tensor.untyped_storage()), (None, None))
        return index

    def storages(self, numbers: Iterable[int]) -> dict[int, Storage]:
        """Return copies of storages by their numbers."""
        return {number: copy.copy(self._storages[number]) for number in numbers}

    def work(self) -> OperationCounts:
        """Return what the phase that runs has computed, moved and launched so far."""
        flops, recomputed, moved, launched = (counter[self._phase] for counter in self._counters())
        return flops, recomputed, moved, launched

    def repeat(self, events: Iterable[Event], storages: Mapping[int, Storage], work: OperationCounts) -> dict[int, int]:
        """Record events and work again, with new storages. Return the new number of each of `storages`."""
        numbers: dict[int, int] = {}
        for event in events:
            if event.storage is None:
                self._events.append(event)
                continue
            if event.bytes > 0:
                numbers[event.storage] = len(self._storages)
                self._storages.append(copy.copy(storages[event.storage]))
            self._events.append(event._replace(storage=numbers[event.storage]))
        for counter, amount in zip(self._counters(), work, strict=True):
            counter[self._phase] += amount
        return numbers

    # -- afterwards ------------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Return what torch's allocator was asked for, and the marks, in order; unified memory is left out."""
        component_of = self._components()
        return [event for event in self._events if event.storage is None or component_of[event.storage] != OUTSIDE]

    def peaks(self) -> dict[str, Peak]:
        """Return the peak of each phase by its name; "" is the peak of the whole program.

        Phases are in the order in which they began.
        """
        peaks = peaks_of(self._events, self._components())
        self._add_work(peaks)
        return peaks

    # -- details ---------------------------------------------------------------------------------------------------

    def _components(self) -> list[str]:
        """Return the component of each storage, by its number."""
        return [storage.resolved_component() for storage in self._storages]

    def _counters(self) -> tuple[Counter[tuple[str, ...]], ...]:
        return self._flops, self._recomputed, self._moved, self._launched

    def _add_work(self, peaks: dict[str, Peak]) -> None:
        """Add what each phase computed, moved and launched to the peaks of the phases around it."""
        for phase, flops in self._flops.items():
            for peak in around(peaks, phase):
                peak.flops += flops
                peak.recomputed += self._recomputed[phase]
        for phase, launched in self._launched.items():
            for peak in around(peaks, phase):
                peak.launched += launched
                peak.moved += self._moved[phase]

    def _enter_block(self, name: str) -> None:
        self._entered.append(name if name in self.phases else None)
        self._change_phase()

    def _leave_block(self) -> None:
        self._entered.pop()
        self._change_phase()

    def _change_phase(self) -> None:
        phase = tuple(name for name in self._entered if name)
        if phase != self._phase:
            self.label_what_is_known()
            self._phase = phase
            self.mark(BEGIN)  # what is alive now is alive in the new phase

    def _see(self, tensor: Tensor, operation: object) -> bool:
        """Follow a tensor's storage from now on. Returns whether it is new."""
        if not self._is_here(tensor):
            return False
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or self._paused:
            return False
        size = storage.nbytes()
        if not size:
            return False
        name = self._names.get(id(operation)) or self._names.setdefault(id(operation), str(operation))
        index = self._add(size, name)
        self.follow(storage, index)
        if tensor.dim() > 1 and tensor.shape[-1] >= self.vocab_size and tensor.is_floating_point():
            self._storages[index].component = "logits"
        return True

    def follow(self, storage: torch.UntypedStorage, index: int) -> None:
        """Note the release of a storage, whose number is `index`."""
        key = id(storage)
        self._live[key] = index, weakref.ref(storage, lambda _: self._free(key))

    def _add(self, size: int, operation: str) -> int:
        size = -(-size // ROUND) * ROUND
        self._storages.append(Storage(size, self._phase, _in_backward()))
        # With its size, which depth does not change, an operation stands for one place in the program, nearly always.
        self._events.append(Event(len(self._storages) - 1, size, self._phase, f"{operation}, {size} bytes"))
        return len(self._storages) - 1

    def _free(self, key: int) -> None:
        index, _ = self._live.pop(key)
        storage = self._storages[index]
        if self._sum is not None and self._sum[1:] == (self._events[-1].storage, index):
            self._replace_sum()
            return
        storage.freed_in, storage.freed_in_backward = self._phase, _in_backward()
        self._events.append(Event(index, -storage.bytes, self._phase, ""))

    def _inside(self, size: int, operation: str) -> None:
        if size:
            index = self._add(size, operation)
            self._storages[index].component = "kernels"
            self._moved[self._phase] += 2 * size  # written and read again
            self._events.append(Event(index, -self._storages[index].bytes, self._phase, ""))

    def _note_sum(self, total: Tensor, first: Tensor) -> None:
        """Remember the sum of two gradients that autograd's engine has just made."""
        key = id(total.untyped_storage())
        index, summand = self.storage_of(total), self.storage_of(first)
        self._sum = None
        if index is not None and summand is not None and self._storages[index].bytes == self._storages[summand].bytes:
            self._sum = (key, index, summand)

    def _replace_sum(self) -> None:
        """Let a sum live in its first summand, which was released right after it was made.

        Without a dispatch mode autograd adds in place there (accumulate in torch/csrc/autograd/input_buffer.cpp and
        accumulate_grad.h); a mode counts as a tensor subclass, for which it does not.
        """
        assert self._sum is not None
        key, index, summand = self._sum
        self._sum = None
        self._events.pop()
        if key in self._live:  # else it is gone already
            self._live[key] = summand, self._live[key][1]
        component = self._storages[index].component
        self._storages[summand].component = self._storages[summand].component or component

    def _all_modules(self) -> list[nn.Module]:
        """Return the modules that were constructed, and copies inside them, whose constructors did not run."""
        modules: dict[int, nn.Module] = {}
        waiting = list(self._modules)
        while waiting:
            module = waiting.pop()
            if id(module) not in modules:
                modules[id(module)] = module
                waiting += filter(None, module._modules.values())
        return list(modules.values())

    def _label_parameter(self, parameter: nn.Parameter, component: str) -> None:
        self.label(parameter, component)
        state = getattr(parameter, "quant_state", None)
        for part in (state, state.state2) if state is not None else ():
            for tensor in (part.absmax, part.code, part.offset) if part is not None else ():
                self.label(tensor, "quantization")
        self.label(parameter.grad, "gradients")
        if parameter.requires_grad and not hasattr(parameter, "_tracked"):
            parameter._tracked = True  # type: ignore[attr-defined]  # an attribute of this module
            hook = parameter.register_post_accumulate_grad_hook(lambda p: self.label(p.grad, "gradients"))
            self._undo += [hook.remove, functools.partial(_unmark, weakref.ref(parameter))]


def _unmark(parameter: "weakref.ref[nn.Parameter]") -> None:
    alive = parameter()
    if alive is not None:
        delattr(alive, "_tracked")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _called_by_engine() -> bool:
    """Return whether autograd's engine has called the operation that is dispatched, and no Python code inside a node.

    Its nearest Python caller is then the function that starts the backward pass. torch wraps `__torch_dispatch__` in
    two functions of its own.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("_fn", "inner"):
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def _note_instances(kind: Any, instances: weakref.WeakSet[Any]) -> Callable[[], None]:
    """Let every new instance of a class be added to `instances`; returns what ends that."""
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        instances.add(self)

    kind.__init__ = __init__
    return lambda: setattr(kind, "__init__", original)
