"""The command line: what it refuses and where, chains of stages, and what a signal or a failure leaves."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.cli.choice import Choice
from rlhf.cli.entry import COMMANDS
from rlhf.errors import UserError
from rlhf.process.task import Task
from rlhf.recipe import load, parse_overrides
from tests.helpers import RECIPE, SMALL, beside, noted, rlhf, task_of
from tests.records import summary_of


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *arguments: rlhf(monkeypatch, capsys, *arguments)


def changes(**more: object) -> list[str]:
    return [part for key, value in (SMALL | more).items() for part in ("--set", f"{key}={json.dumps(value)}")]


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "--help"),
        ("trane", "trane"),
        ("run", "ppo"),
        ("run pppo --hw cpu", "ppo"),
        ("run ppo", "--hw"),
        ("run ppo --hw 4091", "4090"),
        ("run ppo --hw cpu --recipe recipes/cpu-tiny/v1", "--recipe"),
        ("run ppo --recipe recipes/cpu-tinny/v2", "recipes/cpu-tinny/v2"),
        ("run ppo --recipe recipes/cpu-tiny", "rlhf recipes"),
        ("run ppo --hw cpu --stepps 10", "--stepps"),
        ("run ppo --hw cpu --seed -1", "--seed"),
        ("run ppo --hw cpu --seed 4294967296", "--seed"),
        ("run ppo --hw cpu --set seed=2", "--seed"),
        ("run ppo --hw cpu --set ppo.kl_coeff=1", "ppo.kl_coef"),
        ("run ppo --hw cpu --set kl_coef=1", "ppo.kl_coef"),
        ("run ppo --hw cpu --set data.files=a --data README.md", "--data"),
        ("run ppo --hw cpu --data nowhere.jsonl", "nowhere.jsonl"),
        ("run ppo --hw cpu --weights nowhere", "--weights nowhere"),
        ("run ppo --hw cpu --weights random --data README.md", "--data"),
        ("run ppo --hw cpu --guide", "--guide"),
        ("run ppo --hw cpu --only dpo", "--only"),
        ("run ppo nowhere", "nowhere"),
        ("run ppo recipes", "recipes"),
        ("chat nowhere/rm", "nowhere"),
        ("plan 4090", "4090"),
        ("plan --hw cpu --fit 12", "--fit"),
        ("plan --hw cpu --price -1", "--price"),
        ("plan --hw cpu --price nan", "--price"),
        ("reproduce --hw cpu --seeds 0,1", "--seeds"),
        ("sample --hw cpu --prompts nowhere.txt", "nowhere.txt"),
        ("sample --hw cpu --prompts README.md --to nowhere/x", "nowhere"),
        ("score --hw cpu", "FILES"),
        ("serve --hw cpu --port 0", "--port"),
        ("report nowhere", "nowhere"),
        ("data check nowhere.jsonl", "nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(command, words, named):
    code, out, err = command(*words.split())
    assert code == 2 and named in err + (out if not words else "")
    assert len(err.strip().splitlines()) == 1 or not words


@pytest.mark.parametrize(
    ("choice", "stage", "taken"),
    [
        (Choice(hw="cpu"), "ppo", "cpu-tiny/v2"),
        (Choice(hw="cpu"), "grpo", "cpu-tiny-groups/v1"),
        (Choice(hw="cpu", data=("README.md",)), "sft", "cpu-smollm2/v1"),
    ],
)
def test_hardware_and_stage_lead_to_a_recipe_that_has_the_stage(choice, stage, taken):
    assert choice.load(stage).directory.parts[-2:] == tuple(taken.split("/"))


@pytest.mark.parametrize(
    ("choice", "root"),
    [
        (Choice(), "runs"),
        (Choice(seed=3), "runs/seed-3"),
        (Choice(data=("there/mine.jsonl.gz",), weights="models/base"), "runs/weights-base/data-mine"),
    ],
)
def test_what_is_not_the_recipes_has_a_root_of_its_own(choice, root):
    assert choice.root == Path(root)


def test_every_command_has_its_help(command):
    code, out, _ = command("--help")
    assert code == 0 and all(re.search(rf"^  {name} ", out, re.M) for name in COMMANDS)
    for name in COMMANDS:
        code, out, _ = command(name, "--help")
        assert code == 0 and f"rlhf {name}" in out


def test_a_command_is_imported_when_it_is_asked_for():
    code = "import sys, rlhf.cli; heavy = {'torch', 'transformers', 'datasets', 'numpy', 'rlhf.stages', 'rlhf.data'}; "
    code += "assert not heavy & {*sys.modules}, heavy & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- chains ----------------------------------------------------------------------------------------------------------


def test_a_stage_before_its_parent_says_which_command_to_run(command, tmp_path):
    code, _, err = command("run", "ppo", "--recipe", RECIPE, "--out", tmp_path / "my runs", "--seed", "3", "--resume")
    assert code == 1
    folder = tmp_path / "my runs/cpu-tiny/v1/pretrain"
    assert f"pretrain has not been run ({folder})" in err and "`rlhf run pretrain --with-parents`" in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "my runs/cpu-tiny/v1/ppo").exists()


def refuse(*_, **__):
    """What stands in for a stage that a test must not run."""
    raise UserError("not run here")


@pytest.mark.parametrize(
    ("stage", "changes", "expected"),
    [
        ("pretrain", [], ""),
        ("ppo", [], "pretrain sft rm"),
        ("merge", [], "pretrain sft rm ppo"),
        ("merge", ["--set", "merge.stage=dpo"], "pretrain sft dpo"),
    ],
)
def test_parents_are_run_first_in_order_with_the_same_options(command, tmp_path, monkeypatch, stage, changes, expected):
    """Each in a process of its own; the stage itself is not run here."""
    children: list[Task] = []
    monkeypatch.setattr("rlhf.process.children.run_child", lambda words: noted(children, task_of(words), 0))
    monkeypatch.setattr("rlhf.stages.runner.execute", refuse)
    options = ["--recipe", str(RECIPE), "--out", str(tmp_path), *changes, "--seed", "3", "--resume", "--no-preflight"]
    typed = ["run", stage, "--with-parents", "--set", "model.dtype=bfloat16", *options, "--if-needed"]
    command(*typed)
    assert [task.stage for task in children] == expected.split()
    overrides = {"model.dtype": "bfloat16", **parse_overrides(changes[1:])}
    for task in children:
        assert task.load() == load(RECIPE, overrides, 3) and task.out == str(tmp_path) and task.argv[1:] == typed
        assert task.resume and not task.preflight and not task.if_needed


def test_a_parent_that_fails_ends_the_chain_with_its_code(command, tmp_path, monkeypatch):
    """It has said why itself."""
    children: list[str] = []

    def run_child(words):
        stage = task_of(words).stage
        return noted(children, stage, 3 * (stage == "sft"))

    monkeypatch.setattr("rlhf.process.children.run_child", run_child)
    code, out, err = command("run", "ppo", "--with-parents", "--recipe", RECIPE, "--out", tmp_path, "--no-preflight")
    assert (code, err) == (3, "") and children == ["pretrain", "sft"]
    assert out == "stage 1 of 4: pretrain\nstage 2 of 4: sft\n"


def test_a_chain_is_numbered_and_its_outcome_printed_once(command, trained, tmp_path, monkeypatch):
    """Parents that are done are named; the stages behind them have their numbers in the whole chain."""
    out = beside(trained, tmp_path, "pretrain", "sft")
    finished = summary_of(stage="ppo"), False
    monkeypatch.setattr("rlhf.process.children.run_child", lambda *_: 0)
    monkeypatch.setattr("rlhf.stages.runner.execute", lambda *_, **__: finished)
    arguments = ("run", "ppo", "--with-parents", "--recipe", RECIPE, "--out", out, *changes())
    code, printed, _ = command(*arguments)
    assert code == 0
    lines = printed.splitlines()
    assert [line for line in lines if line.startswith("stage ")] == ["stage 3 of 4: rm", "stage 4 of 4: ppo"]
    assert [line.partition(" (")[0] for line in lines[:2]] == ["pretrain: done", "sft: done"]
    assert sum(line.startswith("next: ") for line in lines) == 2 and printed.count("report: ") == 1
    monkeypatch.setenv("RLHF_PART_OF_COMMAND", "1")
    printed = command(*arguments)[1]
    assert "next: " not in printed and "report: " not in printed


def test_a_signal_ends_a_chain_in_one_line(tmp_path):
    words = [sys.executable, "-m", "rlhf.cli", "run", "sft", "--with-parents", "--recipe", str(RECIPE)]
    options = ["--out", str(tmp_path), "--no-preflight", *changes(**{"pretrain.max_steps": 100_000})]
    running = subprocess.Popen([*words, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    checkpoints = tmp_path / "cpu-tiny/v1/pretrain/checkpoints"
    while not list(checkpoints.glob("step-*")):
        assert running.poll() is None
        time.sleep(0.05)
    running.terminate()
    _, err = running.communicate()
    (line,) = [line for line in err.splitlines() if "stopped" in line]
    assert running.returncode == 143
    assert line.startswith(f"stopped by SIGTERM; {checkpoints}/step-") and " with --resume" in line


@pytest.mark.parametrize("code", [143, -15], ids=["while it ran", "before it listened"])
def test_a_signal_to_a_parent_stage_alone_is_reported(command, tmp_path, monkeypatch, code):
    monkeypatch.setattr("rlhf.process.children.run_child", lambda *_: code)
    ended, _, err = command("run", "sft", "--with-parents", "--recipe", RECIPE, "--out", tmp_path, "--no-preflight")
    says = "pretrain has no checkpoint yet: the same command begins it anew"
    assert (ended, err) == (143, f"stopped by SIGTERM; {says}\n")


LINE = json.dumps({"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}) + "\n"


def test_a_failed_stage_leaves_finished_ones_alone(command, trained, tmp_path):
    """Other data in the same root: the reward model refuses, and SFT stays as it was."""
    root = trained / "cpu-tiny/v1/sft/summary.json"
    before = root.read_bytes()
    file = tmp_path / "other.jsonl"
    file.write_text(LINE * 30)
    code, _, err = command("run", "dpo", "--recipe", RECIPE, "--data", file, "--out", trained, *changes())
    assert code == 1
    assert "data.files" in err and "data.source" in err
    assert root.read_bytes() == before
    assert not (trained / "cpu-tiny/v1/dpo").exists()


def test_if_needed_says_in_one_line_that_nothing_is_to_do(command, trained):
    code, out, _ = command("run", "sft", "--recipe", RECIPE, "--out", trained, "--if-needed", *changes())
    assert (code, len(out.strip().splitlines())) == (0, 1)
    assert out.startswith("sft: done")
    code, out, _ = command("run", "sft", "--recipe", RECIPE, "--out", trained, *changes())
    assert code == 0
    assert out.startswith(f"sft: done before ({trained / 'cpu-tiny/v1/sft'}); nothing was run\n")
    assert "perplexity" in out and "written to" not in out


def test_if_needed_skips_a_stage_that_the_recipe_lacks(command, tmp_path):
    code, out, _ = command("run", "grpo", "--recipe", RECIPE, "--out", tmp_path, "--with-parents", "--if-needed")
    assert (code, out.strip()) == (0, "grpo: not part of cpu-tiny v1")
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_is_not_installed_is_named_before_any_work(command, trained, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = command("run", "dpo", "--recipe", RECIPE, "--out", trained, "--report-to", "wandb", *changes())
    assert code == 1
    assert "wandb: pip install 'wandb" in err
    assert not (trained / "cpu-tiny/v1/dpo").exists()
