"""Experiments in a root of their own that build on finished stages of another root (`--reuse`)."""

import shutil
from pathlib import Path

import pytest

from rlhf.cli import chain as chains
from rlhf.errors import UserError
from rlhf.run.directory import StageRun
from tests.helpers import RECIPE, SMALL, beside, content_of, rlhf, run_stages, small

ROOT = Path("cpu-tiny/v1")
SETS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
PARENTS = ("pretrain", "sft", "rm")
ADAPTER = ROOT / "ppo/adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def experiment(trained, tmp_path_factory):
    """A folder with runs/ (the shared chain) and runs/less-kl, where PPO alone was trained, with another kl_coef."""
    folder: Path = tmp_path_factory.mktemp("experiment")
    beside(trained, folder / "runs", *PARENTS)
    run_stages(small(ppo__kl_coef=0.05), folder / "runs/less-kl", "ppo", reuse_root=folder / "runs")
    return folder


def test_ppo_takes_its_parents_from_the_other_root_and_says_so(experiment, trained, tmp_path):
    runs = experiment / "runs"
    manifest = content_of(runs / "less-kl" / ROOT / "ppo/manifest.json")
    assert manifest["parents"].keys() == manifest["parents_from"].keys() == {*PARENTS}
    for stage, place in manifest["parents_from"].items():
        assert not Path(place).is_absolute()
        assert (runs / "less-kl" / ROOT / place).resolve() == (runs / ROOT / stage).resolve()
    own = beside(trained, tmp_path, *PARENTS)
    run_stages(small(ppo__kl_coef=0.05), own, "ppo")
    assert (own / ADAPTER).read_bytes() == (runs / "less-kl" / ADAPTER).read_bytes()


def test_later_stages_find_the_parents_without_being_told(experiment):
    loaded, out = small(ppo__kl_coef=0.05), experiment / "runs/less-kl"
    summary = run_stages(loaded, out, "evaluate")
    assert {name.split("/")[0] for name in summary["metrics"]} == {"base", "sft", "ppo", "rm"}
    assert content_of(out / ROOT / "evaluate/manifest.json")["parents_from"].keys() == {*PARENTS}
    assert StageRun(out, loaded, "ppo").done() is not None


def test_parents_of_other_settings_or_with_other_bytes_are_refused(experiment, trained, tmp_path):
    run = StageRun(experiment / "elsewhere", small(sft__learning_rate=0.5), "ppo", experiment / "runs")
    with pytest.raises(UserError, match=r"sft\.learning_rate"):
        run.parents.require("sft")
    shutil.copytree(trained, tmp_path / "runs")
    weights = tmp_path / "runs" / ROOT / "sft/adapter/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="sft"):
        StageRun(tmp_path / "new", small(), "ppo", tmp_path / "runs").parents.require("sft")


def test_a_policy_of_another_root_is_evaluated_only_with_the_same_settings(experiment):
    runs, other = experiment / "runs/less-kl", experiment / "third"
    assert StageRun(other, small(ppo__kl_coef=0.05), "evaluate", runs).parents.trained_policies() == ["ppo"]
    assert StageRun(other, small(), "evaluate", runs).parents.trained_policies() == []


def test_a_command_takes_parents_of_another_root_or_says_that_there_are_some(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    beside(trained, Path("runs"), *PARENTS)
    words = ["run", "ppo", "--recipe", str(RECIPE), "--out", "runs/less-kl", *SETS, "--set", "ppo.kl_coef=0.05"]
    code, _, err = rlhf(monkeypatch, capsys, *words)
    assert code == 1 and err.count("\n") == 1 and "--with-parents" in err and "--reuse" in err
    code, _, err = rlhf(monkeypatch, capsys, *words, "--reuse", "runs", "--no-preflight")
    assert code == 0, err
    assert (tmp_path / "runs/less-kl" / ADAPTER).exists()
    code, out, _ = rlhf(monkeypatch, capsys, *words, "--reuse", "runs", "--if-needed", "--no-preflight")
    assert (code, len(out.splitlines())) == (0, 1)
    code, _, err = rlhf(monkeypatch, capsys, *words, "--reuse", "nowhere")
    assert code == 2 and "--reuse" in err and "nowhere" in err


def test_an_evaluation_trains_no_policy_where_one_is_trained(tmp_path):
    assert chains.stages_before(StageRun(tmp_path, small(), "evaluate")) == [*PARENTS, "ppo"]
    (tmp_path / ROOT / "dpo").mkdir(parents=True)
    (tmp_path / ROOT / "dpo/summary.json").write_text("{}")
    assert chains.stages_before(StageRun(tmp_path, small(), "evaluate")) == [*PARENTS]


@pytest.mark.parametrize(
    ("stage", "changes", "named"),
    [
        ("rm", {"rm.learning_rate": 0.5}, "rm.learning_rate"),
        ("ppo", {"rm.learning_rate": 0.5}, "rm.learning_rate"),
        ("grpo", {}, "grpo"),
        ("ppo", {"ppo.reward_funcs": "[model,numeric_answr]"}, "numeric_answer"),
        ("ppo", {"ppo.reward_funcs": "[model,'absent_module:polite']"}, "absent_module:polite"),
    ],
)
def test_what_a_stage_cannot_do_is_said_before_its_parents_are_trained(
    trained, tmp_path, monkeypatch, capsys, stage, changes, named
):
    beside(trained, tmp_path, "pretrain", "rm")
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = ["run", stage, "--with-parents", "--recipe", str(RECIPE), "--out", str(tmp_path), *SETS, *sets]
    code, out, err = rlhf(monkeypatch, capsys, *command)
    assert code == 1 and named in err and "stage 1 of" not in out
    assert not (tmp_path / ROOT / "sft").exists()
