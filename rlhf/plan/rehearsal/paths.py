"""The paths that a stage takes on its device, for `meta` tensors in the place of the device's.

peakmem has the patches of torch and of other libraries; here are those of this project's own code.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils import checkpoint

from peakmem import events
from peakmem.patches.replacing import Replaced
from rlhf.models import matmul, random_base
from rlhf.models.lean import layouts, packed, trunk
from rlhf.models.lean.growing import JoinedPrompts
from rlhf.plan.phases import PHASES_OF_A_STEP, REHEARSED_STEPS
from rlhf.plan.rehearsal import passes
from rlhf.plan.rehearsal.work import CountingStandIn
from rlhf.rollout import decoding, engine, library_decoding
from rlhf.rollout.cache import CacheLayer
from rlhf.rollout.decoding import Decoding
from rlhf.rollout.trunk_decoding import TrunkDecoding
from rlhf.terminal.progress import Bar

P = ParamSpec("P")
R = TypeVar("R")


def patches(stand_in: CountingStandIn) -> Iterator[passes.Patch]:
    """Yield context managers that put right what would go another way on `meta`."""
    patch = mock.patch.object
    yield from passes.patches(stand_in)
    yield patch(checkpoint, "_recomputation_hook", _counted_hook(stand_in, checkpoint._recomputation_hook))
    # The backward pass of TRL's fused head makes the logits again.
    again = "trl.kernels.chunked_logprob:ChunkedLogProbFunction.backward"
    yield Replaced(again, lambda backward: staticmethod(_recomputing(stand_in, backward)))
    for setting in (
        decoding.STEPS_BETWEEN_CHECKS_BY_DEVICE,
        library_decoding.WINDOW_BY_DEVICE,
        library_decoding.FEW_KERNELS_BY_DEVICE,
        trunk.ONEDNN_BY_DEVICE,
        matmul.FLOAT32_OF_HALVES_BY_DEVICE,
        layouts.COPIES_HEADS_BY_DEVICE,
        layouts.WIDE_ATTENTION_BY_DEVICE,
        packed.PACKS_BY_DEVICE,
    ):
        yield mock.patch.dict(setting, {"meta": setting[stand_in.stands_for]})
    yield patch(Decoding, "steps", lambda self: (1, self.room - 1) if self.room > 2 else range(1, self.room))
    if stand_in.stands_for == "cpu":  # there the shapes of steps differ
        yield patch(TrunkDecoding, "steps", lambda self: range(1, min(self.room, 3)))
    yield patch(engine, "response_lengths", _longest_responses(engine.response_lengths))
    yield patch(CacheLayer, "lazy_initialization", _labelled_cache(stand_in))
    yield patch(JoinedPrompts, "store", _labelled_joined(stand_in))
    yield patch(TrunkDecoding, "__init__", _labelled_growth(stand_in))
    yield patch(Bar, "update", _last_step_alone(stand_in))
    yield patch(random_base, "skeleton", _untracked(stand_in, random_base.skeleton))  # on `meta`, but in earnest
    if stand_in.stands_for == "cuda" and decoding.CAPTURES_BY_DEVICE["cuda"]:
        yield patch(Decoding, "advance", _captured(stand_in))
        yield patch(Decoding, "deliver", _without_graph(stand_in))


def _last_step_alone(stand_in: CountingStandIn) -> Callable[..., None]:
    """Return what a loop calls after each step; of the work of steps it keeps that of the last one.

    The first step also does what a stage does once: it makes optimizer states, gradients and tables that stay.
    """
    original = Bar.update

    def update(self: Bar, done: int, *more: Any, **options: Any) -> None:
        stand_in.settle_work(PHASES_OF_A_STEP, counts=done == REHEARSED_STEPS)
        original(self, done, *more, **options)

    return update


def _labelled_cache(stand_in: CountingStandIn) -> Callable[..., None]:
    original = CacheLayer.lazy_initialization

    def lazy_initialization(self: CacheLayer, keys: Tensor, values: Tensor) -> None:
        original(self, keys, values)
        stand_in.label(self.keys, "kv_cache")
        stand_in.label(self.values, "kv_cache")

    return lazy_initialization


def _longest_responses(lengths: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    def longest(tokens: Tensor, eos_id: int) -> Tensor:
        found = lengths(tokens, eos_id)
        # Those of many tokens are not computed and read as 0.
        return torch.full((len(tokens),), tokens.shape[1], device=tokens.device) if 0 in found.tolist() else found

    return longest


def _labelled_joined(stand_in: CountingStandIn) -> Callable[..., None]:
    original = JoinedPrompts.store

    def store(self: JoinedPrompts, number: int, heads: Tensor, first: int) -> None:
        original(self, number, heads, first)
        stand_in.label(self.cached[-1], "kv_cache")

    return store


def _labelled_growth(stand_in: CountingStandIn) -> Callable[..., None]:
    original = TrunkDecoding.__init__

    def init(self: TrunkDecoding, *arguments: Any) -> None:
        original(self, *arguments)
        for cached in self.layout.cached:
            stand_in.label(cached, "kv_cache")

    return init


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


def _without_graph(stand_in: CountingStandIn) -> Callable[..., None]:
    original = Decoding.deliver

    def deliver(self: Decoding) -> None:
        stand_in.mark(events.DROPPED)
        original(self)

    return deliver


def _untracked(stand_in: CountingStandIn, function: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with stand_in.paused():
            return function(*args, **kwargs)

    return call


def _counted_hook(stand_in: CountingStandIn, hook: Any) -> Any:
    """Return the block in which checkpointing runs a forward pass again, whose operations count as recomputed."""

    class Hook(hook):  # type: ignore[misc]  # torch makes the class, so that nothing is known of it here
        def __enter__(self) -> Any:
            stand_in.recomputing += 1
            return super().__enter__()

        def __exit__(self, *problem: Any) -> Any:
            stand_in.recomputing -= 1
            return super().__exit__(*problem)

    return Hook


def _recomputing(stand_in: CountingStandIn, function: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        stand_in.recomputing += 1
        try:
            return function(*args, **kwargs)
        finally:
            stand_in.recomputing -= 1

    return call
