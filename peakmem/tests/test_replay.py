"""What the allocator reserves for a list of events, by hand."""

import pytest

from peakmem.allocator import MIB, OutOfMemory
from peakmem.events import BEGIN, PRODUCT, Event
from peakmem.replaying import TIGHT, replay


class Events:
    def __init__(self) -> None:
        self.recorded: list[Event] = []
        self.phase: tuple[str, ...] = ()
        self.sizes: list[int] = []

    def make(self, size: int) -> int:
        self.sizes.append(size)
        self.recorded.append(Event(len(self.sizes) - 1, size, self.phase, "made"))
        return len(self.sizes) - 1

    def release(self, storage: int) -> None:
        self.recorded.append(Event(storage, -self.sizes[storage], self.phase, ""))

    def mark(self, name: str, *phase: str) -> None:
        self.phase = phase if name == BEGIN else self.phase
        self.recorded.append(Event(None, 0, self.phase, name))


def test_phases_and_what_each_leaves_in_the_cache():
    """40 MiB while loading and 60 in training, of which 20 stay; then 30 more. What is cached is held, not needed."""
    events = Events()
    events.mark(BEGIN, "load")
    events.release(events.make(40 * MIB))
    events.mark(BEGIN, "train")
    kept, gone = events.make(20 * MIB), events.make(40 * MIB)
    events.release(gone)
    events.mark(BEGIN, "evaluate", "prefill")
    events.make(30 * MIB)
    reserved = replay(events.recorded, expandable=True)
    assert {name: r.allocated // MIB for name, r in reserved.items()} == {
        "": 60,
        "load": 40,
        "train": 60,
        "evaluate": 50,
        "evaluate/prefill": 50,
    }
    assert {name: r.reserved // MIB for name, r in reserved.items()} == {
        "": 60,
        "load": 40,
        "train": 60,
        "evaluate": 60,
        "evaluate/prefill": 60,
    }
    assert reserved["evaluate"].needed == reserved["evaluate/prefill"].needed == 60 * MIB, "no page of 20 MiB is free"
    assert kept == 1
    for needed in (60 * MIB, reserved[""].needed):
        replay(events.recorded, expandable=True, capacity=needed)
    with pytest.raises(OutOfMemory):
        replay(events.recorded, expandable=True, capacity=59 * MIB)


def test_free_pages_are_not_needed():
    events = Events()
    events.mark(BEGIN, "load")
    events.release(events.make(200 * MIB))
    events.mark(BEGIN, "train")
    events.make(100 * MIB)
    expandable, fixed = (replay(events.recorded, kind)["train"] for kind in (True, False))
    assert (expandable.reserved, expandable.needed) == (200 * MIB, round(100 * MIB * (1 + TIGHT)))
    assert (fixed.reserved, fixed.needed) == (200 * MIB, 200 * MIB), "one segment, half of it in use"


def test_each_thread_s_first_product_makes_a_workspace():
    events = Events()
    events.mark(PRODUCT)
    events.make(2 * MIB)
    events.mark(PRODUCT)
    assert replay(events.recorded, True, workspace=8 * MIB)[""].allocated == 18 * MIB
    assert replay(events.recorded, True)[""].allocated == 2 * MIB
