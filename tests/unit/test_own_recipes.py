"""Recipes of a user's own: `rlhf new` writes them where the project's indexes, budgets, tests and git do not look."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_git_and_the_image_leave_them_out():
    name = "my-recipes/24gb-mine/v1/recipe.yaml"
    (ignored,) = subprocess.run(
        ["git", "check-ignore", name], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    assert ignored == name
    assert "!my-recipes" not in (ROOT / ".dockerignore").read_text()
