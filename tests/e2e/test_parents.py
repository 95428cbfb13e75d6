"""Experiments in a root of their own that build on finished stages of another root (`--reuse`)."""

import re
import shutil
from pathlib import Path

import pytest

from rlhf.cli import chain
from rlhf.errors import UserError
from rlhf.evaluation import compare
from rlhf.run.directory import StageRun
from rlhf.run.finished import read_summary, stage_folder
from tests.helpers import FIXTURES, RECIPE, SMALL, Crash, beside, content_of, rlhf, run_stages, small

ROOT = Path("cpu-tiny/v1")
SETS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def experiment(trained, tmp_path_factory):
    """A folder with runs/ (the shared chain) and runs/less-kl, where PPO alone was trained, with another kl_coef."""
    folder = tmp_path_factory.mktemp("experiment")
    beside(trained, folder / "runs", "pretrain", "sft", "rm")
    out = folder / "runs" / "less-kl"
    run_stages(small(ppo__kl_coef=0.05), out, "ppo", reuse_root=folder / "runs")
    return folder


def test_ppo_takes_its_parents_from_the_other_root_and_says_so(experiment):
    runs = experiment / "runs"
    assert [p.name for p in (runs / "less-kl" / ROOT).iterdir() if p.is_dir() and p.name != "data"] == ["ppo"]
    manifest = content_of(runs / "less-kl" / ROOT / "ppo" / "manifest.json")
    assert manifest["parents"].keys() == manifest["parents_from"].keys() == {"pretrain", "sft", "rm"}
    for stage, place in manifest["parents_from"].items():
        assert not Path(place).is_absolute()
        assert (runs / "less-kl" / ROOT / place).resolve() == (runs / ROOT / stage).resolve()


def test_the_result_is_the_one_with_parents_of_its_own(experiment, trained, tmp_path):
    own = beside(trained, tmp_path, "pretrain", "sft", "rm")
    run_stages(small(ppo__kl_coef=0.05), own, "ppo")
    file = ROOT / "ppo" / "adapter" / "adapter_model.safetensors"
    assert (own / file).read_bytes() == (experiment / "runs" / "less-kl" / file).read_bytes()
    assert content_of(own / ROOT / "ppo" / "manifest.json")["parents_from"] == {}


def test_later_stages_find_the_parents_without_being_told(experiment):
    loaded, runs = small(ppo__kl_coef=0.05), experiment / "runs"
    summary = run_stages(loaded, runs / "less-kl", "evaluate")
    assert {name.split("/")[0] for name in summary["metrics"]} == {"base", "sft", "ppo", "rm"}
    manifest = content_of(runs / "less-kl" / ROOT / "evaluate" / "manifest.json")
    assert manifest["parents_from"].keys() == {"pretrain", "sft", "rm"}
    assert StageRun(runs / "less-kl", loaded, "ppo").done() is not None
    found = compare.load(runs / "less-kl" / ROOT, "ppo")
    assert found.reward_models[0]
    assert stage_folder(runs / "less-kl" / ROOT, "rm").resolve() == (runs / ROOT / "rm").resolve()


def test_parents_of_other_settings_are_refused(experiment):
    run = StageRun(experiment / "elsewhere", small(sft__learning_rate=0.5), "ppo", experiment / "runs")
    with pytest.raises(UserError, match=r"made with sft\.learning_rate 0\.002 .*; run sft below .*or choose other"):
        run.parents.require("sft")
    assert run.parents.elsewhere("sft") is None
    assert run.parents.elsewhere("pretrain") is not None  # SFT's keys do not concern it


def test_a_parent_that_changed_is_noticed(experiment, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs")
    weights = tmp_path / "runs" / ROOT / "sft" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="has changed since sft was done"):
        StageRun(tmp_path / "new", small(), "ppo", tmp_path / "runs").parents.require("sft")


def test_a_policy_of_another_root_is_evaluated_only_with_the_same_settings(experiment):
    runs, other = experiment / "runs" / "less-kl", experiment / "third"
    assert StageRun(other, small(ppo__kl_coef=0.05), "evaluate", runs).parents.trained_policies() == ["ppo"]
    assert StageRun(other, small(), "evaluate", runs).parents.trained_policies() == []


def test_a_command_trains_with_other_settings_on_the_parents_of_another_root(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    beside(trained, Path("runs"), "pretrain", "sft", "rm")
    words = ["run", "ppo", "--recipe", str(RECIPE), "--set", "ppo.kl_coef=0.05", "--out", "runs/less-kl"]
    words += ["--reuse", "runs"]
    code, out, err = rlhf(monkeypatch, capsys, *words, *SETS, "--no-preflight")
    assert code == 0, err
    assert (tmp_path / "runs" / "less-kl" / ROOT / "ppo" / "summary.json").exists()
    code, out, err = rlhf(monkeypatch, capsys, *words, *SETS, "--if-needed", "--no-preflight")
    assert (code, out) == (0, f"ppo: done ({'runs/less-kl' / ROOT / 'ppo'})\n")


def test_without_parents_the_message_names_the_command(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    beside(trained, Path("runs"), "pretrain", "sft", "rm")
    command = ["run", "ppo", "--recipe", str(RECIPE), "--out", "runs/new", *SETS]
    code, _, err = rlhf(monkeypatch, capsys, *command)
    assert code == 1
    assert err.count("\n") == 1
    assert "first `rlhf run pretrain --with-parents`" in err


@pytest.mark.parametrize(("words", "absent"), [(("chat", "--stage", "ppo"), "ppo"), (("score", "--prompt", "a"), "rm")])
def test_a_stage_that_the_recipe_lacks_is_named_before_any_other_problem(tmp_path, monkeypatch, capsys, words, absent):
    monkeypatch.chdir(tmp_path)
    sections = ("rm=null", "ppo=null", "merge=null")
    without = [word for section in sections for word in ("--set", section)]
    words = (*words, "--response", "b") if words[0] == "score" else words
    code, _, err = rlhf(monkeypatch, capsys, *words, "--recipe", str(RECIPE), *without)
    assert code == 1 and err.startswith(f"error: {absent}: {RECIPE} has no such stage; ")


def test_stages_before_the_one_asked_for_are_taken_or_made(trained, tmp_path, monkeypatch, capsys):
    """What `make ppo REUSE=runs` relies on: `--if-needed` is content with a stage of the other root."""
    command = ["--recipe", str(RECIPE), "--out", str(tmp_path), "--reuse", str(trained), *SETS, "--if-needed"]
    code, out, _ = rlhf(monkeypatch, capsys, "run", "sft", *command)
    assert (code, out) == (0, f"sft: done ({trained / ROOT / 'sft'})\n")
    assert not (tmp_path / ROOT).exists()


def test_an_evaluation_trains_no_policy_where_one_is_trained(tmp_path, experiment):
    before = ["pretrain", "sft", "rm"]
    assert chain.stages_before(StageRun(tmp_path, small(), "evaluate")) == [*before, "ppo"]
    (tmp_path / ROOT / "dpo").mkdir(parents=True)
    (tmp_path / ROOT / "dpo" / "summary.json").write_text("{}")
    assert chain.stages_before(StageRun(tmp_path, small(), "evaluate")) == before
    elsewhere = tmp_path / "elsewhere"
    run = StageRun(elsewhere, small(ppo__kl_coef=0.05), "evaluate", experiment / "runs/less-kl")
    assert chain.stages_before(run) == before


def test_other_settings_are_refused_before_a_stage_runs_that_they_need(trained, tmp_path, monkeypatch, capsys):
    beside(trained, tmp_path, "pretrain", "rm")
    other = [*SETS, "--set", "rm.learning_rate=0.5"]
    command = ["--with-parents", "--recipe", str(RECIPE), "--out", str(tmp_path), *other]
    for stage in ("rm", "ppo"):
        code, _, err = rlhf(monkeypatch, capsys, "run", stage, *command)
        said = " ".join(err.split())
        assert code == 1 and "rm was made with rm.learning_rate 0.0015 (asked for: 0.5)" in said
        assert "choose another --out" in said and "or move that directory away" in said
        assert not (tmp_path / ROOT / "sft").exists(), "nothing was trained before"


def test_a_root_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys):
    command = ["run", "ppo", "--recipe", str(RECIPE), "--out", str(tmp_path), "--reuse", "nowhere"]
    code, _, err = rlhf(monkeypatch, capsys, *command)
    assert code == 2
    assert "--reuse nowhere: no such folder; name a root of runs" in err


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ("grpo", {}, "grpo: .* has no such stage; add a section grpo"),
        (
            "grpo",
            {"grpo.reward_funcs": "[numeric_answr]"},
            "no reward 'numeric_answr'; nearest: numeric_answer; known are",
        ),
        ("grpo", {"grpo.reward_funcs": "['absent_module:polite']"}, "absent_module:polite cannot be used"),
        ("evaluate", {"evaluate.bertscore_model": "absent"}, "evaluate.bertscore_model: absent is not a folder"),
    ],
)
def test_what_a_stage_cannot_do_is_said_before_its_parents_are_trained(
    stage, changes, message, tmp_path, monkeypatch, capsys
):
    recipe = FIXTURES / "cpu-tiny-sums/v1" if "grpo.reward_funcs" in changes else RECIPE
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = ["run", stage, "--with-parents", "--recipe", str(recipe), "--out", str(tmp_path), *sets]
    code, out, err = rlhf(monkeypatch, capsys, *command)
    assert code == 1 and re.search(message, " ".join(err.split())) and "stage 1 of" not in out
    assert not any(tmp_path.iterdir())


def stop(*_):
    raise Crash


def test_a_stage_that_does_not_fit_is_refused_before_its_parents_are_trained(tmp_path, monkeypatch, capsys):
    asked = []

    def predicted(loaded, stage, **_):
        asked.append(stage)
        if stage == "ppo":
            raise UserError("ppo would need 99 GB")

    monkeypatch.setattr(chain, "forecast", predicted)
    command = ["run", "ppo", "--with-parents", "--recipe", str(RECIPE), "--out", str(tmp_path), *SETS]
    code, out, err = rlhf(monkeypatch, capsys, *command)
    assert (code, out, err) == (1, "", "error: ppo would need 99 GB\n")
    assert asked == ["pretrain", "sft", "rm", "ppo"] and not any(tmp_path.iterdir())
    monkeypatch.setattr(chain, "run_parents", stop)
    code, _, err = rlhf(monkeypatch, capsys, *command, "--no-preflight")
    assert "Crash" in err and len(asked) == 4


def test_a_parent_of_another_root_with_other_settings_is_named(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chain, "_run_parent", stop)
    command = ["run", "sft", "--with-parents", "--recipe", str(RECIPE), "--out", str(tmp_path), *SETS]
    _, out, err = rlhf(monkeypatch, capsys, *command, "--set", "pretrain.learning_rate=0.5", "--reuse", str(trained))
    said = " ".join(out.split())
    assert (
        "cpu-tiny/v1/pretrain was made with pretrain.learning_rate" in said
        and "(asked for: 0.5); it is run anew" in said
    )
    assert "Crash" in err


def test_a_finished_stage_stays_so_when_its_encoder_is_gone(trained, tmp_path, monkeypatch, capsys):
    """Nothing is computed, so nothing needs it."""
    options = ["--recipe", str(RECIPE), "--out", str(tmp_path), *SETS, "--set", "evaluate.bertscore_model=absent"]
    beside(trained, tmp_path, "pretrain", "sft", "rm", "ppo")
    monkeypatch.setattr(StageRun, "done", lambda run: {"evaluate": read_summary(trained / ROOT / "sft")}.get(run.stage))
    code, out, err = rlhf(monkeypatch, capsys, "run", "evaluate", *options)
    assert code == 0 and "done before" in " ".join(out.split()), err
