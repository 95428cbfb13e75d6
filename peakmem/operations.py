"""What is counted of one operation of torch: floating-point operations, and what it writes, allocates or picks."""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from peakmem.events import Work
from peakmem.kernels import FLOPS
from peakmem.tensors import Args, Blocks, Kwargs, Op, tensors_in

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # these launch no kernel
PICKS = {"embedding", "index", "index_select", "gather"}
Flops = Callable[[Args, Kwargs, object], int]  # floating-point operations from (args, kwargs, result)


class Counts(NamedTuple):
    """What is counted of one operation of torch."""

    flops: Flops | None  # of products
    inside: Blocks | None  # that its kernels allocate, from (args, kwargs)
    writes: bool  # into an argument
    allocates: bool  # and launches no kernel
    picks: bool  # rows of its first argument

    @classmethod
    def of(cls, func: Op, inside: Blocks | None) -> "Counts":
        """Return what is counted of an operation, of whose kernels `inside` counts the memory."""
        name = func._schema.name.removeprefix("aten::")
        return cls(_flops_of(func), inside, func._schema.is_mutable, name in ALLOCATIONS, name in PICKS)


class OperationCounter:
    """Counts operations on one device. `kernels` maps an operation's name to the bytes that it allocates inside."""

    def __init__(self, device: str, kernels: Mapping[str, Blocks]):
        self.on_device = operator.attrgetter(f"is_{device}")  # of a tensor; `x.device.type` takes four times as long
        self._kernels = kernels
        self._counts: dict[int, Counts] = {}  # by an operation's id: operations live for ever, and take long to hash

    def counts_of(self, func: Op) -> Counts:
        """Return what is counted of an operation."""
        counts = self._counts.get(id(func))
        if counts is None:
            counts = self._counts[id(func)] = Counts.of(func, self._kernels.get(func._schema.name))
        return counts

    def add_moves(self, work: Work, counts: Counts, args: Args, kwargs: Kwargs, out: object) -> None:
        """Count in `work` an operation that works on the device, and what it moves unless it is a product.

        One that picks rows reads as much as it writes; others read every input once.
        """
        if counts.allocates:
            return
        work.launched += 1
        if counts.flops is None:
            written = self._bytes_of(out)
            read = written if counts.picks else self._bytes_of(args) + self._bytes_of(tuple(kwargs.values()))
            work.moved += read + written

    def _bytes_of(self, things: object) -> int:
        """Return the bytes of the tensors on the device."""
        total = 0
        for x in tensors_in(things):
            if self.on_device(x):
                total += x.nbytes
        return total


def _flops_of(func: Op) -> Flops | None:
    """Return what counts an operation's floating-point operations; None if it multiplies nothing.

    Torch counts no product that is added in place, such as `addmm_`: it has those of the operation without underscore.
    """
    if (ours := FLOPS.get(func._schema.name)) is not None:
        return lambda args, kwargs, out: ours(args, kwargs)
    plain = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::").removesuffix("_"), None)
    packet = func._overloadpacket if func._overloadpacket in flop_registry else plain
    if packet in flop_registry:
        count = flop_registry[packet]
        of_shapes = getattr(count, "__wrapped__", None)  # without torch's walk that turns tensors into shapes
        if of_shapes is None:
            return lambda args, kwargs, out: count(*args, **kwargs, out_val=out)
        return lambda args, kwargs, out: of_shapes(*map(_shape, args), **kwargs, out_shape=_shape(out))
    return None


def _shape(value: Any) -> Any:
    """Return a tensor's shape, the shapes of several, and anything else as it is."""
    if isinstance(value, Tensor):
        return value.shape
    return type(value)(map(_shape, value)) if type(value) in (list, tuple) else value
