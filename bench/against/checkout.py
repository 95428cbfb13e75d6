"""The code that a change is held against: a commit, unpacked beside the working tree, with its environment."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from bench.paths import ROOT
from rlhf.errors import UserError
from rlhf.run.provenance import git_environment

MAIN = ("origin/main", "main")  # the first that there is
CHECKOUTS = ROOT / "build" / "against"  # git ignores it, and `make clean` removes it
LOCK = "requirements/cpu.txt"
DONE = ".unpacked"
MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")  # by which make hands the variables that it was given on


class Checkout(NamedTuple):
    """A folder with code, the interpreter that has its packages, and what it is called."""

    name: str
    root: Path
    python: str


def working_tree() -> Checkout:
    """Return the code that stands here, with whatever was not committed."""
    return Checkout("working tree", ROOT, sys.executable)


def base_revision(root: Path = ROOT) -> str | None:
    """Return the commit before the change that `root` holds; None where there is no history to look at.

    It is where the branch left main. On main itself it is the newest commit if files differ from it, and otherwise the
    commit before that.
    """
    main = next((name for name in MAIN if commit_of(name, root)), None)
    head = commit_of("HEAD", root)
    if head is None:
        return None
    base = _git(root, "merge-base", "HEAD", main) if main else None
    if base is not None and base != head:
        return base
    return head if _git(root, "status", "--porcelain") else commit_of("HEAD^", root)


def commit_of(revision: str, root: Path = ROOT) -> str | None:
    """Return the hash of a revision's commit; None where git knows none."""
    return _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")


def unpack(revision: str, root: Path = ROOT, into: Path = CHECKOUTS) -> Checkout:
    """Return a revision's files in a folder of their own, below `into`. Raises UserError where git knows none.

    Where its lock is that of the working tree, its packages are those of this interpreter; otherwise `make setup` makes
    an environment in its folder, once.
    """
    commit = commit_of(revision, root)
    if commit is None:
        raise UserError(f"REV={revision}: git knows no such commit here: name one that `git log` shows, or fetch it")
    folder = into / commit[:12]
    if not (folder / DONE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["git", "-C", str(root), "archive", commit]
        archive = subprocess.run(command, capture_output=True, env=git_environment())
        if archive.returncode:
            raise UserError(f"REV={revision}: git archive: {archive.stderr.decode(errors='replace').strip()}")
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
        (folder / DONE).touch()
    name = commit[:8] if commit.startswith(revision) else f"{revision} ({commit[:8]})"
    return Checkout(name, folder, _interpreter(folder, root))


def _interpreter(folder: Path, root: Path) -> str:
    ours, theirs = root / LOCK, folder / LOCK
    if not theirs.is_file() or theirs.read_bytes() == ours.read_bytes():
        return sys.executable
    extras = os.environ.get("EXTRAS", "gpu,math,report,serve,tracking,dev")
    command = ["make", "-C", str(folder), "setup", f"PYTHON={sys.executable}", f"EXTRAS={extras}"]
    print(f"{LOCK} differs: installing the packages of {folder.name}, which takes minutes, once", file=sys.stderr)
    environment = {name: value for name, value in os.environ.items() if name not in MAKE}
    made = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    if made.returncode:
        raise UserError(f"the packages of {folder} cannot be installed: {made.stderr.strip()[-500:]}")
    return str(folder / ".venv" / "bin" / "python")


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git prints; None where it fails, or says nothing."""
    try:
        command = ["git", "-C", str(root), *arguments]
        asked = subprocess.run(command, capture_output=True, text=True, check=True, env=git_environment())
    except (OSError, subprocess.CalledProcessError):
        return None
    return asked.stdout.strip() or None
