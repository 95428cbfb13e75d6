"""The replay of torch's CUDA allocator: cases worked out by hand from its rules."""

import pytest

from peakmem.allocator import (
    MIB,
    Allocator,
    OutOfMemory,
    rounded,
    segment_size,
)

BOTH = pytest.mark.parametrize("expandable", [False, True])


@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_sizes_are_rounded_to_512_bytes(size, block):
    assert rounded(size) == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_of_fixed_size(size, segment):
    assert segment_size(size) == segment
    allocator = Allocator(expandable=False)
    allocator.malloc(size)
    assert allocator.reserved == segment


# -- cases by hand -----------------------------------------------------------------------------------------------------


def test_a_large_block_keeps_a_rest_of_at_most_one_mib():
    """12 MiB for 11.5 MiB: half a MiB is not split off, and counts as allocated. Of 20 MiB for 2 MiB the rest is."""
    allocator = Allocator(expandable=False)
    allocator.malloc(11 * MIB + MIB // 2)
    assert (allocator.allocated, allocator.reserved) == (12 * MIB, 12 * MIB)
    allocator.malloc(2 * MIB)
    assert (allocator.allocated, allocator.reserved) == (14 * MIB, 32 * MIB)
    allocator.malloc(9 * MIB)
    assert allocator.reserved == 32 * MIB, "into the rest"
    exactly = Allocator(expandable=False)
    exactly.malloc(11 * MIB)
    assert exactly.allocated == exactly.reserved == 12 * MIB


def test_an_expandable_segment_grows_by_pages():
    """2 MiB pages for small blocks and 20 MiB pages for large ones, only as many as the free end does not cover."""
    allocator = Allocator(expandable=True)
    allocator.malloc(512)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(30 * MIB)
    assert allocator.reserved == 42 * MIB
    allocator.malloc(25 * MIB)
    assert allocator.reserved == 62 * MIB, "10 MiB were free at the end: 15 more need one page"
    assert allocator.allocated == 55 * MIB + 512


@BOTH
def test_a_full_card_gets_its_cache_back_before_it_is_out_of_memory(expandable):
    allocator = Allocator(expandable, capacity=100 * MIB)
    allocator.free(allocator.malloc(50 * MIB))
    kept = allocator.malloc(60 * MIB)
    assert allocator.retries == (0 if expandable else 1), "an expandable segment grows, a fixed one makes room"
    assert allocator.reserved == 60 * MIB
    with pytest.raises(OutOfMemory, match=f"{60 * MIB} bytes"):
        allocator.malloc(60 * MIB)
    allocator.free(kept)
    allocator.malloc(60 * MIB)
