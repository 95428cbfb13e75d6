"""The origin of a run: the commit of its code."""

import os
import subprocess
from pathlib import Path

from rlhf.run.records import Code


def git_environment() -> dict[str, str]:
    """Return the environment in which git looks at the folder that it is given.

    In hooks and in commands of a rebase git sets variables (GIT_DIR, GIT_WORK_TREE, …) that name another repository.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def code_version(recipe: Path | None = None) -> Code:
    """Return the commit of the code that runs, and whether files that can change results differ from it.

    A recipe that git does not know counts as a difference if it is in `recipe`, the folder of the one that runs;
    without `recipe`, each does.

    Both are None outside git, and where the code is installed inside another project's checkout. A container image has
    no history: RLHF_COMMIT names the commit that it was built from, with `-dirty` if the code had changes.
    """
    if image_commit := os.environ.get("RLHF_COMMIT"):
        return Code(commit=image_commit.removesuffix("-dirty"), dirty=image_commit.endswith("-dirty"))
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str | None:
        # Looking changes nothing; the code runs here already, whoever owns it.
        command = ["git", "-c", f"safe.directory={root}", "--no-optional-locks", "-C", str(root), *arguments]
        environment = git_environment()
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return Code(commit=None, dirty=None)
    commit = git("rev-parse", "HEAD")
    code = ["rlhf", "peakmem", "bench", "studies/*.py", "requirements", "pyproject.toml"]
    own = [] if recipe is None else [str(recipe.resolve())] * recipe.resolve().is_relative_to(root.resolve())
    found = [
        git("status", "--porcelain", "--", *code, *(["recipes"] if recipe is None else own)),
        git("status", "--porcelain", "--untracked-files=no", "--", "recipes"),
    ]
    return Code(commit=commit, dirty=None if None in found else any(found))
