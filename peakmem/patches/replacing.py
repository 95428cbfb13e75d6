"""Symbols of other libraries that are replaced while a stand-in is on, from the moment at which they are imported.

Nothing is imported here: a program that does not use a library neither waits for it nor needs it.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

from peakmem.patches import bitsandbytes, peft, transformers, triton, trl

if TYPE_CHECKING:
    from peakmem.device import StandIn

Patch = AbstractContextManager[object]  # replaces something while it is entered


def patches(stand_in: "StandIn") -> Iterator[Patch]:
    """Yield the patches of each library that is followed."""
    for library in (transformers, peft, bitsandbytes, trl, triton):
        for symbol, make in library.replacements(stand_in):
            yield Replaced(symbol, make)


class Replaced(AbstractContextManager["Replaced"]):
    """Has `make(what is there)` in the place of a symbol, `module:name` or `module:Class.name`, inside the block.

    A module that is imported later gets its replacement then. Where a version of the library has no such symbol, that
    is said once on stderr, and the rest is followed as ever.
    """

    def __init__(self, symbol: str, make: Callable[[Any], Any]):
        self._symbol, self._make = symbol, make
        self._module, _, self._path = symbol.partition(":")
        self._undo = ExitStack()

    def __enter__(self) -> "Replaced":
        module = sys.modules.get(self._module)
        if module is not None:
            self._replace(module)
        else:
            self._undo.enter_context(_AfterImport(self._module, self._replace))
        return self

    def __exit__(self, *problem: object) -> None:
        self._undo.close()

    def _replace(self, module: ModuleType) -> None:
        *owners, name = self._path.split(".")
        owner: Any = module
        try:
            for part in owners:
                owner = getattr(owner, part)
            found = getattr(owner, name)
        except AttributeError:
            library = self._module.partition(".")[0]
            _say_once(f"{library} {_version(library)} has no {self._symbol}: what depends on it is less exact")
        else:
            self._undo.enter_context(mock.patch.object(owner, name, self._make(found)))


class _AfterImport(importlib.abc.MetaPathFinder, AbstractContextManager["_AfterImport"]):
    """Calls `then` with a module as soon as it has been imported inside the block."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self._name, self._then = name, then

    def __enter__(self) -> "_AfterImport":
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *problem: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with a loader that calls `then` at its end; None for other modules."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._then)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A module's loader, which calls `then` after it."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]):
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and then `then`."""
        self._loader.exec_module(module)
        self._then(module)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "(of no known version)"


@functools.cache
def _say_once(text: str) -> None:
    print(f"peakmem: {text}", file=sys.stderr)
