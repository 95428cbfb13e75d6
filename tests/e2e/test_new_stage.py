"""Another stage, added to a copy of the package as docs/howto.md says: plan, run, report and help know it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhf.recipe.strict import with_overrides
from tests.helpers import RECIPE, SMALL
from tests.howto import applied, example

PACKAGE = Path(__file__).parents[2] / "rlhf"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with a stage more, and a recipe that has it."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, root / "rlhf", ignore=shutil.ignore_patterns("__pycache__"))
    applied(example("stage"), root)
    stage = (
        (root / "rlhf/stages/dpo.py").read_text().replace('"dpo"', '"again"').replace("options(Dpo)", "options(Again)")
    )
    (root / "rlhf/stages/again.py").write_text(stage + "\nfrom rlhf.recipe.schema import Again  # noqa: E402\n")
    folder = root / "recipes/again/v1"
    folder.mkdir(parents=True)
    recipe = with_overrides(yaml.safe_load((RECIPE / "recipe.yaml").read_text()), SMALL)
    recipe |= {"again": recipe.pop("dpo"), "status": "draft", "default": False}
    for stage in ("rm", "ppo", "merge"):
        del recipe[stage]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def rlhf(copy: Path, *words: str) -> str:
    """What `rlhf` of the copy prints."""
    environment = os.environ | {"PYTHONPATH": str(copy), "COLUMNS": "160"}
    command = [sys.executable, "-m", "rlhf", *words]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_stage_of_ones_own_runs_like_the_others(copy):
    where = ("--recipe", "recipes/again/v1")
    assert "again" in rlhf(copy, "run", "--help")
    assert re.search(r"│ again +│", rlhf(copy, "plan", *where, "--stage", "again"))
    printed = rlhf(copy, "run", "evaluate", "--with-parents", *where)
    assert "written to runs/again/v1/again" in printed and "again: " in printed
    assert (copy / "runs/again/v1/again/adapter/adapter_model.safetensors").is_file()
    rlhf(copy, "report", *where)
    page = (copy / "runs/again/v1/report.html").read_text()
    assert "SFT → DPO again" in page and 'data-label="stage">again</td>' in page
