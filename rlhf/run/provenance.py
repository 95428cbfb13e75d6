"""The origin of a run: the commit of its code."""

import os
import subprocess
from pathlib import Path

from rlhf.run.records import Code

CODE = ("rlhf", "peakmem", "bench", "requirements", "pyproject.toml")


def git_environment() -> dict[str, str]:
    """Return the environment in which git looks at the folder that it is given.

    In hooks and in commands of a rebase git sets variables (GIT_DIR, GIT_WORK_TREE, …) that name another repository.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def code_version() -> Code:
    """Return the commit of the code that runs, and whether files that can change results differ from it.

    A recipe that git does not know is no difference: a run names the hash of its recipe. Both are None outside git, and
    where the code is installed inside another project's checkout. A container image has no history: RLHF_COMMIT names
    the commit that it was built from, with `-dirty` if the code had changes.
    """
    if image_commit := os.environ.get("RLHF_COMMIT"):
        return Code(commit=image_commit.removesuffix("-dirty"), dirty=image_commit.endswith("-dirty"))
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        # Looking changes nothing; the code runs here already, whoever owns it.
        command = ["git", "-c", f"safe.directory={root}", "--no-optional-locks", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=git_environment())
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return Code(commit=None, dirty=None)
        changes = git("status", "--porcelain", "--", *CODE) + git("status", "--porcelain", "-uno", "--", "recipes")
        return Code(commit=git("rev-parse", "HEAD"), dirty=bool(changes))
    except (OSError, subprocess.CalledProcessError):
        return Code(commit=None, dirty=None)
