"""Native code that a program brings along, beside torch's own: an extension's functions are refused on the card.

They work on memory by its address, and what they allocate is not known. Operations that an extension registers with
torch go through torch's dispatcher instead, and have a size if they say one for tensors without data.
"""

import functools
import importlib.machinery
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import Tensor

from peakmem.tensors import on_stand_in, tensors_in

if TYPE_CHECKING:
    from peakmem.device import StandIn

LINKED = b"libc10"  # the library of torch's tensors, by whose name an extension says that it works on them


def guarded(stand_in: "StandIn") -> AbstractContextManager[object]:
    """Return a block in which functions of extensions that are imported refuse tensors of the card."""
    loader = importlib.machinery.ExtensionFileLoader
    run = loader.exec_module

    def exec_module(self: Any, module: ModuleType) -> None:
        run(self, module)
        if _works_on_tensors(self.path):
            for name, value in list(vars(module).items()):
                if isinstance(value, BuiltinFunctionType):
                    setattr(module, name, _refusing(stand_in, value, f"{module.__name__}.{name}"))

    return mock.patch.object(loader, "exec_module", exec_module)


def _works_on_tensors(file: str) -> bool:
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(LINKED) >= 0


def _refusing(stand_in: "StandIn", function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any(isinstance(x, Tensor) and on_stand_in(x) for x in tensors_in(*given)):
            stand_in.refuse(f"{name} is native code, which has no known size")
        return function(*args, **kwargs)

    return call
