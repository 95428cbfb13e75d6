"""The paths that a stage takes on its device, for `meta` tensors in the place of the device's.

peakmem has the patches of torch and of other libraries; here are those of this project's own code.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from peakmem import events
from rlhf.models import matmul, random_base
from rlhf.models.lean import layouts, packed, trunk
from rlhf.models.lean.packed import JoinedPrompts
from rlhf.models.shared_base import SharedBase
from rlhf.plan.phases import PHASES_OF_A_STEP, REHEARSED_STEPS
from rlhf.plan.rehearsal.work import CountingStandIn
from rlhf.rollout import decoding, engine, library_decoding
from rlhf.rollout.decoding import Decoding
from rlhf.rollout.library_decoding import CacheLayer
from rlhf.rollout.trunk_decoding import TrunkDecoding
from rlhf.terminal.progress import Bar

Call = Callable[..., Any]


def patches(stand_in: CountingStandIn) -> Iterator[AbstractContextManager[object]]:
    """Yield context managers that put right what would go another way on `meta`, or mark where something begins."""
    patch = mock.patch.object
    # Forward and backward passes have marks, between which peakmem/depth.py aligns events.
    for owner, name in ((torch.autograd, "backward"), (SharedBase, "response_hidden"), (SharedBase, "scores_at")):
        yield patch(owner, name, _marked(stand_in, getattr(owner, name), events.PASS, events.PASS))
    for setting in (
        decoding.STEPS_BETWEEN_CHECKS_BY_DEVICE,
        library_decoding.WINDOW_BY_DEVICE,
        library_decoding.FEW_KERNELS_BY_DEVICE,
        trunk.ONEDNN_BY_DEVICE,
        matmul.FLOAT32_OF_HALVES_BY_DEVICE,
        layouts.COPIES_HEADS_BY_DEVICE,
        layouts.WIDE_ATTENTION_BY_DEVICE,
        packed.APART_BY_DEVICE,
    ):
        yield mock.patch.dict(setting, {"meta": setting[stand_in.stands_for]})
    yield patch(Decoding, "steps", lambda self: (1, self.room - 1) if self.room > 2 else range(1, self.room))
    if stand_in.stands_for == "cpu":  # there the shapes of steps differ
        yield patch(TrunkDecoding, "steps", lambda self: range(1, min(self.room, 3)))
    yield patch(engine, "response_lengths", _longest_responses(engine.response_lengths))
    yield patch(CacheLayer, "lazy_initialization", _cached(stand_in, CacheLayer.lazy_initialization, _both))
    yield patch(JoinedPrompts, "store", _cached(stand_in, JoinedPrompts.store, lambda joined: joined.cached[-1:]))
    yield patch(TrunkDecoding, "__init__", _cached(stand_in, TrunkDecoding.__init__, lambda made: made.layout.cached))
    yield patch(Bar, "update", _last_step_alone(stand_in))
    yield patch(random_base, "skeleton", stand_in.paused()(random_base.skeleton))  # on `meta`, but in earnest
    if stand_in.stands_for == "cuda" and decoding.CAPTURES_BY_DEVICE["cuda"]:
        yield patch(Decoding, "advance", _captured(stand_in))
        yield patch(Decoding, "deliver", _marked(stand_in, Decoding.deliver, events.DROPPED))


def _marked(stand_in: CountingStandIn, run: Call, before: str, after: str | None = None) -> Call:
    """Return a function with a mark before and, where one is given, after it."""

    def call(*args: Any, **options: Any) -> Any:
        stand_in.mark(before)
        result = run(*args, **options)
        if after is not None:
            stand_in.mark(after)
        return result

    return call


def _cached(stand_in: CountingStandIn, run: Call, made: Callable[[Any], Iterable[Tensor]]) -> Call:
    """Return a method that labels the keys and values which it has `made`."""

    def call(self: object, *args: Any) -> None:
        run(self, *args)
        for tensor in made(self):
            stand_in.label(tensor, "kv_cache")

    return call


def _both(layer: CacheLayer) -> Iterable[Tensor]:
    return layer.keys, layer.values


def _last_step_alone(stand_in: CountingStandIn) -> Call:
    """Return what a loop calls after each step; of the work of steps it keeps that of the last one.

    The first step also does what a stage does once: it makes optimizer states, gradients and tables that stay.
    """
    original = Bar.update

    def update(self: Bar, done: int, *more: Any, **options: Any) -> None:
        stand_in.settle_work(PHASES_OF_A_STEP, counts=done == REHEARSED_STEPS)
        original(self, done, *more, **options)

    return update


def _longest_responses(lengths: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    def longest(tokens: Tensor, eos_id: int) -> Tensor:
        found = lengths(tokens, eos_id)
        # Those of many tokens are not computed and read as 0.
        return torch.full((len(tokens),), tokens.shape[1], device=tokens.device) if 0 in found.tolist() else found

    return longest


def _captured(stand_in: CountingStandIn) -> Callable[..., None]:
    """Return a decoding step that marks the second of two as captured, as most steps of a long response are."""
    original = Decoding.advance
    steps: weakref.WeakKeyDictionary[Decoding, int] = weakref.WeakKeyDictionary()

    def advance(self: Decoding) -> None:
        steps[self] = steps.get(self, 0) + 1
        capture = steps[self] == 2 and self.room > decoding.WORTH_A_GRAPH + 1
        if capture:
            stand_in.mark(events.CAPTURE)
        original(self)
        if capture:
            stand_in.mark(events.CAPTURED)

    return advance
