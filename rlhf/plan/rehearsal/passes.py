"""Forward and backward passes on the stand-in device have marks, between which depth.py aligns events."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar
from unittest import mock

import torch

from peakmem import Tracker, events
from rlhf.models.shared_base import SharedBase

T = TypeVar("T")
P = ParamSpec("P")
Patch = AbstractContextManager[object]  # replaces something while it is entered


def patches(tracker: Tracker) -> Iterator[Patch]:
    """Yield context managers by which passes are marked."""
    patch = mock.patch.object
    yield patch(torch.autograd, "backward", _marked(tracker, torch.autograd.backward))
    yield patch(SharedBase, "response_hidden", _marked(tracker, SharedBase.response_hidden))
    yield patch(SharedBase, "scores_at", _marked(tracker, SharedBase.scores_at))


def _marked(tracker: Tracker, run: Callable[P, T]) -> Callable[P, T]:
    """Return a pass with a mark before and after it."""

    def call(*args: P.args, **options: P.kwargs) -> T:
        tracker.mark(events.PASS)
        result = run(*args, **options)
        tracker.mark(events.PASS)
        return result

    return call
