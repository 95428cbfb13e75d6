"""A memory snapshot in torch's own format, of a card that nobody has: pytorch.org/memory_viz shows its timeline.

The format is that of torch.cuda.memory._snapshot (torch/csrc/cuda/memory_snapshot.cpp): segments with their blocks as
they are at the end, and a trace of what was allocated and released, each with its lines of the program. Times are
the numbers of the events.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakmem.allocator import HIGHEST_ADDRESS, LARGE_SEGMENT, Allocator, Block, Pool, segment_size
from peakmem.events import EMPTIED, PRODUCT, Event

if TYPE_CHECKING:
    from peakmem.script import Made

TOP = 0x7F00_0000_0000  # where addresses end, as on a card; the viewer's numbers are exact up to 2⁵³
Frames = list[dict[str, Any]]


class Traced(Allocator):
    """The allocator's replay, which also writes a trace."""

    def __init__(self, expandable: bool):
        super().__init__(expandable)
        self.trace: list[dict[str, Any]] = []
        self.frames: Frames = []  # of what is asked for now
        self.alive: dict[int, tuple[Block, Frames]] = {}  # by address
        self.segments: dict[int, int] = {}  # sizes by address

    def note(self, action: str, address: int, size: int, frames: Frames) -> None:
        """Write an entry of the trace."""
        self.trace.append(
            {
                "action": action,
                "addr": _shown(address),
                "size": size,
                "stream": 0,
                "time_us": len(self.trace),
                "frames": frames,
            }
        )

    def malloc(self, size: int, private: object = None) -> Block:
        """Return a block, as the allocator does, and note it."""
        block = super().malloc(size, private)
        self.alive[block.address] = block, self.frames
        self.note("alloc", block.address, block.size, self.frames)
        return block

    def free(self, block: Block) -> None:
        """Give a block back, and note it."""
        _, frames = self.alive.pop(block.address)
        self.note("free_requested", block.address, block.size, frames)
        self.note("free_completed", block.address, block.size, frames)
        super().free(block)

    def empty_cache(self) -> None:
        """Return unused memory to the card, and note whole segments."""
        before = dict(self._free_segments())
        super().empty_cache()
        for address, size in before.items():
            if not self.expandable and address in self.segments:
                del self.segments[address]
                self.note("segment_free", address, size, [])

    def _free_segments(self) -> list[tuple[int, int]]:
        blocks = [block for pool in self._pools[None] for _, _, block in pool.blocks]
        return [(block.address, block.size) for block in blocks if self._returnable_bytes(block) == block.size]

    def _new(self, pool: Pool, size: int) -> Block | None:
        block = super()._new(pool, size)
        if block is not None and not self.expandable:
            self.segments[block.address] = segment_size(size)
            self.note("segment_alloc", block.address, segment_size(size), self.frames)
        return block

    def _map(self, block: Block, size: int) -> bool:
        address, pages = block.address, -(-size // block.pool.page) * block.pool.page
        mapped = super()._map(block, size)
        if mapped:
            self.note("segment_map", address, pages, self.frames)
        return mapped

    def _unmap(self, block: Block) -> None:
        before = self.reserved
        start = -(-block.address // block.pool.page) * block.pool.page
        super()._unmap(block)
        self.note("segment_unmap", start, before - self.reserved, [])


def of(events: Sequence[Event], made: Sequence["Made"], expandable: bool, workspace: int) -> dict[str, Any]:
    """Return the snapshot of a run; `made` has the line that made each storage."""
    allocator = Traced(expandable)
    blocks: dict[int, Block] = {}
    for storage, size, phase, name in events:
        if storage is None:
            allocator.frames = [_frame("cuBLAS", "workspace")]
            if name == PRODUCT and workspace:
                allocator.malloc(workspace)
            elif name == EMPTIED:
                allocator.empty_cache()
        elif size > 0:
            allocator.frames = [_frame(made[storage].line, name.partition(", ")[0]), _frame("/".join(phase), "phase")]
            blocks[storage] = allocator.malloc(size)
        else:
            allocator.free(blocks.pop(storage))
    return {
        "segments": _segments(allocator),
        "device_traces": [allocator.trace],
        "allocator_settings": {"expandable_segments": expandable},
        "external_annotations": [],
    }


def write(file: Path, events: Sequence[Event], made: Sequence["Made"], expandable: bool, workspace: int) -> None:
    """Write the snapshot of a run to a file."""
    file.write_bytes(pickle.dumps(of(events, made, expandable, workspace)))


def _frame(place: str, name: str) -> dict[str, Any]:
    file, _, line = place.rpartition(":")
    known = line.isdecimal()
    return {"filename": file if known else place, "line": int(line) if known else 0, "name": name}


def _shown(address: int) -> int:
    return TOP - (HIGHEST_ADDRESS - address)


def _ranges(blocks: Sequence[Block]) -> dict[int, int]:
    """Return the stretches of addresses that blocks of an expandable segment fill, {start: bytes}."""
    found: dict[int, int] = {}
    start = end = -1
    for block in sorted(blocks, key=lambda block: block.address):
        start = start if block.address == end else block.address
        end = block.address + block.size
        found[start] = end - start
    return found


def _segments(allocator: Traced) -> list[dict[str, Any]]:
    """Return the segments that are held at the end, with their blocks in order."""
    free = [block for pools in allocator._pools.values() for pool in pools for _, _, block in pool.blocks]
    blocks: list[tuple[Block, str, Frames]] = [(block, "inactive", []) for block in free if block.mapped]
    blocks += [(block, "active_allocated", frames) for block, frames in allocator.alive.values()]
    segments = allocator.segments or _ranges([block for block, _, _ in blocks])
    found = []
    for start, total in sorted(segments.items()):
        inside = sorted((b for b in blocks if start <= b[0].address < start + total), key=lambda b: b[0].address)
        active = sum(block.size for block, state, _ in inside if state != "inactive")
        found.append(
            {
                "device": 0,
                "address": _shown(start),
                "total_size": total,
                "stream": 0,
                "segment_type": "large" if total >= LARGE_SEGMENT else "small",
                "segment_pool_id": (0, 0),
                "is_expandable": allocator.expandable,
                "allocated_size": active,
                "active_size": active,
                "requested_size": active,
                "frames": [],
                "blocks": [
                    {
                        "address": _shown(block.address),
                        "size": block.size,
                        "requested_size": block.size,
                        "state": state,
                        "frames": frames,
                    }
                    for block, state, frames in inside
                ],
            }
        )
    return found
