"""Stacks of equal layers: those that a program makes, and a model that has few layers of one of them."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

from torch import nn

LEAST_LAYERS = 7  # of a stack that is worth two short runs


class Stack(NamedTuple):
    """Equal layers of a model: the class of one, and how many there are; layers of several kinds repeat in periods."""

    layer: str
    layers: int
    period: int = 1

    @property
    def depths(self) -> tuple[int, int]:
        """Return how many layers the two short runs have."""
        low = 2 if self.layers // self.period % 2 == 0 else 3 if self.period == 1 else 1
        return low * self.period, (low + 2) * self.period


class Stacks:
    """Notes the stacks that are made. With `short`, those that are like it get `layers` layers.

    `left_out` is told of layers that were made and that no stack has.
    """

    def __init__(self, short: Stack | None, layers: int, left_out: Callable[[Sequence[nn.Module]], None]):
        self._short, self._layers, self._left_out = short, layers, left_out
        self._found: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # whether it grew

    def patches(self) -> Iterator[AbstractContextManager[object]]:
        """Yield patches of the modules that hold a stack."""
        for kind in (nn.ModuleList, nn.Sequential):
            yield mock.patch.object(kind, "__init__", self._making(kind.__init__))
            yield mock.patch.object(kind, "append", self._growing(kind.append))

    def worth(self) -> Stack | None:
        """Return the deepest stack if it has enough layers; None where others of its class grow to another depth.

        How many layers a stack gets that grows is not known while it does.
        """
        found = [(_stack([*x.children()]), grew) for x, grew in self._found.items()]
        stacks = [(stack.layers, stack, grew) for stack, grew in found if stack]
        layers, deepest, _ = max(stacks, default=(0, Stack("", 0), False))
        grown = {n for n, stack, grew in stacks if stack.layer == deepest.layer and grew}
        return deepest if layers >= LEAST_LAYERS and grown <= {layers} else None

    def _making(self, make: Any) -> Any:
        def init(owner: Any, *args: Any) -> None:
            listed = type(owner) is nn.ModuleList and args and args[0] is not None
            layers = list(args[0] if listed else args)  # what is given may be read once only
            if self._short and len(layers) == self._short.layers and _stack(layers) == self._short:
                self._left_out(layers[self._layers :])
                layers = layers[: self._layers]
            make(owner, *([layers] if listed else layers))
            self._found[owner] = False

        return init

    def _growing(self, append: Any) -> Any:
        def add(owner: Any, layer: nn.Module) -> Any:
            few = self._short and len(owner) >= self._layers and type(layer).__qualname__ == self._short.layer
            if few and _kind(layer) in {_kind(owner[n]) for n in range(self._short.period if self._short else 0)}:
                self._left_out([layer])
                return owner
            self._found[owner] = True
            return append(owner, layer)

        return add


def _stack(layers: Sequence[nn.Module]) -> Stack | None:
    """Return what layers are a stack of: the shortest period in which their kinds repeat, with some parameters."""
    kinds = [_kind(x) for x in layers]
    for period in range(1, max(1, len(layers) // 5) + 1):  # of fewer periods, the short runs would be no shorter
        if len(layers) % period == 0 and kinds[period:] == kinds[:-period] and any(kind[-1] for kind in kinds):
            return Stack(type(layers[0]).__qualname__, len(layers), period)
    return None


def _kind(layer: nn.Module) -> tuple[type, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return what equal layers have in common: their class, and the names and shapes of their parameters."""
    return type(layer), tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
