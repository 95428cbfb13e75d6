"""Where a rehearsal replaces a stage's functions: one table, with a reason for each.

What a stage does again and again is rehearsed once or twice, which takes as much memory. What takes no memory of the
device is left out. Every batch gets a shorter row: a batch of rows that are all
as long as the stage admits needs no mask; one shorter row can need one, and with it another attention kernel and copies
of keys and values for every query head.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from unittest import mock

from rlhf.plan.phases import MOST_REPEATS

if TYPE_CHECKING:
    from rlhf.evaluation.references import Overlap

T = TypeVar("T")
Rows = list[dict[str, Any]]  # for one of TRL's collators: token ids by key, a margin


class Seam(NamedTuple):
    """A function that a rehearsal replaces. `stand_in` gets the function and returns what is called in its place."""

    owner: object  # a class or a module
    name: str
    stand_in: Callable[[Any], Callable[..., Any] | property]
    why: str


def seams() -> list[Seam]:
    """Return the functions that a rehearsal replaces."""
    import torch
    from transformers.data.data_collator import DataCollatorMixin

    from rlhf.evaluation import policies
    from rlhf.evaluation.references import Overlap
    from rlhf.models import checkpoints
    from rlhf.rollout.library_decoding import LibraryDecoding
    from rlhf.stages.online import session
    from rlhf.stages.online.scores import Scores
    from rlhf.stages.online.train_state import TrainState

    return [
        Seam(torch, "save", _left_out, "files take no memory of the device"),
        Seam(TrainState, "save", _left_out, "files take no memory of the device"),
        Seam(checkpoints, "check_finite", _left_out, "adapters of zeros hold no NaN"),
        Seam(Overlap, "metrics", _on_device, "without an encoder the host compares texts"),
        Seam(Scores, "judged", _all_judged, "of numbers that are not known all are verdicts"),
        Seam(TrainState, "_minibatches", _first, "further minibatches take no more memory"),
        Seam(DataCollatorMixin, "__call__", _with_one_shorter, "a shorter row needs a mask"),
        Seam(LibraryDecoding, "__init__", _with_shorter_prompt, "a shorter prompt needs a mask"),
        Seam(session, "check_first", _left_out, "a shorter prompt is another than the one that is scored"),
        Seam(policies, "check_first", _left_out, "a shorter prompt is another than the one that is scored"),
    ]


@contextmanager
def with_seams() -> Iterator[None]:
    """Replace the functions of the table inside the block."""
    with ExitStack() as patches:
        for seam in seams():
            stand_in = seam.stand_in(getattr(seam.owner, seam.name))
            patches.enter_context(mock.patch.object(seam.owner, seam.name, stand_in))
        yield


def _left_out(_: Callable[..., object]) -> Callable[..., None]:
    return lambda *_, **__: None


def _all_judged(_: property) -> property:
    import torch

    return property(lambda scores: torch.ones(len(scores.raw), dtype=torch.bool, device=scores.raw.device))


def _on_device(metrics: Callable[["Overlap", T], dict[str, float]]) -> Callable[["Overlap", T], dict[str, float]]:
    return lambda overlap, texts: {} if overlap._encoder is None else metrics(overlap, texts)


def _first(minibatches: Callable[..., Iterator[T]]) -> Callable[..., Iterator[T]]:
    return lambda *sizes: itertools.islice(minibatches(*sizes), MOST_REPEATS)


def _with_one_shorter(collate: Callable[..., T]) -> Callable[..., T]:
    def collate_padded(self: object, rows: Rows, *more: object, **options: object) -> T:
        return collate(self, _one_shorter(rows), *more, **options)

    return collate_padded


def _with_shorter_prompt(start: Callable[..., None]) -> Callable[..., None]:
    def start_padded(self: object, model: object, prompts: list[list[int]], *more: object) -> None:
        shorter = [prompts[0][:-1], *prompts[1:]] if len(prompts) > 1 and len(prompts[0]) > 1 else prompts
        start(self, model, shorter, *more)

    return start_padded


def _one_shorter(rows: Rows) -> Rows:
    """Return the rows for one of TRL's collators, the first one a token shorter; of pairs the rejected response.

    Without pairs all its texts are shorter but for a prompt of its own, and a row that is alone stays as it is.
    """
    first = rows[0]
    texts = [key for key, value in first.items() if isinstance(value, list) and key != "prompt_ids"]
    keys = ["rejected_ids"] if "rejected_ids" in texts else texts if len(rows) > 1 else []
    if any(len(first[key]) < 2 for key in keys):
        return rows
    return [{key: value[:-1] if key in keys else value for key, value in first.items()}, *rows[1:]]
