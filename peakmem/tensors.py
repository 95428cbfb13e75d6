"""Tensors and operations as a dispatch mode sees them, and the numbers of tensors without data."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

Op = OpOverload[..., Any]  # an operation as torch's dispatcher gives it
Args = tuple[Any, ...]  # an operation's arguments by position: tensors, lists of them, numbers and other types
Kwargs = dict[str, Any]  # its arguments by name
Count = Callable[[Args, Kwargs], int]
Blocks = Callable[[Args, Kwargs], int | tuple[int, ...]]  # bytes of one block, or of several that are alive together

META = torch.device("meta")  # of tensors that have shapes and no numbers
PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # arguments that hold no tensor


def tensors_in(*things: object) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results; torch's own walk takes far longer."""
    tensors: list[Tensor] = []
    for thing in things:
        if type(thing) in PLAIN:
            continue
        if isinstance(thing, Tensor):
            tensors.append(thing)
        elif isinstance(thing, (list, tuple)):
            tensors += tensors_in(*thing)
    return tensors


def on_stand_in(x: Tensor) -> bool:
    """Return whether a tensor lies on the stand-in, whatever a program is told about it."""
    with torch._C.DisableTorchFunction():
        return x.is_meta


def known_numbers(x: Tensor) -> Tensor | None:
    """Return the numbers of a tensor on a stand-in as a tensor of the host; None if they are not known.

    Known are numbers that decide shapes: lengths, masks and indices.
    """
    numbers: Tensor | None = getattr(x, "_known_numbers", None)
    return numbers


def remember(x: Tensor, numbers: Tensor) -> None:
    """Let `known_numbers` of a `meta` tensor return these."""
    x._known_numbers = numbers  # type: ignore[attr-defined]  # an attribute of this module


def forget(x: Tensor) -> None:
    """Let the numbers of a `meta` tensor be unknown from now on."""
    if hasattr(x, "_known_numbers"):
        del x._known_numbers
