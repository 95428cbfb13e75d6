"""A replay of torch's CUDA caching allocator: which bytes it reserves for a sequence of allocations and releases.

Every rule names its place in c10/cuda/CUDACachingAllocator.cpp. The constants are those of torch 2.13.0
and 2.15.0 (c10/core/AllocatorConfig.h in their wheels, which pip installs). The rules were read in a public copy of the
.cpp file that takes its constants from that same header; the files of these versions were not at hand.

One device and one stream. Not replayed, since this project leaves them at their defaults: max_split_size_mb,
garbage_collection_threshold, roundup_power2_divisions. The address of a new segment is assumed to be below those before
it, so that among free blocks of one size the newest segment's comes first. Runs on a T4 bear this out: of 20 settings
in float16 the replay errs by at most 0.73 %, with rising addresses by -8.9 to +3.3 % (validation).
"""

from bisect import bisect_left, insort

MIB = 1 << 20
MIN_BLOCK = 512  # kMinBlockSize: sizes are multiples of it
SMALL = MIB  # kSmallSize: the largest block of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
MIN_LARGE = 10 * MIB  # kMinLargeAlloc: from here on a segment is as large as its first block
LARGE_SEGMENT = 20 * MIB  # large_segment_size, default
ROUND_LARGE = 2 * MIB  # kRoundLarge
ADDRESS_SPACE = 20 << 40  # of an expandable segment, whole pages; torch takes more than the card has: never used up
HIGHEST_ADDRESS = 1000 * ADDRESS_SPACE


class OutOfMemory(Exception):
    """A block fits neither into cached memory nor into what the card has left."""


class Block:
    """A range of addresses: allocated, free, or (of an expandable segment) without memory behind it."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: "Pool", mapped: bool = True):
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.allocated = False
        self.previous: Block | None = None
        self.next: Block | None = None

    def insert_after(self, block: "Block") -> None:
        """Place this block behind its neighbour."""
        self.previous, self.next = block, block.next
        if block.next is not None:
            block.next.previous = self
        block.next = self


Free = tuple[int, int, Block]


class Pool:
    """Free blocks of one size class: by size, then by address (BlockComparatorSize)."""

    __slots__ = ("blocks", "page", "small", "unmapped")

    def __init__(self, small: bool):
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT  # by which an expandable segment grows
        self.blocks: list[Free] = []
        self.unmapped: list[tuple[int, Block]] = []  # by address (BlockComparatorAddress)

    def add(self, block: Block) -> None:
        """Add a free block, to those with memory behind them or to those without."""
        if block.mapped:
            insort(self.blocks, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take out a block, whose address, size and state are those with which it was added."""
        if block.mapped:
            del self.blocks[bisect_left(self.blocks, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Allocator:
    """The allocator's state.

    `expandable` is PYTORCH_ALLOC_CONF=expandable_segments:True; `capacity`, in bytes, is what the card gives the
    allocator at most (None: no limit). Blocks that are made while a CUDA graph is captured come from a private
    pool: `private` names it.
    """

    def __init__(self, expandable: bool, capacity: int | None = None):
        self.expandable, self.capacity = expandable, capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0  # times that the cache was released because the card was full
        self._pools: dict[object, tuple[Pool, Pool]] = {None: (Pool(small=True), Pool(small=False))}
        self._freeable: set[object] = set()
        self._lowest_address = HIGHEST_ADDRESS

    # -- what a program asks for -----------------------------------------------------------------------------------

    def malloc(self, size: int, private: object = None) -> Block:
        """Return a block of at least `size` bytes. Raises OutOfMemory.

        DeviceCachingAllocator::malloc: a free block, else a new segment, else the same after releasing the cache.
        """
        size = rounded(size)
        pool = (self._pools.get(private) or self._pool(private))[size > SMALL]
        block = self._find_free(pool, size) or self._new(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes, with {self.reserved} of {self.capacity} reserved")
        if block.size > size:
            self._split(block, size)
        block.allocated = True
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with free neighbours (free_block)."""
        assert block.allocated, "freed twice"
        block.allocated = False
        self.allocated -= block.size
        self._merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Return unused memory to the card (release_cached_blocks).

        That is segments that are free as a whole, and of expandable segments every page that is (unmap_block). Private
        pools keep theirs until they are released.
        """
        for private in (None, *self._freeable):
            for pool in self._pools[private]:
                for _, _, block in list(pool.blocks):
                    if not self._returnable_bytes(block):
                        continue
                    if self.expandable:
                        self._unmap(block)
                    else:
                        pool.remove(block)
                        self.reserved -= block.size

    def release(self, private: object) -> None:
        """Note that a private pool's graph is gone (notifyCaptureDestroy): empty_cache may return its memory."""
        if private in self._pools:
            self._freeable.add(private)

    def reset_peaks(self) -> None:
        """Reset the peaks, as torch.cuda.reset_peak_memory_stats does."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def releasable(self) -> int:
        """Return the bytes that empty_cache would return to the card."""
        return sum(
            self._returnable_bytes(block)
            for private in (None, *self._freeable)
            for pool in self._pools[private]
            for _, _, block in pool.blocks
        )

    # -- details ---------------------------------------------------------------------------------------------------

    def _pool(self, private: object) -> tuple[Pool, Pool]:
        """Return the pool of a request, as get_pool does: a pair for all, one more pair for each private pool."""
        if private not in self._pools:
            self._pools[private] = (Pool(small=True), Pool(small=False))
        return self._pools[private]

    def _find_free(self, pool: Pool, size: int) -> Block | None:
        """Return the smallest free block that is large enough, as get_free_block does.

        A block that could grow counts with the size that it could grow to, so that others are preferred.
        """
        blocks = pool.blocks
        at = bisect_left(blocks, (size,))
        if at == len(blocks):
            return None
        if self.expandable and _could_grow(blocks[at][2]):  # others are not larger than what follows them in the list
            last = len(blocks) - 1
            while at < last and _could_be(blocks[at + 1][2]) < _could_be(blocks[at][2]):
                at += 1
        return blocks.pop(at)[2]

    def _new(self, pool: Pool, size: int) -> Block | None:
        """Return a block of new memory, as alloc_block does; None if the card has no more."""
        if self.expandable:
            return self._expand(pool, size)
        segment = segment_size(size)
        if not self._reserve(segment):
            return None
        self._lowest_address -= segment
        return Block(self._lowest_address, segment, pool)

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _returnable_bytes(self, block: Block) -> int:
        """Return the bytes of a free block that can be returned: its whole pages, or itself if it is a segment."""
        if self.expandable:
            start, end = _pages(block)
            return max(0, end - start)
        return block.size if block.previous is None and block.next is None else 0

    def _split(self, block: Block, size: int) -> None:
        """Free the rest of a block (should_split, alloc_found_block), unless a large segment's rest is small."""
        rest = block.size - size
        least = MIN_BLOCK if block.pool.small or self.expandable else SMALL + 1
        if rest >= least:
            remaining = Block(block.address + size, rest, block.pool)
            remaining.insert_after(block)
            block.size = size
            block.pool.add(remaining)

    def _merge(self, block: Block) -> None:
        """Merge a block with both neighbours in the same state, as try_merge_blocks does; they leave their pool."""
        before, after = block.previous, block.next
        if before is not None and not before.allocated and before.mapped == block.mapped:
            block.pool.remove(before)
            block.address, block.size = before.address, before.size + block.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and not after.allocated and after.mapped == block.mapped:
            block.pool.remove(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block

    # -- expandable segments (Note [Expandable Segments]) ----------------------------------------------------------

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Map memory at the lowest addresses with room, as try_allocate_expandable_block does; None on a full card."""
        block = self._room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None  # `_room` has counted it
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _room(self, pool: Pool, size: int) -> Block:
        """Return the first of adjacent free or unmapped blocks with enough room, as find_expandable_block does."""
        for _, block in pool.unmapped:
            first = block.previous if block.previous is not None and not block.previous.allocated else block
            room, following = first.size, first.next
            while room < size and following is not None and not following.allocated:
                room += following.size
                following = following.next
            if room >= size:
                return first
        self._lowest_address -= 2 * ADDRESS_SPACE
        segment = Block(self._lowest_address, ADDRESS_SPACE, pool, mapped=False)
        pool.add(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages at the start of an unmapped block, as map_block does, and join it to its free neighbours."""
        size = -(-size // block.pool.page) * block.pool.page
        if not self._reserve(size):
            return False
        block.pool.remove(block)
        block.mapped = True
        if size < block.size:
            rest = Block(block.address + size, block.size - size, block.pool, mapped=False)
            rest.insert_after(block)
            block.size = size
            block.pool.add(rest)
        self._merge(block)
        block.pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Return the whole pages inside a free block to the card, as unmap_block does."""
        start, end = _pages(block)
        block.pool.remove(block)
        if end < block.address + block.size:
            after = Block(end, block.address + block.size - end, block.pool)
            after.insert_after(block)
            block.pool.add(after)
        if block.address < start:
            inner = Block(start, end - start, block.pool)
            inner.insert_after(block)
            block.size = start - block.address
            block.pool.add(block)
            block = inner
        block.size = end - start
        block.mapped = False
        self.reserved -= block.size
        self._merge(block)
        block.pool.add(block)


def rounded(size: int) -> int:
    """Return the bytes of the block that a request gets at least (round_size)."""
    return -(-size // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK


def segment_size(size: int) -> int:
    """Return the bytes of the segment that is asked of the card for a block (get_allocation_size)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


def _pages(block: Block) -> tuple[int, int]:
    """Return the start and end of the whole pages inside a block; the end may lie before the start."""
    page = block.pool.page
    return -(-block.address // page) * page, (block.address + block.size) // page * page


def _could_grow(block: Block) -> bool:
    """Return whether addresses without memory follow a block."""
    return block.next is not None and not block.next.mapped


def _could_be(block: Block) -> int:
    """Return the size of a block with the addresses without memory that follow it."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)
