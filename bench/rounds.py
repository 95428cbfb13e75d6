"""The order in which a round measures what is compared."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def in_order(compared: Iterable[T], number: int) -> list[T]:
    """Return what is compared in its order, and in every second round (by its `number`, from 0) in reverse.

    None of it always runs on a machine that others have warmed.
    """
    ordered = list(compared)
    return ordered[::-1] if number % 2 else ordered
