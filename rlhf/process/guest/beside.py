"""The user's own modules: those beside the rewards, in the folder that RLHF_BESIDE names.

They are imported as `rlhf.process.guest.beside.NAME`, and that folder is on no path. So a library never finds a module
of the user's, whatever its name and whenever the library looks for one, and neither module takes the other's place in
`sys.modules`. The import statements of the user's modules look in that folder first, as those of a script do: they are
executed with an `__import__` of their own, and what they ask importlib for is found there too. Children of the process,
also spawned ones, find these modules in the same way, so that what a function of the user's sends to them can be
unpickled there.
"""

import builtins
import functools
import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FrameType, ModuleType
from typing import Any

VARIABLE = "RLHF_BESIDE"
PREFIX = f"{__name__}."
__path__ = [os.environ[VARIABLE]] if VARIABLE in os.environ else []  # makes this module a package


def import_module(name: str) -> ModuleType:
    """Import a module from the folder, or where it has none of this name, from an installed package."""
    return importlib.import_module(f"{PREFIX}{name}" if _is_beside(name.partition(".")[0]) else name)


@functools.cache
def _is_beside(top: str) -> bool:
    """Return whether the folder has a module or package `top` that is not the one that everybody imports.

    A folder without `__init__.py`, as one of data files, comes after installed packages, as in all imports.
    """
    if top in sys.builtin_module_names or (found := PathFinder.find_spec(PREFIX + top, __path__)) is None:
        return False
    installed = PathFinder.find_spec(top)
    return installed is None or (found.loader is not None and found.origin != installed.origin)


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Do what the import statement of a user's module asks for."""
    top = name.partition(".")[0]
    if level or not _is_beside(top):
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    module = builtins.__import__(PREFIX + name, globals, locals, fromlist or ())
    return module if fromlist else sys.modules[PREFIX + top]


_BUILTINS = {**vars(builtins), "__import__": _import}


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = _BUILTINS  # import statements find `__import__` there
        super().exec_module(module)


class _Alias:
    """Loads a module of the folder under its plain name, for `importlib.import_module` in a module of the user's."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # not that of the alias


class _Finder:
    """Finds the modules of the folder for `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(PREFIX):
            top = name.partition(".")[0]
            of_alias = path is not None and sys.modules.get(top) is sys.modules.get(PREFIX + top, False)
            ours = of_alias or (path is None and _is_beside(name) and _asked_by_user())
            return ModuleSpec(name, _Alias()) if ours else None  # type: ignore[arg-type]  # both methods are there
        spec = PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def as_written(text: str) -> str:
    """Return a text about the user's modules with the names that these have in their statements."""
    return text.replace(PREFIX, "")


def place_of(error: BaseException) -> str | None:
    """Return where the user's code raised an error, with the code: `my_rewards.py:7: return 1 / 0`.

    It is the innermost line of the modules in the folder; without any, as with an installed module of the user's, the
    line of the first module that this project called. None in a process that has no folder of the user's.
    """
    if not __path__:
        return None
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):
        return _place(str(error.filename), error.lineno or 1)
    frames = [(_module_of(frame), frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if frame[0].startswith(PREFIX)][-1:]
    called = max((i for i, (module, *_) in enumerate(frames) if module.startswith("rlhf.")), default=-1)
    others = [frame for frame in frames[called + 1 :] if not frame[0].startswith("importlib")]
    return next((_place(frame.f_code.co_filename, line) for _, frame, line in own or others), None)


def _place(file: str, line: int) -> str:
    inside = os.path.relpath(file, __path__[0])
    return f"{file if inside.startswith(os.pardir) else inside}:{line}: {linecache.getline(file, line).strip()}"


def _asked_by_user() -> bool:
    """Return whether the code that asks for a module, through the import system, is a module of the folder."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _module_of(frame).startswith("importlib"):
        frame = frame.f_back
    return frame is not None and _module_of(frame).startswith(PREFIX)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


sys.meta_path.insert(0, _Finder)
