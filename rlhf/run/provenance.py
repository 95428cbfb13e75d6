"""What a run is made with: the commit of the code, versions of packages."""

import importlib.metadata
import os
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "numpy")


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide results, of those that are installed."""
    return {name: version for name in PACKAGES if (version := _version(name))}


def code_version() -> dict[str, Any]:
    """Commit of the code that runs and whether anything that decides results differs from it; None outside git.

    A container image has no history: RLHF_COMMIT is what it was built from, with `-dirty` where that had changes.
    """
    if built := os.environ.get("RLHF_COMMIT"):
        return {"commit": built.removesuffix("-dirty"), "dirty": built.endswith("-dirty")}
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(root), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    commit = git("rev-parse", "HEAD")
    status = git("status", "--porcelain", "--", "rlhf", "bench", "recipes", "requirements", "pyproject.toml")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
