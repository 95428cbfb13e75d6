"""The replay of torch's CUDA allocator: what must hold for any program."""

from itertools import pairwise

import pytest

from peakmem.allocator import MIB, MIN_BLOCK, SMALL, Allocator, Block, rounded

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

BOTH = pytest.mark.parametrize("expandable", [False, True])
SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 70 * MIB), st.sampled_from([SMALL, 10 * MIB])
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.sampled_from([None, None, "graph"])),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("empty")),
    ),
    max_size=60,
)


def chain(block: Block) -> list[Block]:
    """All blocks of a segment, by address."""
    while block.previous is not None:
        block = block.previous
    blocks = [block]
    while blocks[-1].next is not None:
        blocks.append(blocks[-1].next)
    return blocks


def check(allocator: Allocator, live: list[Block], requested: dict[int, int]) -> None:
    free = [block for pools in allocator._pools.values() for pool in pools for _, _, block in pool.blocks]
    assert sum(block.size for block in live) == allocator.allocated <= allocator.peak_allocated
    assert allocator.allocated + sum(block.size for block in free) == allocator.reserved <= allocator.peak_reserved
    placed = sorted([*live, *free], key=lambda block: block.address)
    for block, following in pairwise(placed):
        assert block.address + block.size <= following.address, "blocks overlap"
    for block in live:
        limit = MIN_BLOCK if allocator.expandable or block.pool.small else SMALL + MIN_BLOCK
        assert 0 <= block.size - requested[id(block)] <= limit
        assert block.pool.small == (rounded(requested[id(block)]) <= SMALL)
    for block in placed:
        for one, other in pairwise(chain(block)):
            assert one.next is other and other.previous is one
            assert one.address + one.size == other.address, "a gap inside a segment"
            assert one.allocated or other.allocated or one.mapped != other.mapped, "free neighbours that are not joined"


@BOTH
@settings(max_examples=120, deadline=None)
@given(steps=STEPS)
def test_blocks_never_overlap_and_totals_are_conserved(expandable, steps):
    allocator = Allocator(expandable)
    live: list[Block] = []
    requested: dict[int, int] = {}
    for step in steps:
        if step[0] == "malloc":
            live.append(allocator.malloc(step[1], step[2]))
            requested[id(live[-1])] = step[1]
        elif step[0] == "free" and live:
            allocator.free(live.pop(step[1] % len(live)))
        elif step[0] == "empty":
            expected = allocator.reserved - allocator.releasable()
            allocator.empty_cache()
            assert allocator.reserved == expected
        check(allocator, live, requested)
    for block in live:
        allocator.free(block)
    allocator.release("graph")
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0, "everything is whole again"
