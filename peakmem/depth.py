"""The events of a deep model from those of two shallow ones: what every layer does is repeated.

A program that runs over 4 layers does what it does over 2, and in each of its loops over layers it does once more what
two layers do. The two lists of events are aligned, which finds these insertions. Repeating them gives the events for
any even number of layers. The bytes in use at one moment grow linearly with depth and would not need this; the highest
of many moments, and the bytes that the allocator reserves, do not grow linearly.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from peakmem.events import DEPTHS, Event, NotPredicted, Parts, StorageKind, new_event
from peakmem.peaks import peaks_of

GAP = 3  # cost of an insertion in the alignment
OTHER_SIZE = 20  # cost of a pair of one operation's allocations of two sizes: a buffer whose size grows with depth
OTHER = 100  # cost of a pair that has nothing in common


class _Release(NamedTuple):
    """Which of the storages alive that were made alike is released: its place from the newest, and from the oldest."""

    newest: int
    oldest: int


class NotAligned(NotPredicted):
    """The events of the two depths do not match."""


class Deep(NamedTuple):
    """The events of a deep model; `sources` has for each of their storages the one of a shallow model that it is."""

    events: list[Event]
    sources: list[int]


def deepen(shallow: Sequence[Event], deeper: Sequence[Event], layers: int, depths: tuple[int, int] = DEPTHS) -> Deep:
    """Return the events for `layers` layers, from those with `depths` layers; their sources are storages of `deeper`.

    A number of layers that is not the lower depth and a multiple of the difference is rounded up. Up to the higher
    depth, the events with one of them are returned as they are, and are their own source. Raises NotAligned if the
    events of the two depths do not match.

    Layers of several kinds repeat in periods, as in hybrid models; the two depths then differ by two periods.
    """
    low, high = depths
    if layers <= high:
        events = list(shallow if layers <= low else deeper)
        return Deep(events, list(range(1 + max((e.storage for e in events if e.storage is not None), default=-1))))
    return _Builder(shallow, deeper, -(-(layers - low) // (high - low))).build()


def releases_in_order(events: Sequence[Event]) -> list[Event]:
    """Return the events with releases that follow each other in the order in which their storages were made.

    Python's collector releases in an order of its own, which differs between depths and does not matter to an
    allocator that is asked for nothing in between.
    """
    ordered: list[Event] = []
    released: list[Event] = []
    for event in events:
        if event.bytes < 0:
            released.append(event)
            continue
        ordered += sorted(released, key=_age)
        released = []
        ordered.append(event)
    return [*ordered, *sorted(released, key=_age)]


def _age(event: Event) -> int:
    assert event.storage is not None
    return event.storage


def highest_at_depth(
    deep: Deep, layers: int, component_of: Sequence[StorageKind], depths: tuple[int, int] = DEPTHS
) -> dict[str, Parts]:
    """Return the components at the peak of each phase, from repeated events, by the components of their sources.

    They are empty where nothing was repeated, and for a number of layers between those that `depths` reach.
    """
    low, high = depths
    if layers <= high or (layers - low) % (high - low):
        return {}
    peaks = peaks_of(deep.events, [component_of[source] for source in deep.sources])
    return {name: peak.highest for name, peak in peaks.items()}


class _Builder:
    """Writes `repeats` copies of each insertion, where `deeper` has one and `shallow` has none."""

    def __init__(self, shallow: Sequence[Event], deeper: Sequence[Event], repeats: int):
        self.shallow, self.deeper, self.repeats = shallow, deeper, repeats
        self.shallow_releases, self.deeper_releases = _releases(shallow), _releases(deeper)
        self.shallow_makers, self.deeper_makers = _makers(shallow), _makers(deeper)
        self.events: list[Event] = []
        self.alive: dict[str, list[int]] = defaultdict(list)  # storages by the name of what made them, oldest first
        self.bytes: list[int] = []  # of each storage that was made
        self.sources: list[int] = []  # of each storage that was made, its number in `deeper`

    def build(self) -> Deep:
        """Return the events of the deep model, with their sources."""
        for start, end in _between_marks(self.shallow, self.deeper):
            pairs = align(self._keys(self.shallow, start[0], end[0]), self._keys(self.deeper, start[1], end[1]))
            self._write(start, end, pairs)
        return Deep(self.events, self.sources)

    def _keys(self, events: Sequence[Event], start: int, end: int) -> list[tuple[str, int]]:
        """Return what alignment compares: the operation, and the bytes, negative where they are released."""
        makers = self.shallow_makers if events is self.shallow else self.deeper_makers
        return [(makers[index], events[index].bytes) for index in range(start, end)]

    def _write(self, start: tuple[int, int], end: tuple[int, int], pairs: list[int]) -> None:
        """Write the events between two marks: common ones once, insertions `repeats` times.

        `start` and `end` are places in both lists; `pairs` has the partner in `deeper` of each event of `shallow`.
        """
        by_newest = self._counts_from_newest(start, pairs)
        position = start[1]
        for number, pair in enumerate((*pairs, end[1] - start[1])):
            if position < start[1] + pair:
                for loop in self._loops(position, start[1] + pair):
                    self._repeat(loop, by_newest)
            if number < len(pairs):
                self._write_common(start[0] + number, start[1] + pair)
            position = start[1] + pair + 1

    def _loops(self, start: int, end: int) -> Iterator[range]:
        """Yield the loops over layers that one insertion is made of.

        Two that follow each other directly make one insertion, but each of them does twice the same, for
        two layers or periods.
        """
        keys = self._keys(self.deeper, start, end)
        while keys:
            halves = (n for n in range(len(keys) // 2, 0, -1) if keys[n] == keys[0])
            half = next((n for n in halves if keys[:n] == keys[n : 2 * n]), None)
            size = 2 * half if half else len(keys)
            yield range(start, start + size)
            start, keys = start + size, keys[size:]

    def _counts_from_newest(self, start: tuple[int, int], pairs: list[int]) -> dict[str, bool]:
        """Return for each kind of storage whether counting from the newest gives the same place at both depths."""
        votes: Counter[str] = Counter()
        for number, pair in enumerate(pairs):
            a, b = self.shallow_releases.get(start[0] + number), self.deeper_releases.get(start[1] + pair)
            if a is not None and b is not None:
                votes[self.deeper_makers[start[1] + pair]] += (a.newest == b.newest) - (a.oldest == b.oldest)
        return {name: count >= 0 for name, count in votes.items()}

    def _repeat(self, loop: range, by_newest: dict[str, bool]) -> None:
        """Write a loop over layers `repeats` times. Most of a deep model's events are written here."""
        steps = []
        for index in loop:
            event, name = self.deeper[index], self.deeper_makers[index]
            place = 0
            if event.bytes < 0:
                release = self.deeper_releases[index]
                place = release.newest if by_newest.get(name, True) else -1 - release.oldest
            if event.bytes:
                steps.append((event, self.alive[name], place))
        for event, alive, place in steps * self.repeats:
            if event[1] > 0:  # bytes
                self._make(event, event[1], alive)
            else:
                self._release(event, alive, place)

    def _write_common(self, index: int, pair: int) -> None:
        """Write an event that both depths have; its size and place continue in a straight line."""
        a, b = self.shallow[index], self.deeper[pair]
        if b.bytes > 0:
            size = b.bytes if a.bytes < 0 else max(1, a.bytes + (b.bytes - a.bytes) * self.repeats)
            self._make(b, size, self.alive[b.name])
        elif b.bytes < 0:
            before, after = self.shallow_releases.get(index), self.deeper_releases[pair]
            if before is None or before.newest == after.newest:
                place = after.newest
            elif before.oldest == after.oldest:
                place = -1 - after.oldest
            else:
                place = before.newest + (after.newest - before.newest) * self.repeats
            self._release(b, self.alive[self.deeper_makers[pair]], place)
        else:
            self.events.append(b)

    def _make(self, event: Event, size: int, alive: list[int]) -> None:
        storage = len(self.bytes)
        alive.append(storage)
        self.bytes.append(size)
        assert event[0] is not None
        self.sources.append(event[0])
        self.events.append(new_event(Event, (storage, size, event[2], event[3])))

    def _release(self, event: Event, alive: list[int], place: int) -> None:
        """Release the storage at `place` from the newest, or from the oldest if `place` is negative."""
        if not alive:
            return
        last = len(alive) - 1
        index = last - place if place >= 0 else -1 - place
        storage = alive.pop(0 if index < 0 else last if index > last else index)
        self.events.append(new_event(Event, (storage, -self.bytes[storage], event[2], event[3])))


def _between_marks(
    shallow: Sequence[Event], deeper: Sequence[Event]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield stretches of both lists that begin with the same mark. Raises NotAligned if the marks differ."""
    marks = [[index for index, event in enumerate(events) if event.storage is None] for events in (shallow, deeper)]
    names = [
        [(events[index].phase, events[index].name) for index in indices]
        for events, indices in zip((shallow, deeper), marks, strict=True)
    ]
    if names[0] != names[1]:
        raise NotAligned("the phases at 2 and 4 layers are not the same")
    edges = [(0, 0), *zip(*marks, strict=True), (len(shallow), len(deeper))]
    yield from pairwise(edges)


def _makers(events: Sequence[Event]) -> list[str]:
    """Return for each event the name of the operation that allocated its storage."""
    makers: dict[int, str] = {}
    names = []
    for event in events:
        if event.storage is not None and event.bytes > 0:
            makers[event.storage] = event.name
        names.append(event.name if event.storage is None else makers[event.storage])
    return names


def _releases(events: Sequence[Event]) -> dict[int, _Release]:
    """Return for each release the place of its storage among those alive with the same name."""
    alive: dict[str, list[int]] = defaultdict(list)
    names: dict[int, str] = {}
    releases = {}
    for index, event in enumerate(events):
        if event.storage is None:
            continue
        if event.bytes > 0:
            names[event.storage] = event.name
            alive[event.name].append(event.storage)
        else:
            same = alive[names[event.storage]]
            place = bisect_left(same, event.storage)  # they are numbered as they are made
            del same[place]
            releases[index] = _Release(len(same) - place, place)
    return releases


# -- alignment -------------------------------------------------------------------------------------------------------


def align(shallow: Sequence[tuple[str, int]], deeper: Sequence[tuple[str, int]]) -> list[int]:
    """Return the index in `deeper` of each entry of `shallow`, with the fewest insertions and different pairs.

    Dynamic programming over how much of `deeper` was inserted so far; a row is the state after one of `shallow`.
    Raises NotAligned if `shallow` is longer than `deeper`.
    """
    if len(deeper) < len(shallow):
        raise NotAligned("fewer events with more layers")
    start = next((n for n, (a, b) in enumerate(zip(shallow, deeper, strict=False)) if a != b), len(shallow))
    inserted = len(deeper) - len(shallow)
    end = len(shallow)
    while end > start and shallow[end - 1] == deeper[end - 1 + inserted]:
        end -= 1
    middle = _align(shallow[start:end], deeper[start : end + inserted])
    return [*range(start), *(start + index for index in middle), *range(end + inserted, len(deeper))]


def _align(shallow: Sequence[tuple[str, int]], deeper: Sequence[tuple[str, int]]) -> list[int]:
    """Align what is left after removing the common start and the common end."""
    if not shallow:
        return []
    width = len(deeper) - len(shallow) + 1
    penalties = _penalties(shallow, deeper)
    insertions = torch.arange(width, dtype=torch.int32)  # before an entry
    cost = insertions.clamp(max=1) * GAP
    source = torch.zeros((len(shallow) + 1, width), dtype=torch.int16 if width < 2**15 else torch.int32)
    by_gap, latest = torch.empty_like(cost), torch.zeros(width, dtype=torch.int64)
    for index, entry in enumerate(shallow):
        cost = cost + penalties[entry][index : index + width]
        lowest, places = cost.cummin(0)  # with the place where the lowest was reached last
        by_gap[0], by_gap[1:] = cost[0] + GAP, lowest[:-1] + GAP
        latest[1:] = places[:-1]
        take = by_gap < cost
        take[0] = False
        source[index + 1] = torch.where(take, latest, insertions)
        cost = torch.where(take, by_gap, cost)
    inserted = width - 1
    indices = []
    for entry_number in range(len(shallow), 0, -1):
        inserted = int(source[entry_number, inserted])
        indices.append(entry_number - 1 + inserted)
    return indices[::-1]


def _penalties(shallow: Sequence[tuple[str, int]], deeper: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Tensor]:
    """Return, for each different entry of `shallow`, the cost of pairing it with each entry of `deeper`."""
    numbers: dict[object, int] = {}
    whole = torch.tensor([numbers.setdefault(entry, len(numbers)) for entry in deeper])
    kinds = torch.tensor([numbers.setdefault(_kind(entry), len(numbers)) for entry in deeper])
    penalties = {}
    for entry in set(shallow):
        alike = kinds == numbers.get(_kind(entry), -1)
        penalties[entry] = torch.where(alike, OTHER_SIZE, OTHER).to(torch.int32)
        penalties[entry][whole == numbers.get(entry, -1)] = 0
    return penalties


def _kind(entry: tuple[str, int]) -> tuple[str, bool, bool]:
    """Return the operation of an entry, and whether it allocates, releases, or marks."""
    name, size = entry
    return name.partition(", ")[0], size > 0, size < 0
