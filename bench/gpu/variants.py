"""Variants of the same work, each a context manager. A new switch gets a line in DECODING or TRAINING.

A variant is called with the shared base and is on inside its `with` block.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from bench.rounds import in_order
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.stages.supervised.forward import as_decoder, without_mask

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


Variant = Callable[[Any], AbstractContextManager[None]]


def as_it_is(shared: Any) -> AbstractContextManager[None]:
    """Change nothing."""
    return nullcontext()


@contextmanager
def lean_trunk(shared: Any) -> Iterator[None]:
    """Run the lean trunk in place of the decoder's layers, without a mask, as stages do."""
    trunk = LeanTrunk(shared.base)
    with without_mask(trunk.decoder), as_decoder(trunk):
        yield


@contextmanager
def no_adapters(shared: Any) -> Iterator[None]:
    """Run the base alone, which bounds the cost of adapters."""
    shared.roles.activate("base")
    try:
        yield
    finally:
        shared.roles.activate("policy")


@contextmanager
def library_layers(shared: Any) -> Iterator[None]:
    """Sample with the library's layers where the stages sample with the lean trunk."""
    trunk, shared.lean_trunk = shared.lean_trunk, None
    try:
        yield
    finally:
        shared.lean_trunk = trunk


AS_IT_IS, LEAN, LIBRARY = "as the stages run", "lean trunk", "the library's layers"
# The first entry is what a run does; the others differ from it in one thing. New switches belong here.
DECODING_VARIANTS: dict[str, Variant] = {AS_IT_IS: as_it_is, LIBRARY: library_layers, "no adapters": no_adapters}
TRAINING: dict[str, Variant] = {AS_IT_IS: as_it_is, LEAN: lean_trunk}


@contextmanager
def in_turn(variant: Variant, shared: Any) -> Iterator[None]:
    """Enter a variant with the device idle before and after, so that no work runs under another's switches."""
    synchronize()
    with variant(shared):
        yield
        synchronize()


def in_rounds(work: Mapping[K, Callable[[int], T]], rounds: int) -> Iterator[tuple[K, list[T] | str]]:
    """Do every piece of work once in each round, so that a drift of the card's clocks falls on all of them.

    Every second round has the reverse order.
    Work is called with the number of its round. After each piece its name and its results so far are yielded; instead
    of the results an error as text, after which this piece is left out.
    """
    results: dict[K, list[T]] = {name: [] for name in work}
    failed = set()
    for number in range(rounds):
        for name, do in in_order(work.items(), number):
            if name in failed:
                continue
            try:
                results[name].append(do(number))
            except Exception as error:  # of one variant: a result, and the others still run
                failed.add(name)
                yield name, f"{type(error).__name__}: {str(error)[:200]}"
            else:
                yield name, results[name]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
