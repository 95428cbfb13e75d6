"""The events of a deep model from those of two shallow ones: what every layer does is repeated.

A program that runs over 4 layers does what it does over 2, and in each of its loops over layers once more what two of
them do. Both lists of events are aligned, so that each such insertion is found; repeated, they give the events for any
even number of layers. Bytes alone would not need that, since they are linear in depth; what the allocator reserves for
them is not.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rlhf.memory.phases import DEPTHS, Event

GAP = 3  # cost of an insertion in the alignment
OTHER_SIZE = 20  # cost of a pair of one operation's allocations of two sizes: a buffer whose size grows with depth
OTHER = 100  # cost of a pair that has nothing in common
_NEW = tuple.__new__  # makes an Event in half the time; a deep model has hundreds of thousands


class _Release(NamedTuple):
    """Which of the storages alive that were made alike is released: its place from the newest, and from the oldest."""

    newest: int
    oldest: int


def deepen(few: Sequence[Event], more: Sequence[Event], layers: int) -> list[Event]:
    """Return the events for `layers` layers, from those with 2 and 4 layers.

    An odd number of layers is rounded up. Below 4 layers, the events with 2 or 4 are returned as they are.
    """
    low, high = DEPTHS
    if layers <= high:
        return list(few if layers <= low else more)
    return _Builder(few, more, -(-(layers - low) // (high - low))).build()


class _Builder:
    """Writes `repeats` copies of each insertion, where `more` has one and `few` has none."""

    def __init__(self, few: Sequence[Event], more: Sequence[Event], repeats: int):
        self.few, self.more, self.repeats = few, more, repeats
        self.few_releases, self.more_releases = _releases(few), _releases(more)
        self.names_few, self.names_more = _makers(few), _makers(more)
        self.events: list[Event] = []
        self.alive: dict[str, list[int]] = defaultdict(list)  # storages by the name of what made them, oldest first
        self.bytes: list[int] = []  # of each storage that was made

    def build(self) -> list[Event]:
        for start, end in _between_marks(self.few, self.more):
            pairs = align(self._keys(self.few, start[0], end[0]), self._keys(self.more, start[1], end[1]))
            self._write(start, end, pairs)
        return self.events

    def _keys(self, events: Sequence[Event], start: int, end: int) -> list[tuple[str, int]]:
        """Return what alignment compares: the operation, and the bytes, negative where they are released."""
        makers = self.names_few if events is self.few else self.names_more
        return [(makers[at], events[at].bytes) for at in range(start, end)]

    def _write(self, start: tuple[int, int], end: tuple[int, int], pairs: list[int]) -> None:
        by_newest = self._disciplines(start, pairs)
        position = start[1]
        for at, pair in enumerate((*pairs, end[1] - start[1])):
            if position < start[1] + pair:
                for loop in self._loops(position, start[1] + pair):
                    self._repeat(loop, by_newest)
            if at < len(pairs):
                self._linear(start[0] + at, start[1] + pair)
            position = start[1] + pair + 1

    def _loops(self, start: int, end: int) -> Iterator[range]:
        """Yield the loops over layers that one insertion is made of.

        Two that follow each other directly make one insertion, but each of them does twice the same, for two layers.
        """
        keys = self._keys(self.more, start, end)
        while keys:
            halves = (n for n in range(len(keys) // 2, 0, -1) if keys[n] == keys[0])
            half = next((n for n in halves if keys[:n] == keys[n : 2 * n]), None)
            size = 2 * half if half else len(keys)
            yield range(start, start + size)
            start, keys = start + size, keys[size:]

    def _disciplines(self, start: tuple[int, int], pairs: list[int]) -> dict[str, bool]:
        """Return for each kind of storage whether counting from the newest gives the same place at both depths."""
        votes: Counter[str] = Counter()
        for at, pair in enumerate(pairs):
            a, b = self.few_releases.get(start[0] + at), self.more_releases.get(start[1] + pair)
            if a is not None and b is not None:
                votes[self.names_more[start[1] + pair]] += (a.newest == b.newest) - (a.oldest == b.oldest)
        return {name: count >= 0 for name, count in votes.items()}

    def _repeat(self, loop: range, by_newest: dict[str, bool]) -> None:
        """Write a loop over layers `repeats` times. Most of a deep model's events are written here."""
        steps = []
        for index in loop:
            event, name = self.more[index], self.names_more[index]
            place = 0
            if event.bytes < 0:
                release = self.more_releases[index]
                place = release.newest if by_newest.get(name, True) else -1 - release.oldest
            if event.bytes:
                steps.append((event, self.alive[name], place))
        for event, alive, place in steps * self.repeats:
            if event[1] > 0:  # bytes
                self._make(event, event[1], alive)
            else:
                self._release(event, alive, place)

    def _linear(self, at: int, pair: int) -> None:
        """Return an event of both depths at a third depth: sizes and places continue in a straight line."""
        a, b = self.few[at], self.more[pair]
        if b.bytes > 0:
            size = b.bytes if a.bytes < 0 else max(1, a.bytes + (b.bytes - a.bytes) * self.repeats)
            self._make(b, size, self.alive[b.name])
        elif b.bytes < 0:
            before, after = self.few_releases.get(at), self.more_releases[pair]
            if before is None or before.newest == after.newest:
                place = after.newest
            elif before.oldest == after.oldest:
                place = -1 - after.oldest
            else:
                place = before.newest + (after.newest - before.newest) * self.repeats
            self._release(b, self.alive[self.names_more[pair]], place)
        else:
            self.events.append(b)

    def _make(self, event: Event, size: int, alive: list[int]) -> None:
        storage = len(self.bytes)
        alive.append(storage)
        self.bytes.append(size)
        self.events.append(_NEW(Event, (storage, size, event[2], event[3])))

    def _release(self, event: Event, alive: list[int], place: int) -> None:
        """Release the storage at `place` from the newest, or from the oldest where `place` is negative."""
        if not alive:
            return
        last = len(alive) - 1
        at = last - place if place >= 0 else -1 - place
        storage = alive.pop(0 if at < 0 else last if at > last else at)
        self.events.append(_NEW(Event, (storage, -self.bytes[storage], event[2], event[3])))


def _between_marks(few: Sequence[Event], more: Sequence[Event]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield stretches of both lists that begin with the same mark. Raises ValueError where the marks differ."""
    marks = [[at for at, event in enumerate(events) if event.storage is None] for events in (few, more)]
    names = [
        [(events[at].phase, events[at].name) for at in places]
        for events, places in zip((few, more), marks, strict=True)
    ]
    if names[0] != names[1]:
        raise ValueError("the phases at 2 and 4 layers are not the same")
    edges = [(0, 0), *zip(*marks, strict=True), (len(few), len(more))]
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
    for at, event in enumerate(events):
        if event.storage is None:
            continue
        if event.bytes > 0:
            names[event.storage] = event.name
            alive[event.name].append(event.storage)
        else:
            same = alive[names[event.storage]]
            place = bisect_left(same, event.storage)  # they are numbered as they are made
            del same[place]
            releases[at] = _Release(len(same) - place, place)
    return releases


# -- alignment -------------------------------------------------------------------------------------------------------


def align(few: Sequence[tuple[str, int]], more: Sequence[tuple[str, int]]) -> list[int]:
    """Return the place of each of `few` in `more`, in order, with the fewest insertions and different pairs.

    Dynamic programming over how much of `more` was inserted so far; a row is the state after one of `few`.
    Raises ValueError where `few` is longer than `more`.
    """
    if len(more) < len(few):
        raise ValueError("fewer events with more layers")
    start = next((at for at, (a, b) in enumerate(zip(few, more, strict=False)) if a != b), len(few))
    inserted = len(more) - len(few)
    end = len(few)
    while end > start and few[end - 1] == more[end - 1 + inserted]:
        end -= 1
    middle = _align(few[start:end], more[start : end + inserted])
    return [*range(start), *(start + at for at in middle), *range(end + inserted, len(more))]


def _align(few: Sequence[tuple[str, int]], more: Sequence[tuple[str, int]]) -> list[int]:
    """Align what is left after removing the common start and the common end."""
    if not few:
        return []
    width = len(more) - len(few) + 1
    penalties = _penalties(few, more)
    places = np.arange(width, dtype=np.int32)
    cost = np.minimum(places, 1).astype(np.int32) * GAP
    source = np.zeros((len(few) + 1, width), dtype=np.uint16 if width < 2**16 else np.int32)
    for at, entry in enumerate(few):
        cost = cost + penalties[entry][at : at + width]
        lowest = np.minimum.accumulate(cost)
        first = np.maximum.accumulate(np.where(cost == lowest, places, 0))  # where that lowest cost was reached last
        by_gap = np.empty_like(cost)
        by_gap[0], by_gap[1:] = cost[0] + GAP, lowest[:-1] + GAP
        take = by_gap < cost
        take[0] = False
        source[at + 1] = np.where(take, np.concatenate(([0], first[:-1])), places)
        cost = np.where(take, by_gap, cost)
    inserted = width - 1
    places_in_more = []
    for at in range(len(few), 0, -1):
        inserted = int(source[at, inserted])
        places_in_more.append(at - 1 + inserted)
    return places_in_more[::-1]


def _penalties(few: Sequence[tuple[str, int]], more: Sequence[tuple[str, int]]) -> dict[tuple[str, int], np.ndarray]:
    """Return, for each different entry of `few`, the cost of pairing it with each entry of `more`."""
    numbers: dict[object, int] = {}
    whole = np.array([numbers.setdefault(entry, len(numbers)) for entry in more])
    kinds = np.array([numbers.setdefault(_kind(entry), len(numbers)) for entry in more])
    penalties = {}
    for entry in set(few):
        alike = kinds == numbers.get(_kind(entry), -1)
        penalties[entry] = np.where(alike, OTHER_SIZE, OTHER).astype(np.int32)
        penalties[entry][whole == numbers.get(entry, -1)] = 0
    return penalties


def _kind(entry: tuple[str, int]) -> tuple[str, bool, bool]:
    """Return the operation of an entry, and whether it allocates, releases, or marks."""
    name, size = entry
    return name.partition(", ")[0], size > 0, size < 0
