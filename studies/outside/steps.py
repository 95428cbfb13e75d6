"""A training step as a function of the batch's length, and what the allocator reserves for thousands of them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np

from peakmem.allocator import Allocator, Block
from peakmem.cards import SMALL_WORKSPACE
from peakmem.events import PRODUCT, Event
from studies.outside.loop import STEP

HISTORY = 3  # steps back to which a step may release something


class RecordedStep(NamedTuple):
    """What each step does, except for the first ones.

    Of the actions (0, place) allocates, and (n, place) releases what was allocated there n − 1 steps before. `bytes`
    has a polynomial in the length for each place.
    """

    actions: list[tuple[int, int]]
    bytes: np.ndarray  # (places, terms)
    exact: bool  # whether the polynomials give the recorded bytes

    def sizes(self, length: int) -> list[int]:
        """Return the bytes at each place for a batch whose longest row has `length` tokens."""
        sizes = np.maximum(np.rint(self.bytes @ _terms(np.array([length]))[:, 0]), 1).astype(np.int64)
        return cast(list[int], sizes.tolist())


class Recorded(NamedTuple):
    """A rehearsed run: what comes before the steady steps, and those."""

    before: list[Event]
    step: RecordedStep
    alive: dict[tuple[int, int], int]  # steps back and place -> storage, when the first steady step begins


def recorded(events: Sequence[Event], lengths: Sequence[int], virtual: int, first: int = 3) -> Recorded:
    """Return a recording taken apart into what comes before the steady steps, and those.

    `lengths` are the tokens of each step's longest row; the steps from `first` on are steady. `virtual` is the number
    of tokens that an adapter puts before each row. Raises ValueError if the steady steps differ.
    """
    starts = [at for at, event in enumerate(events) if event.storage is None and event.name == STEP]
    if len(starts) != len(lengths) + 1:
        raise ValueError(f"{len(starts) - 1} steps were recorded, not {len(lengths)}")
    allocations: dict[int, tuple[int, int]] = {}  # storage -> step, place
    actions: list[list[tuple[int, int]]] = []
    sizes: list[list[int]] = []
    for number, (start, end) in enumerate(pairwise(starts)):
        actions.append([])
        sizes.append([])
        for event in events[start:end]:
            if event.storage is None:
                continue
            if event.bytes > 0:
                allocations[event.storage] = number, len(sizes[-1])
                actions[-1].append((0, len(sizes[-1])))
                sizes[-1].append(event.bytes)
            elif event.storage in allocations:
                since, place = allocations[event.storage]
                actions[-1].append((number - since + 1, place))
            else:
                actions[-1].append((HISTORY + 1, 0))
    if any(other != actions[first] for other in actions[first:]):
        raise ValueError("the steps do not do the same")
    places, exact = _fit(np.array(sizes[first:]), np.array(lengths[first:]) + virtual)
    step = RecordedStep(actions[first], places, exact)
    freed = {event.storage for event in events[: starts[first]] if event.bytes < 0}
    alive = {(first - since, at): s for s, (since, at) in allocations.items() if 0 < since < first and s not in freed}
    return Recorded(list(events[: starts[first]]), step, alive)


def _terms(lengths: np.ndarray) -> np.ndarray:
    """Return what sizes depend on, (terms, n): powers of the length, and the length as biases and kernels pad it."""
    bias, block, tile = (np.ceil(lengths / n) * n for n in (16, 32, 64))
    return np.stack([np.ones(len(lengths)), lengths, lengths**2, lengths * bias, bias, block, tile])


FORMS = ((0,), (0, 1), (0, 5), (0, 4), (0, 3), (0, 1, 6), (0, 1, 2), (0, 4, 3), (0, 1, 3), (0, 1, 2, 3))


def _fit(sizes: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return a polynomial for each place of sizes (steps, places), and whether all give the sizes to the byte.

    A place has the first of `FORMS` that does, or else the last.
    """
    terms = _terms(lengths)
    coefficients = np.zeros((sizes.shape[1], len(terms)))
    left = np.ones(sizes.shape[1], dtype=bool)
    for form in FORMS:
        x = terms[list(form)].T
        scale = x.max(0)
        factors, *_ = np.linalg.lstsq(x / scale, sizes, rcond=None)
        good = (np.abs((x / scale) @ factors - sizes).max(0) < 0.5) & left
        take = left if form == FORMS[-1] else good
        coefficients[np.ix_(take, np.array(form))] = (factors / scale[:, None]).T[take]
        left &= ~good
    return coefficients, not left.any()


class Usage(NamedTuple):
    """Bytes after each step, and the most that was reserved in it, (windows, steps)."""

    allocated: np.ndarray
    reserved: np.ndarray
    reserved_most: np.ndarray


def simulate(run: Recorded, windows: np.ndarray, loaded: int, virtual: int) -> Usage:
    """Replay the steps of `windows` (windows, steps: lengths), with the cache emptied after each window.

    Segments have a fixed size, torch's default. `loaded` bytes are allocated and released first: transformers warms the
    allocator up with as much as the checkpoint has.
    """
    allocator = Allocator(expandable=False)
    allocator.free(allocator.malloc(loaded))
    blocks: dict[int, Block] = {}
    for event in run.before:
        if event.storage is None:
            if event.name == PRODUCT:
                allocator.malloc(SMALL_WORKSPACE)
        elif event.bytes > 0:
            blocks[event.storage] = allocator.malloc(event.bytes)
        else:
            allocator.free(blocks.pop(event.storage))
    allocator.empty_cache()
    # Blocks by place: of this step, the one before …
    history: list[list[Block | None]] = [[None] * len(run.step.bytes) for _ in range(HISTORY)]
    for (back, place), storage in run.alive.items():
        history[back - 1][place] = blocks[storage]
    sizes = {length: run.step.sizes(length + virtual) for length in {*windows.ravel().tolist()}}
    usage = np.zeros((3, *windows.shape))
    for window, lengths in enumerate(windows.tolist()):
        for step, length in enumerate(lengths):
            history = [[None] * len(run.step.bytes), *history[:-1]]
            allocator.reset_peaks()
            _run(allocator, run.step.actions, sizes[length], history)
            usage[:, window, step] = allocator.allocated, allocator.reserved, allocator.peak_reserved
        allocator.empty_cache()
    return Usage(*usage)


def _run(
    allocator: Allocator, actions: list[tuple[int, int]], sizes: list[int], history: list[list[Block | None]]
) -> None:
    """Replay one step. Blocks from before the recording that are never freed stay as they are."""
    for back, place in actions:
        if not back:
            history[0][place] = allocator.malloc(sizes[place])
        elif back <= HISTORY:
            block = history[back - 1][place]
            if block is not None:
                allocator.free(block)
                history[back - 1][place] = None
