"""Follows every storage on one device from its allocation to its release, and says what was alive at each peak.

A dispatch mode sees each operation below autograd, on real tensors and on `meta` tensors alike. It cannot see what
kernels allocate inside themselves; peakmem/kernels.py gives that for those that matter.

torch's own MemTracker sees the same storages, on `meta` too. It keeps totals by kind and module: neither the order of
allocations, which the allocator's replay needs, nor a peak for each phase. FakeTensorMode, its usual companion, fails
where peft adds an adapter and where bitsandbytes packs weights (torch 2.13, peft 0.21, bitsandbytes 0.50).
"""

import operator
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peakmem.allocator import rounded
from peakmem.events import BEGIN, PAGED, PRODUCT, Event, Peak, Storage, StorageKind
from peakmem.gradient_sums import ADD, GradientSum, called_by_engine, in_backward
from peakmem.holders import Holders
from peakmem.kernels import multiplies
from peakmem.peaks import peaks_of
from peakmem.tensors import Args, Blocks, Kwargs, Op, tensors_in

ENTER_BLOCK = torch.ops.profiler._record_function_enter_new.default
LEAVE_BLOCK = torch.ops.profiler._record_function_exit._RecordFunction
# Width of the tiles in which TRL's fused head makes logits (trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE). Where the
# vocabulary is smaller, a tile holds whole rows of logits, and space beside them.
LOGITS_TILE = 32768


class Tracker(TorchDispatchMode):
    """Use it as a context manager around the code, and ask for `peaks()` afterwards.

    A phase is a block that the code marks with `torch.profiler.record_function`, if its name is among `phases`; phases
    inside others are joined by a slash and count towards the outer ones as well. Logits are known by their width,
    `vocab_size`. `kernels` maps an operation's name to the bytes that it allocates inside itself, given (args, kwargs).
    """

    def __init__(self, device: str, phases: Collection[str], vocab_size: int, kernels: Mapping[str, Blocks] = {}):
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no annotations
        self.phases = phases
        self._logit_widths = {vocab_size, max(vocab_size, LOGITS_TILE)}
        self._on_device = operator.attrgetter(f"is_{device}")  # of a tensor; `x.device.type` takes four times as long
        self._kernels = kernels
        self._facts: dict[int, tuple[bool, Blocks | None]] = {}  # of operations, by id: whether a product, and inside
        self._holders = Holders()
        self._entered: list[str | None] = []  # blocks, None for those that are not phases
        self._phase: tuple[str, ...] = ()
        self._storages: list[Storage] = []
        self._events: list[Event] = []
        self._names: dict[int, str] = {}  # of operations, by id
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # id of a live storage -> its number
        self._sum: GradientSum | None = None  # the newest one
        self._threads_with_workspace: set[bool] = set()  # the program's own (False), autograd's (True)
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap `__torch_dispatch__` for torch.compile: the wrapper is slow."""
        return False

    # -- while it runs ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._holders.watch()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no annotations
        return self

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]  # torch gives it no annotations
        self._holders.label_tensors(self.label)
        self._holders.stop()

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
            allocated |= self._follow_new(tensor, func)
        if func is ADD and called_by_engine():
            self._note_sum(out, args[0])
        self.has_run(func, args, kwargs, out, allocated)
        return out

    def run(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Execute one operation. A device without memory of its own overrides this."""
        return func(*args, **kwargs)

    def has_run(self, func: Op, args: Args, kwargs: Kwargs, out: object, allocated: bool) -> None:
        """Note what an operation does beside its results, which `allocated` a storage: a product, kernels' memory."""
        facts = self._facts.get(id(func))
        if facts is None:
            facts = self._facts[id(func)] = multiplies(func), self._kernels.get(func._schema.name)
        product, inside = facts
        if product:
            self._note_product()
        if inside is not None:
            self._allocate_inside(inside(args, kwargs), f"{func} (inside)")

    def count_product(self, flops: int) -> None:
        """Note a product of so many operations that runs outside of torch."""
        self._note_product()

    def _note_product(self) -> None:
        """Mark the first product of the forward and of the backward thread as PRODUCT."""
        if in_backward() not in self._threads_with_workspace:
            self._threads_with_workspace.add(in_backward())
            self.mark(PRODUCT)

    def mark(self, name: str) -> None:
        """Put a mark among the events (peakmem/events.py)."""
        self._events.append(Event(None, 0, self._phase, name))

    def label(self, tensor: Tensor | None, component: StorageKind) -> None:
        """Label a tensor's storage with a component, at any time while it lives; the first label wins."""
        if tensor is None or not self._on_device(tensor):
            return
        key = id(tensor.untyped_storage())
        if key not in self._live and not self._follow_new(tensor, component):
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

    # -- what was seen so far --------------------------------------------------------

    @property
    def phase(self) -> tuple[str, ...]:
        """Return the phase that runs, from the outermost name to the innermost."""
        return self._phase

    def storage_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, or None if it is not followed."""
        number, _ = self._live.get(id(tensor.untyped_storage()), (None, None))
        return number

    # -- afterwards ------------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Return what torch's allocator was asked for, and the marks, in order; unified memory is left out."""
        component_of = self.components()
        return [event for event in self._events if event.storage is None or component_of[event.storage] != PAGED]

    def peaks(self) -> dict[str, Peak]:
        """Return the peak of each phase by its name; WHOLE is the whole program.

        Phases are in the order in which they began.
        """
        return peaks_of(self._events, self.components())

    def components(self) -> list[StorageKind]:
        """Return the component of each storage, by its number."""
        return [storage.resolved_component() for storage in self._storages]

    # -- details ---------------------------------------------------------------------------------------------------

    def _enter_block(self, name: str) -> None:
        self._entered.append(name if name in self.phases else None)
        self._change_phase()

    def _leave_block(self) -> None:
        self._entered.pop()
        self._change_phase()

    def _change_phase(self) -> None:
        phase = tuple(name for name in self._entered if name)
        if phase != self._phase:
            self._holders.label_tensors(self.label)
            self._phase = phase
            self.mark(BEGIN)  # what is alive now is alive in the new phase

    def _follow_new(self, tensor: Tensor, operation: object) -> bool:
        """Follow a tensor's storage from now on. Return whether it is new."""
        if not self._on_device(tensor):
            return False
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or self._paused:
            return False
        size = storage.nbytes()
        if not size:
            return False
        name = self._names.get(id(operation)) or self._names.setdefault(id(operation), str(operation))
        number = self.allocate(size, name)
        self.follow(storage, number)
        if tensor.dim() > 1 and tensor.shape[-1] in self._logit_widths and tensor.is_floating_point():
            self._storages[number].component = "logits"
        return True

    def follow(self, storage: torch.UntypedStorage, number: int) -> None:
        """Note from now on when a storage is released, whose number is given."""
        key = id(storage)
        self._live[key] = number, weakref.ref(storage, lambda _: self._free(key))

    def allocate(self, size: int, operation: str) -> int:
        """Record an allocation of `size` bytes. Return the number of the new storage."""
        size = rounded(size)
        self._storages.append(Storage(size, self._phase, in_backward()))
        # With its size, which depth does not change, an operation stands for one place in the program, nearly always.
        self._events.append(Event(len(self._storages) - 1, size, self._phase, f"{operation}, {size} bytes"))
        return len(self._storages) - 1

    def _release(self, number: int) -> None:
        """Record the release of a storage."""
        self._events.append(Event(number, -self._storages[number].bytes, self._phase, ""))

    def _free(self, key: int) -> None:
        """Note that a storage which was alive is gone."""
        number, _ = self._live.pop(key)
        storage = self._storages[number]
        if self._sum is not None and self._sum.replaces(number, storage.bytes, self._events[-1]):
            self._put_in_place(self._sum)
            return
        storage.freed_in, storage.freed_in_backward = self._phase, in_backward()
        self._release(number)

    def _allocate_inside(self, sizes: int | tuple[int, ...], operation: str) -> None:
        """Record what a kernel allocates, writes, reads again and releases."""
        numbers = []
        for size in filter(None, sizes if isinstance(sizes, tuple) else (sizes,)):
            numbers.append(self.allocate(size, operation))
            self._storages[numbers[-1]].component = "kernels"
        for number in numbers:
            self._release(number)

    def _note_sum(self, total: Tensor, first: Tensor) -> None:
        """Remember the newest sum of two gradients that autograd's engine has made."""
        made, summand = self.storage_of(total), self.storage_of(first)
        if made is None or summand is None:
            self._sum = None
        else:
            self._sum = GradientSum(id(total.untyped_storage()), made, summand)

    def _put_in_place(self, made: GradientSum) -> None:
        """Let a sum live in its first summand, as if it had not been allocated."""
        self._events.pop()
        self._live[made.key] = made.first, self._live[made.key][1]
