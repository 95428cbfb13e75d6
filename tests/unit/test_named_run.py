"""A run directory as an argument stands for the recipe, seed, changes and root that its manifests name."""

import json
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.recipe import Changes, StageName, load
from rlhf.run.directory import StageRun
from rlhf.run.named import NamedRun, named_run, recipe_of, settings_of
from tests.helpers import RECIPE, SMALL, content_of, rlhf, small

OVERRIDES = SMALL | {"ppo.kl_coef": 0.25}


def made(out, stage="sft", **changes):
    """The directory of a run in which that stage was begun."""
    loaded = small(ppo__kl_coef=0.25, **changes)
    run = StageRun(out, loaded._replace(recipe=loaded.recipe.model_copy(update={"seed": 5})), stage)
    run.start(False, ["rlhf", "run", stage, "--recipe", str(RECIPE)], {"name": "cpu", "type": "cpu"})
    return run.run_directory


@pytest.fixture
def run(tmp_path):
    return made(tmp_path / "runs")


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *words: rlhf(monkeypatch, capsys, *words)


def changed(folder, **values):
    file = folder / "manifest.json"
    file.write_text(json.dumps(content_of(file) | values))


def test_a_run_or_one_of_its_stages_has_all_settings(run):
    named_paths: list[tuple[Path, StageName | None]] = [(run, None), (run / "sft", "sft")]
    for path, stage in named_paths:
        named = named_run(path)
        assert named == NamedRun(run, stage) and named.out == run.parents[1]
        settings = settings_of(named)
        assert (settings.recipe, settings.version, settings.seed) == ("cpu-tiny", "v1", 5)
        assert settings.overrides == OVERRIDES


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("chat",), "ppo has not been run"),
        (("score", "--prompt", "a", "--response", "b"), "rm has not been run"),
        (("serve",), "merge has not been run"),
        (("run", "rm"), "pretrain has not been run"),
        (("ab",), "evaluate: no finished evaluation"),
    ],
)
def test_a_command_on_a_run_needs_no_other_option(command, run, words, needed):
    """Each lacks a stage here."""
    code, _, err = command(*words, run)
    assert code == 1 and needed in err and str(run) in err


def test_a_run_is_the_recipe_that_it_was_made_with(run):
    loaded = recipe_of(named_run(run), RECIPE.parents[1])
    assert loaded == load(RECIPE, OVERRIDES, 5)
    assert recipe_of(named_run(run), run) == loaded, "where the manifest says"
    changed(run / "sft", recipe_folder=str(run))
    with pytest.raises(UserError, match="its recipe cpu-tiny/v1 is not in"):
        recipe_of(named_run(run), run)


def test_the_folder_of_a_stage_chooses_that_stage(command, run):
    made(run.parents[1], "dpo")
    assert "sft did not finish" in command("chat", run / "sft")[2]
    assert "ppo has not been run" in command("chat", run)[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "4"], "a run with its own settings; leave out --seed"),
        (["--hw", "cpu", "--out", "runs"], "a run with its own settings; leave out --hw and --out"),
        (["--set", "ppo.kl_coef=0.5"], "--set ppo.kl_coef=0.5: {run} has ppo.kl_coef=0.25; leave it out"),
        (["--recipe", "recipes/cpu-tiny/v2"], "a run with its own settings; leave out --recipe"),
    ],
)
def test_options_that_contradict_the_run_are_refused(command, run, words, message):
    code, out, err = command("chat", run, *words)
    assert (code, out) == (2, "") and message.format(run=run) in err and err.count("\n") == 1


def test_a_change_beside_those_of_the_run_is_taken(run):
    further: Changes = {"ppo.kl_coef": 0.25, "evaluate.top_p": 0.5}
    assert recipe_of(named_run(run), RECIPE.parents[1], further).overrides == OVERRIDES | further


@pytest.mark.parametrize(
    ("begun", "finished", "only", "expected"),
    [
        (["ppo"], ["dpo"], [], "v1/ppo: .*--only"),
        (["ppo"], ["dpo"], ["dpo"], ["dpo"]),
        ([], ["dpo"], [], ["dpo"]),
        ([], ["ppo", "dpo"], [], ["ppo", "dpo"]),
        (["ppo"], ["dpo"], ["ppo"], "ppo did not finish"),
        ([], ["dpo"], ["grpo"], "has no such stage"),
    ],
)
def test_an_evaluation_passes_over_no_policy_in_silence(tmp_path, capsys, begun, finished, only, expected):
    for stage in (*begun, *finished):
        run_directory = made(tmp_path, stage)
        if stage in finished:
            (run_directory / stage / "summary.json").write_text("{}")
    run = StageRun(tmp_path, small(), "evaluate", only=only)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            run.require_policies()
        return
    assert run.require_policies() == expected
    left_out = not only and "ppo" not in finished
    assert ("ppo" in capsys.readouterr().err) == left_out
