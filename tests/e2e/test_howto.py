"""docs/code.md: its code runs, and its changes, applied to a copy of the project, add what they say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import recipe
from tests.helpers import SMALL, beside, grouped, run_stages
from tests.howto import applied, example
from tests.lines import read_intact_lines

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    """A copy of the project with all changes of the page."""
    root: Path = tmp_path_factory.mktemp("howto")
    for name in ("rlhf", "tests", "docs", "recipes", "bench"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, root)
    for name in ("row format", "metric", "model type"):
        applied(example(name), root)
    return root


def output_of(root: Path, *words: object) -> str:
    """What Python prints in a copy of the project."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tested(changed) -> str:
    """What pytest says of the cases that the page adds; one process runs all, as starting it takes longest."""
    files = ("unit/test_formats.py", "unit/test_architecture.py", "invariants/test_model_types.py")
    words = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", "turn or arcee")
    return output_of(changed, *words, *(f"tests/{file}" for file in files))


def test_the_page_s_python_runs_a_stage_and_loads_its_adapter(trained, tmp_path, monkeypatch, capsys):
    load = recipe.load
    monkeypatch.setattr(recipe, "load", lambda folder, changes: load(ROOT / "recipes/cpu-tiny/v1", SMALL | changes))
    beside(trained, tmp_path / "runs/python", "pretrain", "sft", "rm")
    monkeypatch.chdir(tmp_path)
    code = example("python")
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    exec(compile(code.replace('"ppo.steps": 10', ""), "docs/code.md", "exec"), {})
    kl, rank = capsys.readouterr().out.split()[-2:]
    assert float(kl) >= 0 and rank == "4"


def test_the_page_s_python_samples_from_a_base_without_a_run(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    code = example("base").replace("runs/python/cpu-tiny/v2", "cpu-tiny/v1")
    exec(compile(code, "docs/code.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_row_format_of_its_own_is_recognised_and_read(changed, tested):
    rows = changed / "turns.jsonl"
    rows.write_text('{"user": "Capital of Peru?", "assistant": "Lima."}\n' * 3)
    assert "Lima." in output_of(changed, "-m", "rlhf.cli", "data", "show", rows)
    assert re.search(r"test_formats\.py::\S+\[(\S+-)?turn(-\S+)?\] PASSED", tested)


@pytest.mark.slow
def test_a_metric_of_its_own_is_logged_and_explained(trained, changed):
    beside(trained, changed / "runs", "pretrain", "sft", "rm")
    code = (
        "from pathlib import Path; from tests.helpers import run_stages, small; "
        "run_stages(small(ppo__steps=2, ppo__save_steps=2), Path('runs'), 'ppo')"
    )
    output_of(changed, "-c", code)
    lines = read_intact_lines(changed / "runs/cpu-tiny/v1/ppo/metrics.jsonl")
    assert lines and all(line["response/longest"] >= line["response/length"] for line in lines)
    output_of(changed, "-m", "rlhf.cli", "report", changed / "runs/cpu-tiny/v1")
    assert "longest response" in next((changed / "runs/cpu-tiny/v1").glob("*.html")).read_text()


def test_a_reward_of_its_own_trains(trained, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(example("reward"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    out = beside(trained, tmp_path / "runs", "pretrain", "sft")
    group = {"steps": 1, "reward_funcs": ["my_rewards:short"], "normalize_scores": False}
    run_stages(grouped("grpo", group), out, "grpo")
    (line,) = read_intact_lines(out / "cpu-tiny/v1/grpo/metrics.jsonl")
    assert line["rewards/my_rewards.short"] <= 0


@pytest.mark.slow
def test_a_model_type_of_its_own_is_compared_with_transformers(tested):
    assert len(re.findall(r"\[\S*arcee\S*\] PASSED", tested)) >= 5
