"""Batches that come after the steps that are run: they are read on the host, and the largest is run too.

Two steps say nothing of a longer batch that comes later. A program's DataLoader is read on from where the steps left
it, without running anything, and gives its largest batch to two steps more: a program may hold one batch in advance.
"""

import copy
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from peakmem.events import NotPredicted

SECONDS = 60.0  # for reading, of one process
STEPS = 2  # with the largest batch


@dataclass
class Seen:
    """How many batches were read of how many (None: not known), and which was the largest, from 1."""

    batches: int
    of: int | None
    largest: int
    numbers: int  # in the largest batch: elements of its tensors, or characters
    usual: int  # in the largest of the first steps
    longest: int | None = None  # tokens of a row, if it was made longer


class Batches:
    """Notes what DataLoaders give, and reads on.

    `most` is how many batches are read at most; `longest`, in tokens, makes the rows of the largest batch longer.
    Two processes with few layers have to read the same number: the first to stop writes it to `agreed`.
    """

    def __init__(self, most: int, longest: int | None, agreed: Path):
        self.most, self.longest, self._agreed = most, longest, agreed
        self.seen: Seen | None = None
        self._given: dict[int, int] = {}  # batches by the id of an iterator
        self._sizes: dict[int, list[int]] = {}
        self._last: dict[int, Any] = {}  # the largest batch so far
        self._iterators: dict[int, Any] = {}
        self._lengths: dict[int, int | None] = {}
        self._loaders: dict[int, tuple[weakref.ref[Any], str]] = {}  # that were made, and where
        self._read: set[int] = set()  # data sets, by id
        self._planned: tuple[int, Any] | None = None  # an iterator, and what it gives from now on
        self._next: Callable[[Any], Any] = _BaseDataLoaderIter.__next__

    def patches(self, line: Callable[[], str]) -> Iterator[AbstractContextManager[object]]:
        """Yield patches of torch's loader; `line` says where one is made."""
        make, start = DataLoader.__init__, _BaseDataLoaderIter.__init__

        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            make(loader, *args, **kwargs)
            self._loaders[id(loader)] = weakref.ref(loader), line()

        def begin(iterator: Any, loader: Any) -> None:
            start(iterator, loader)
            self._iterators[id(iterator)] = iterator
            self._read.add(id(loader.dataset))
            with suppress(TypeError, NotImplementedError):
                self._lengths[id(iterator)] = len(loader)

        yield mock.patch.object(DataLoader, "__init__", init)
        yield mock.patch.object(_BaseDataLoaderIter, "__init__", begin)
        yield mock.patch.object(_BaseDataLoaderIter, "__next__", self._give())

    def _give(self) -> Callable[[Any], Any]:
        def give(iterator: Any) -> Any:
            if self._planned is not None and self._planned[0] == id(iterator):
                return copy.deepcopy(self._planned[1])
            batch = self._next(iterator)
            number, size = id(iterator), numbers_in(batch)
            self._given[number] = self._given.get(number, 0) + 1
            if size > max(self._sizes.get(number, [-1])):
                self._last[number] = copy.copy(batch)
            self._sizes.setdefault(number, []).append(size)
            return batch

        return give

    def read_on(self) -> bool:
        """Read further batches. Return whether a larger one was found, which the loader gives from now on.

        Raises NotPredicted where no row can be made as long as `longest`.
        """
        if not self._given:
            return False
        source = max(self._given, key=lambda number: self._given[number])
        count, sizes = self._given[source], self._sizes[source]
        found = [(sizes.index(max(sizes)) + 1, max(sizes), self._last[source])]
        count = self._read_from(source, count, found)
        place, size, batch = [one for one in found if one[0] <= count or one is found[0]][-1]
        self.seen = Seen(count, self._lengths.get(source), place, size, max(sizes), self.longest)
        if self.longest is not None:
            batch = lengthened(batch, self.longest)
            self.seen.numbers = numbers_in(batch)
        if self.seen.numbers <= max(sizes):
            return False
        self._planned = source, batch
        return True

    def _read_from(self, source: int, count: int, found: list[tuple[int, int, Any]]) -> int:
        """Read on, put each batch that is the largest so far into `found`, and return how many count."""
        until = time.monotonic() + SECONDS
        while count < self.most:
            agreed = self._number()
            if (agreed is not None and count >= agreed) or (agreed is None and time.monotonic() > until):
                break
            try:
                batch = self._next(self._iterators[source])
            except StopIteration:
                break
            count += 1
            if (size := numbers_in(batch)) > found[-1][1]:
                found.append((count, size, batch))
        with suppress(FileExistsError), open(self._agreed, "x") as file:
            file.write(str(count))
        return min(count, self._number() or count)

    def _number(self) -> int | None:
        text = self._agreed.read_text() if self._agreed.exists() else ""
        return int(text) if text else None

    def unread(self) -> list[str]:
        """Return where loaders were made whose data nobody has read: of validation, for example."""
        alive = [(loader(), line) for loader, line in self._loaders.values()]
        return [line for loader, line in alive if loader is not None and id(loader.dataset) not in self._read]


def numbers_in(batch: Any) -> int:
    """Return how much is in a batch: elements of tensors and arrays, characters of texts."""
    if isinstance(batch, Tensor):
        with torch._C.DisableTorchFunction():
            return batch.numel()
    if isinstance(batch, str):
        return len(batch)
    if isinstance(batch, Mapping):
        return sum(map(numbers_in, batch.values()))
    if isinstance(batch, (list, tuple)):
        return sum(map(numbers_in, batch))
    size = getattr(batch, "size", 0)
    return size if isinstance(size, int) else 0


def lengthened(batch: Any, tokens: int) -> Any:
    """Return a batch whose rows have so many tokens: their last column is repeated. Raises NotPredicted."""
    rows = [x.shape[1] for x in _tensors(batch) if x.dim() == 2 and not x.is_floating_point()]
    if not rows:
        raise NotPredicted("--longest: no batch of the program's DataLoader has rows of tokens")
    length = max(rows)

    def longer(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == length < tokens:
            return torch.cat([x, x[:, -1:].expand(-1, tokens - length, *x.shape[2:])], 1)
        if isinstance(x, Mapping):
            made = copy.copy(x)
            for key in x:
                made[key] = longer(x[key])  # type: ignore[index]  # of a batch, which can be changed
            return made
        return type(x)(map(longer, x)) if type(x) in (list, tuple) else x

    return longer(batch)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for one in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(one)
