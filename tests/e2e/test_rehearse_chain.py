"""A card recipe's chain, rehearsed for real with a tiny model: NF4, bfloat16, 8-bit optimizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import checkpoint

RECIPE = Path(__file__).parents[2] / "recipes" / "4090-qwen3-8b" / "v2"
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4}


@pytest.mark.slow
def test_the_chain_of_a_recipe_with_checked_answers(tmp_path):
    """GRPO from the base, evaluation, merge and report: each process takes seconds to import its libraries."""
    folder = checkpoint(tmp_path / "tiny", "llama", **SHAPE)
    changes = ["--set", "tokenizer.pad_token=<|fim_pad|>"]
    words = ["rehearse", "--recipe", str(RECIPE), "--weights", folder, "--out", str(tmp_path), *changes]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.cli", *words], env=os.environ | {"COLUMNS": "120"}, capture_output=True, text=True
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    stages = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("rehearsal of")]
    assert stages == ["grpo", "evaluate", "merge"]
    run = tmp_path / "rehearsal" / RECIPE.parent.name / "v2"
    assert (run / "merge/model/model.safetensors").is_file() and (run / "report.html").is_file()
