"""Recipes of a user's own: `rlhf new` writes them where the project's indexes, budgets, tests and git do not look."""

import subprocess
from pathlib import Path
from shutil import copytree

import pytest

from rlhf.recipe.folders import root_for_new
from rlhf.run import provenance
from tests.helpers import RECIPE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A recipe where `rlhf new` writes it, in the current folder, beside recipes of the project."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHF_RECIPES", raising=False)
    copytree(RECIPE, "recipes/cpu-tiny/v1")
    return copytree(RECIPE, root_for_new() / "24gb-mine/v1")


def test_git_and_the_image_leave_them_out():
    name = "my-recipes/24gb-mine/v1/recipe.yaml"
    (ignored,) = subprocess.run(
        ["git", "check-ignore", name], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    assert ignored == name
    assert "!my-recipes" not in (ROOT / ".dockerignore").read_text()


def test_a_recipe_of_ones_own_does_not_change_the_code(own, tmp_path, monkeypatch):
    monkeypatch.delenv("RLHF_COMMIT", raising=False)
    Path(".gitignore").write_text((ROOT / ".gitignore").read_text())
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "ours"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "rlhf/run/provenance.py"))
    (own / "recipe.yaml").write_text("seed: 1\n")
    assert provenance.code_version().dirty is False
