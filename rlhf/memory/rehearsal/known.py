"""The numbers of a tensor without data, where they are known: lengths, masks and indices, which decide shapes."""

from torch import Tensor


def known_numbers(x: Tensor) -> Tensor | None:
    """Return the numbers of a `meta` tensor as a tensor of the host; None if they are not known."""
    numbers: Tensor | None = getattr(x, "_known_numbers", None)
    return numbers


def remember(x: Tensor, numbers: Tensor) -> None:
    """Let `known_numbers` of a `meta` tensor return these."""
    x._known_numbers = numbers  # type: ignore[attr-defined]  # an attribute of this module
