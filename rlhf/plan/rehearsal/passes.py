"""Forward and backward passes on the stand-in device: they are marked among the events, and equal ones run only once.

A batch is scored and trained on in micro-batches, most of them of one shape. A pass that makes gradients or merges
weights is run each time. Any other is run once for each role and shape; with the lean trunk, once each time a role is
entered. The events of the rest are copies of its events, with new storages. The predicted memory is the same as if each
was run, because the replay of the allocator gets the events of all.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, ParamSpec, TypeVar
from unittest import mock

import torch
from torch import Tensor

from peakmem import Tracker, events, known_numbers
from rlhf.data.batch import Rollout
from rlhf.models.shared_base import SharedBase
from rlhf.plan.phases import Event, Work
from rlhf.recipe.names import Role, ScoreRole
from rlhf.stages.online.train_state import TrainState

T = TypeVar("T")
P = ParamSpec("P")
Patch = AbstractContextManager[object]  # replaces something while it is entered


class _Made(NamedTuple):
    """A new tensor that a pass returns."""

    storage: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Pass(NamedTuple):
    """What a pass did."""

    recorded: list[Event]
    storages: dict[int, events.Storage]  # that it made
    work: Work
    result: object  # a _Made in place of a tensor


class Repeats:
    """Runs passes and remembers them until `forget` is called.

    A pass is remembered if it leaves nothing behind but its result: it releases each storage that it makes, and no
    other. A pass that makes gradients, or merges weights for later passes, is run again.
    """

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self._known: dict[Hashable, _Pass] = {}

    def forget(self) -> None:
        """Forget all passes: the next one of each kind is run."""
        self._known.clear()

    def __call__(self, key: Hashable, run: Callable[[], T]) -> T:
        """Return `run()`, or the same once more if that was remembered. `key` is all that its events depend on."""
        key = (key, self._tracker.phase)
        if key in self._known:
            result: T = self._repeat(self._known[key])
            return result
        start, before = self._tracker.position(), self._tracker.work()
        result = run()
        self._remember(key, start, before, result)
        return result

    def differing(self, items: Iterable[T], key_of: Callable[[T], Hashable | None]) -> Iterator[T]:
        """Yield the items for a loop, whose body is run and remembered as a pass. Of items with equal keys yield one.

        An item without a key is yielded too. All are made at once: of items that are made one by one, a pass would
        release the one before, which the loop's variable has held.
        """
        for item in list(items):
            if (name := key_of(item)) is None:
                yield item
                continue
            key = (name, self._tracker.phase)
            if key in self._known:
                self._repeat(self._known[key])
                continue
            start, before = self._tracker.position(), self._tracker.work()
            yield item
            self._remember(key, start, before, None)

    def _remember(self, key: Hashable, start: int, before: Work, result: object) -> None:
        """Remember the pass that began at a position of the tracker, unless it cannot be repeated."""
        done = self._pass(self._tracker.events_since(start), before, result)
        if done is not None:
            self._known[key] = done

    def _pass(self, recorded: list[Event], before: Work, result: object) -> _Pass | None:
        """Return what is remembered of a pass; None if it cannot be repeated."""
        if any(event.storage is None and event.name != events.PASS for event in recorded):
            return None  # another phase, or something that happens once
        made = {event.storage for event in recorded if event.storage is not None and event.bytes > 0}
        left = made ^ {event.storage for event in recorded if event.storage is not None and event.bytes < 0}
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            index = self._tracker.storage_of(result)
            whole = result.is_contiguous() and result.nbytes == storage.nbytes() and known_numbers(result) is None
            if index is None or not whole or result.requires_grad:
                return None
            left ^= {index}
            result = _Made(index, result.shape, result.stride(), result.dtype)
        if left:
            return None
        return _Pass(recorded, self._tracker.storages(made), self._tracker.work() - before, result)

    def _repeat(self, done: _Pass) -> Any:
        """Record a remembered pass again. Return its result, in a storage of its own."""
        kept = done.result.storage if isinstance(done.result, _Made) else None
        numbers = self._tracker.repeat(done.recorded, done.storages, done.work, kept)
        if not isinstance(done.result, _Made):
            return copy.copy(done.result)
        with self._tracker.paused():
            tensor = torch.empty_strided(done.result.shape, done.result.stride, dtype=done.result.dtype, device="meta")
        self._tracker.follow(tensor.untyped_storage(), numbers[done.result.storage])
        return tensor


def patches(tracker: Tracker) -> Iterator[Patch]:
    """Yield context managers by which passes are marked and repeated. depth.py aligns events between marks."""
    patch = mock.patch.object
    repeats = Repeats(tracker)
    yield patch(torch.autograd, "backward", _marked(tracker, torch.autograd.backward))
    yield patch(SharedBase, "response_hidden", _states(repeats, _marked(tracker, SharedBase.response_hidden)))
    yield patch(SharedBase, "scores_at", _scores(repeats, _marked(tracker, SharedBase.scores_at)))
    yield patch(SharedBase, "role", _forgetting(repeats, SharedBase.role))
    yield patch(TrainState, "micro_batches", _differing(repeats, TrainState.micro_batches))


def _marked(tracker: Tracker, run: Callable[P, T]) -> Callable[P, T]:
    """Return a pass with a mark before and after it."""

    def call(*args: P.args, **options: P.kwargs) -> T:
        tracker.mark(events.PASS)
        result = run(*args, **options)
        tracker.mark(events.PASS)
        return result

    return call


def _states(repeats: Repeats, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def response_hidden(self: SharedBase, rollout: Rollout) -> Tensor:
        shape = _shape(rollout)
        if torch.is_grad_enabled() or shape is None:
            return run(self, rollout)
        return repeats(("states", self.roles.active, self.base.training, shape), lambda: run(self, rollout))

    return response_hidden


def _scores(repeats: Repeats, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scores_at(self: SharedBase, ids: Tensor, last: Tensor, role: ScoreRole = "reward") -> Tensor:
        with self.roles.using(role):
            numbers = known_numbers(last) if last.is_meta else last
            ends = None if numbers is None else tuple(numbers.tolist())
            key = ("score", role, self.base.training, ids.shape, ids.is_meta, ends)
            return repeats(key, lambda: run(self, ids, last, role))

    return scores_at


def _forgetting(repeats: Repeats, run: Callable[[SharedBase, Role], Patch]) -> Callable[[SharedBase, Role], Patch]:
    def role(self: SharedBase, name: Role) -> Patch:
        if self.lean_trunk is not None:
            repeats.forget()  # it prepares the weights of a role in the first pass of a block
        return run(self, name)

    return role


def _differing(repeats: Repeats, run: Callable[..., Iterator[Tensor]]) -> Callable[..., Iterator[Tensor]]:
    """Return the method that yields micro-batches, which yields only some of equal ones.

    The first of a minibatch is always among them: the statistics of a step need one.
    """

    def micro_batches(self: TrainState, rollout: Rollout, mini_rows: Tensor) -> Iterator[Tensor]:
        minibatch = object()

        def key(rows: Tensor) -> Hashable | None:
            shape = _shape(rollout.rows(rows))
            return None if shape is None else ("update", minibatch, shape)

        return repeats.differing(run(self, rollout, mini_rows), key)

    return micro_batches


def _shape(rollout: Rollout) -> Hashable:
    """Return lengths and prompts of a rollout's rows; None if they are not known."""
    parts = [rollout.prompt_length, rollout.response_length]
    if rollout.prompt_numbers is not None:
        parts.append(rollout.prompt_numbers)
    known = [numbers for x in parts if (numbers := known_numbers(x)) is not None]
    if len(known) < len(parts):
        return None
    prompts, responses, *prompt_numbers = (numbers.tolist() for numbers in known)
    first: dict[int, int] = {}  # prompts in the order in which they come
    order = [first.setdefault(number, len(first)) for number in prompt_numbers[0]] if prompt_numbers else None
    return tuple(prompts), tuple(responses), None if order is None else tuple(order)
