"""What the allocator reserves while a program runs: the tracker's events, replayed."""

from collections.abc import Sequence

from peakmem.allocator import Allocator, Block
from peakmem.events import BEGIN, CAPTURE, CAPTURED, DROPPED, EMPTIED, PRODUCT, Event, Reserved

# On a full card blocks are placed differently than on one with room: stages of 4090-llama2-7b v2, replayed on cards of
# just the size that they need, needed up to 1.2 % more than what was held at the peak.
TIGHT = 0.02

Name = tuple[str, ...]


def replay(
    events: Sequence[Event],
    expandable: bool,
    workspace: int = 0,
    capacity: int | None = None,
    emptied_every: int = 1,
) -> dict[str, Reserved]:
    """Return the reserved bytes of each phase by its name, WHOLE for all events.

    An inner phase counts for the outer ones too.

    `workspace` is that of cuBLAS in bytes; a captured graph has one of its own. `capacity` as in Allocator. The cache
    is emptied before each `emptied_every`-th capture, by default before each, as torch.cuda.graph does it. Raises
    OutOfMemory if the capacity does not suffice.
    """
    allocator = Allocator(expandable, capacity)
    highest = _highest(events)
    blocks: dict[int, Block] = {}
    peaks: dict[Name, Reserved] = {(): Reserved(0, 0, 0)}
    graph = 0
    capturing: object = None  # the private pool of a graph
    for index, (storage, size, phase, name) in enumerate(events):
        if storage is not None:
            if size > 0:
                blocks[storage] = allocator.malloc(size, capturing)
            else:
                allocator.free(blocks.pop(storage))
        elif name == BEGIN:
            _count(peaks, events[index - 1].phase if index else (), allocator, 0)
            allocator.reset_peaks()
        elif name == PRODUCT and workspace:
            allocator.malloc(workspace, capturing)
        elif name == CAPTURE:
            graph += 1
            if graph % emptied_every == 0:
                allocator.empty_cache()
            capturing = graph
            if workspace:
                blocks[-graph] = allocator.malloc(workspace, capturing)
        elif name == CAPTURED:
            capturing = None
        elif name == EMPTIED:
            allocator.empty_cache()
        elif name == DROPPED and graph:
            allocator.release(graph)
            if -graph in blocks:
                allocator.free(blocks.pop(-graph))
        if index in highest:
            _count(peaks, phase, allocator, _needed(allocator))
    return {"/".join(phase): reserved for phase, reserved in peaks.items()}


def _count(peaks: dict[Name, Reserved], phase: Name, allocator: Allocator, needed: int) -> None:
    """Count the allocator's peaks for a phase and those that it is inside of."""
    for depth in range(len(phase) + 1):
        before = peaks.get(phase[:depth], Reserved(0, 0, 0))
        now = Reserved(allocator.peak_allocated, allocator.peak_reserved, needed)
        highest = Reserved(*map(max, before, now))
        peaks[phase[:depth]] = highest._replace(needed=min(highest.needed, highest.reserved))


def _needed(allocator: Allocator) -> int:
    """Return the least bytes of the card that the allocator needs at this moment, with `TIGHT` added.

    Once the card is full, the free pages of an expandable segment are used elsewhere. Free segments of a fixed size are
    too, but then others do not fit into what is left. All of them count therefore.
    """
    if not allocator.expandable:
        return allocator.reserved
    return round((allocator.reserved - allocator.releasable()) * (1 + TIGHT))


def _highest(events: Sequence[Event]) -> set[int]:
    """Return the indices of the events after which most is allocated, of each phase; the end counts as one too."""
    most: dict[Name, tuple[int, int]] = {}
    total = 0
    for index, (_, size, phase, _) in enumerate(events):
        total += size
        if total > most.get(phase, (-1, 0))[0]:  # never after a release: a phase begins with a mark
            most[phase] = total, index
    return {index for _, index in most.values()} | {len(events) - 1}
