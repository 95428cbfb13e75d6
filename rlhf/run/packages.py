"""Packages: versions of installed ones, those that a setting needs, how to install an extra; a hash of modules."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import sha256

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "numpy")


def package_versions() -> dict[str, str]:
    """Return the versions of those installed packages that can change results."""
    return {name: version for name in PACKAGES if (version := package_version(name))}


def package_version(package: str) -> str | None:
    """Return a package's version, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_found(names: Sequence[str], needing: str, extra: str) -> None:
    """Raise UserError, with the command that installs `extra`, unless all these modules can be imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{needing} needs {' and '.join(missing)}: {install_command(extra)}")


def require(package: str, what: str, way_out: str) -> None:
    """Import a package, or raise UserError with the way out.

    Without this check transformers would fail later, or blame another package.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{what} needs {package} ({error}): {way_out}") from error


def install_command(extra: str) -> str:
    """Return the command that installs an optional part: from the checkout, or by its packages without one."""
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return f"pip install '.[{extra}]'"
    try:
        requirements = importlib.metadata.requires("rlhf-one-gpu") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    needed = [line.partition(";")[0].strip() for line in requirements if re.search(rf"extra == .{extra}\b", line)]
    return f"pip install {shlex.join(needed)}" if needed else f"pip install 'rlhf-one-gpu[{extra}]'"


def hash_of_modules(package: Path, without: Collection[str] = ()) -> str:
    """Return the hash of all modules of a package, their names and those of its subpackages included.

    Subpackages directly in it that are named in `without` do not count.
    """
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] in without:
            continue
        code.update(f"{file.relative_to(package).as_posix()} {sha256(file)}\n".encode())
    return code.hexdigest()
