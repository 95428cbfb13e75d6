"""Symbols of other libraries that are replaced while a stand-in is on, and those that a version lacks."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from peakmem.device import StandIn

Patch = AbstractContextManager[object]  # replaces something while it is entered
LIBRARIES = ("accelerate", "transformers", "peft", "bitsandbytes", "trl")  # with a module here


def patches(stand_in: "StandIn") -> Iterator[Patch]:
    """Yield the patches of each library that is installed; nothing of the others is imported."""
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is None:
            continue
        try:
            yield from importlib.import_module(f"peakmem.patches.{library}").patches(stand_in)
        except ImportError as error:
            _say_once(f"{library} cannot be imported ({error}): what it does is followed as torch sees it")


def replaced(symbol: str, make: Callable[[Any], Any]) -> Iterator[Patch]:
    """Yield a patch that puts `make(what is there)` in the place of a symbol, `module:name` or `module:Class.name`.

    Where this version of the library has no such symbol, yield nothing and say so: the rest is followed as ever.
    """
    owner, name, found = _find(symbol)
    if owner is None:
        library = symbol.partition(".")[0].partition(":")[0]
        _say_once(f"{library} {_version(library)} has no {symbol}: memory that depends on it is predicted less exactly")
    else:
        yield mock.patch.object(owner, name, make(found))


def _find(symbol: str) -> tuple[Any, str, Any]:
    """Return what holds a symbol, its name there and the symbol itself; three times nothing if it is not there."""
    module, _, path = symbol.partition(":")
    *owners, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError):
        return None, "", None


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "(of no known version)"


@functools.cache
def _say_once(text: str) -> None:
    print(f"peakmem: {text}", file=sys.stderr)
