"""Packages: versions of installed ones, those that a setting needs, how to install an extra; a hash of modules."""

import hashlib
import importlib.metadata
import importlib.util
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import sha256

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "numpy")


def package_versions() -> dict[str, str]:
    """Return the versions of those installed packages that can change results."""
    return {name: version for name in PACKAGES if (version := package_version(name))}


def package_version(package: str) -> str | None:
    """Return a package's version, or None if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def require(modules: Sequence[str], needing: str, way_out: str) -> None:
    """Raise UserError with the way out unless all these modules are installed.

    Without this check transformers would fail later, or blame another package.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{needing} needs {' and '.join(missing)}: {way_out}")


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an optional part."""
    try:
        requirements = importlib.metadata.requires("rlhf-one-gpu") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return f"pip install '.[{extra}]'"
    needed = [line.partition(";")[0].strip() for line in requirements if line.endswith(f'extra == "{extra}"')]
    return f"pip install {shlex.join(needed)}"


def hash_of_modules(package: Path) -> str:
    """Return the hash of all modules of a package, their names and those of its subpackages included."""
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(f"{file.relative_to(package).as_posix()} {sha256(file)}\n".encode())
    return code.hexdigest()
