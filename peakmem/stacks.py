"""Stacks of equal layers: those that a program makes, and a model that has few layers of one of them."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

from torch import nn

LEAST_LAYERS = 7  # of a stack that is worth two short runs


class Stack(NamedTuple):
    """Equal layers of a model: the class of one, and how many there are."""

    layer: str
    layers: int


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
        found = [([*x.children()], grew) for x, grew in self._found.items()]
        depths = [(len(layers), type(layers[0]).__qualname__, grew) for layers, grew in found if _equal(layers)]
        layers, layer, _ = max(depths, default=(0, "", False))
        grown = {n for n, name, grew in depths if name == layer and grew}
        return Stack(layer, layers) if layers >= LEAST_LAYERS and grown <= {layers} else None

    def _making(self, make: Any) -> Any:
        def init(owner: Any, *args: Any) -> None:
            listed = type(owner) is nn.ModuleList and args and args[0] is not None
            layers = list(args[0] if listed else args)  # what is given may be read once only
            if self._short and _equal(layers) and Stack(type(layers[0]).__qualname__, len(layers)) == self._short:
                self._left_out(layers[self._layers :])
                layers = layers[: self._layers]
            make(owner, *([layers] if listed else layers))
            self._found[owner] = False

        return init

    def _growing(self, append: Any) -> Any:
        def add(owner: Any, layer: nn.Module) -> Any:
            few = self._short and len(owner) >= self._layers and type(layer).__qualname__ == self._short.layer
            if few and _equal([owner[0], layer]):
                self._left_out([layer])
                return owner
            self._found[owner] = True
            return append(owner, layer)

        return add


def _equal(layers: Sequence[nn.Module]) -> bool:
    """Return whether layers are of one class, with parameters of the same shapes."""
    if not layers or any(type(x) is not type(layers[0]) for x in layers) or not isinstance(layers[0], nn.Module):
        return False
    shapes = {tuple((name, tuple(p.shape)) for name, p in x.named_parameters()) for x in layers}
    return len(shapes) == 1 and bool(next(iter(shapes)))
