"""Another stage, added to a copy of the package as docs/code.md says: plan, run, report and help know it."""

import json
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


# Commands in one process: starting it with all libraries takes longer than any of them.
COMMANDS = """
import json
import sys
from rlhf import cli

for words in json.loads(sys.argv[1]):
    sys.argv = ["rlhf", *words]
    print("$ rlhf", *words, flush=True)
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
"""


def rlhf(copy: Path, *commands: str) -> list[str]:
    """What each command of the copy prints."""
    environment = os.environ | {"PYTHONPATH": str(copy), "COLUMNS": "160"}
    line = [sys.executable, "-c", COMMANDS, json.dumps([words.split() for words in commands])]
    done = subprocess.run(
        line, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    _, *printed = done.stdout.split("$ rlhf")
    return printed


@pytest.mark.slow
def test_a_stage_of_ones_own_runs_like_the_others(copy):
    where = "--recipe recipes/again/v1"
    chain = [f"run {stage} {where}" for stage in ("pretrain", "sft", "evaluate --with-parents")]
    usage, planned, *_, evaluated, _ = rlhf(
        copy, "run --help", f"plan {where} --stage again", *chain, f"report {where}"
    )
    assert "again" in usage
    assert re.search(r"│ again +│", planned)
    assert "written to runs/again/v1/again" in evaluated and "again: " in evaluated
    assert (copy / "runs/again/v1/again/adapter/adapter_model.safetensors").is_file()
    page = (copy / "runs/again/v1/report.html").read_text()
    assert "SFT → DPO again" in page and 'data-label="stage">again</td>' in page
