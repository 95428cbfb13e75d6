"""What a rehearsal computes, moves and launches, beside the memory that peakmem's tracker follows.

Floating-point operations are those of products; bytes are what all others read and write.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from peakmem import StandIn, Tracker, known_numbers
from peakmem.kernels import OF_VARIABLE_LENGTHS, VARIABLE_LENGTHS
from peakmem.patches import bitsandbytes
from peakmem.tensors import Args, Count, Kwargs, Op, tensors_in
from rlhf.plan.phases import Peak, Work

aten = torch.ops.aten
# A CPU's kernel and its backward pass, which torch does not count, as those that it does.
COUNTED_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # these launch no kernel
PICKS = {"embedding", "index", "index_select", "gather"}
Flops = Callable[[Args, Kwargs, object], int]  # floating-point operations from (args, kwargs, result)


class Counts(NamedTuple):
    """What is counted of one operation of torch."""

    flops: Flops | None  # of products
    writes: bool  # into an argument
    allocates: bool  # and launches no kernel
    picks: bool  # rows of its first argument

    @classmethod
    def of(cls, func: Op) -> "Counts":
        """Return what is counted of an operation."""
        name = func._schema.name.removeprefix("aten::")
        return cls(_flops_of(func), func._schema.is_mutable, name in ALLOCATIONS, name in PICKS)


class Counting(Tracker):
    """A tracker that also counts what each phase computes, moves and launches."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._counts: dict[int, Counts] = {}  # by an operation's id: operations live for ever, and take long to hash
        self._work_here = Work()  # of the phase that runs
        self._work: dict[tuple[str, ...], Work] = {(): self._work_here}  # of each phase
        self._settled: dict[tuple[str, ...], Work] = {}  # the same when `settle_work` was called last

    def has_run(self, func: Op, args: Args, kwargs: Kwargs, out: object, allocated: bool) -> None:
        """Count an operation."""
        super().has_run(func, args, kwargs, out, allocated)
        counts = self._counts.get(id(func)) or self._counts.setdefault(id(func), Counts.of(func))
        if counts.flops is not None:
            self._work_here.flops += counts.flops(args, kwargs, out)
        if allocated or (counts.writes and any(map(self._on_device, tensors_in(args)))):
            self._add_moves(counts, args, kwargs, out)

    def count_product(self, flops: int) -> None:
        """Count a product that runs outside of torch."""
        super().count_product(flops)
        self._work_here.flops += flops

    def _add_moves(self, counts: Counts, args: Args, kwargs: Kwargs, out: object) -> None:
        """Count an operation that works on the device, and what it moves unless it is a product.

        One that picks rows reads as much as it writes; others read every input once.
        """
        if counts.allocates:
            return
        self._work_here.launched += 1
        if counts.flops is None:
            written = self._bytes_of(out)
            read = written if counts.picks else self._bytes_of(args) + self._bytes_of(tuple(kwargs.values()))
            self._work_here.moved += read + written

    def _bytes_of(self, things: object) -> int:
        """Return the bytes of the tensors on the device."""
        return sum(x.nbytes for x in tensors_in(things) if self._on_device(x))

    def _allocate_inside(self, sizes: int | tuple[int, ...], operation: str) -> None:
        super()._allocate_inside(sizes, operation)
        self._work_here.moved += 2 * (sum(sizes) if isinstance(sizes, tuple) else sizes)  # written, and read again

    def _change_phase(self) -> None:
        super()._change_phase()
        self._work_here = self._work.setdefault(self._phase, Work())

    def settle_work(self, phases: Collection[str], counts: bool) -> None:
        """Keep what phases of these names have computed, moved and launched since the last call, or forget it.

        It is kept if it `counts`. The phases inside them are settled with them.
        """
        for phase in self._work:
            if not counts and phase and phase[0] in phases:
                self._work[phase] = replace(self._settled.get(phase, Work()))
        self._work_here = self._work[self._phase]
        self._settled = {phase: replace(work) for phase, work in self._work.items()}

    def worked_peaks(self) -> dict[str, Peak]:
        """Return the peak of each phase by its name, with its work; WHOLE is the whole program."""
        peaks = {name: Peak(peak.by_operation, peak.paged) for name, peak in self.peaks().items()}
        for phase, work in self._work.items():
            for depth in range(len(phase) + 1):
                peaks.setdefault("/".join(phase[:depth]), Peak()).work += work
        return peaks


class CountingStandIn(Counting, StandIn):
    """The device that is stood in for, whose work is counted too."""


def _flops_of(func: Op) -> Flops | None:
    """Return what counts an operation's floating-point operations; None if it multiplies nothing.

    Torch counts no product that is added in place, such as `addmm_`: it has those of the operation without underscore.
    """
    if (ours := FLOPS.get(func._schema.name)) is not None:
        return lambda args, kwargs, out: ours(args, kwargs)
    packet = func._overloadpacket
    plain = getattr(aten, func._schema.name.removeprefix("aten::").removesuffix("_"), None)
    counted = packet if packet in flop_registry else COUNTED_AS.get(packet, plain)
    if counted not in flop_registry:
        return None
    of_shapes = flop_registry[counted].__wrapped__  # without torch's walk that turns tensors into shapes
    return lambda args, kwargs, out: of_shapes(*map(_shape, args), **kwargs, out_shape=_shape(out))


def _shape(value: Any) -> Any:
    """Return a tensor's shape, the shapes of several, and anything else as it is."""
    if isinstance(value, Tensor):
        return value.shape
    return type(value)(map(_shape, value)) if type(value) in (list, tuple) else value


# -- operations of products that torch does not count, or not without data ---------------------------------------------


def _variable_lengths_flops(args: Args, kwargs: Kwargs) -> int:
    """Return the operations of every query to all keys of its sequence, causal or not."""
    return 4 * _scores(args[0], args[3], args[4], args[6])


def _variable_lengths_backward_flops(args: Args, kwargs: Kwargs) -> int:
    """Return the operations of the backward pass, which computes the scores again."""
    return 10 * _scores(args[1], args[6], args[7], args[9])


def _scores(query: Tensor, bounds: Tensor, key_bounds: Tensor, longest: int) -> int:
    """Return the numbers in `query` (N, heads, D) times the keys of their sequences, which lie between the bounds.

    Where the bounds are not known, each sequence has as many keys as the longest.
    """
    ends, key_ends = known_numbers(bounds), known_numbers(key_bounds)
    if ends is None or key_ends is None:
        return query.numel() * longest
    return query[0].numel() * int((ends.long().diff() * key_ends.long().diff()).sum())


FLOPS: dict[str, Count] = {
    **dict.fromkeys(VARIABLE_LENGTHS, _variable_lengths_flops),
    OF_VARIABLE_LENGTHS: _variable_lengths_backward_flops,
    bitsandbytes.PRODUCT: lambda args, kwargs: 2 * args[0].numel() * args[2][0],
}
