"""The commands that messages and a finished stage name: on the run directory, and in make's spelling."""

import shlex
import subprocess
from pathlib import Path

import pytest

from rlhf import cli, recipe
from rlhf.cli import next_steps
from rlhf.recipe.stages import STAGES
from rlhf.run.named import named_run
from rlhf.terminal import make_words
from rlhf.terminal.make_words import in_make_words
from tests.helpers import RECIPE, grouped, rlhf
from tests.makefile import takes
from tests.records import write_records

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def not_under_make(monkeypatch):
    monkeypatch.delenv(make_words.STARTED, raising=False)


@pytest.fixture
def under_make(monkeypatch):
    monkeypatch.setenv(make_words.STARTED, "make RUNTIME=local")


def next_lines(capsys, path: Path) -> list[str]:
    """The lines below `next:` for a stage that is finished in `path`."""
    next_steps.show(path, recipe.load(RECIPE).recipe)
    return [line.partition("#")[0].strip() for line in capsys.readouterr().out.splitlines()[1:]]


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_names_as_next_is_a_command_on_its_run(tmp_path, capsys, stage):
    run = tmp_path / "my runs/cpu-tiny/v1"
    write_records(run / stage, {})
    for line in next_lines(capsys, run / stage):
        name, *words = shlex.split(line)[1:]
        named = [word for word in words if word.startswith(str(tmp_path))]
        assert [named_run(Path(word)).directory for word in named] == [run]
        cli.cli.commands[name].make_context(name, [word for word in words if word not in named])


def test_they_are_stages_that_the_recipe_has():
    """Without a reward model GRPO follows SFT, and without a section no merge is named."""
    checked = {"reward_funcs": ["exact_answer"], "normalize_scores": False}
    loaded = grouped("grpo", checked, rm=None, ppo=None, dpo=None, merge=None).recipe
    assert [words for words, *_ in next_steps.steps("sft", loaded)] == [("run", "grpo"), ("report",)]
    assert [words for words, *_ in next_steps.steps("evaluate", loaded)] == [("report",), ("ab",)]


@pytest.mark.parametrize("stage", STAGES)
def test_under_make_they_are_targets_that_take_what_they_are_given(under_make, capsys, stage):
    run = Path("my runs/cpu-tiny/v1")
    for line in next_lines(capsys, run / stage):
        make, runtime, target, variable = shlex.split(line)
        assert (make, runtime) == ("make", "RUNTIME=local") and "RUN" in takes()[target]
        assert variable in (f"RUN={run}", f"RUN={run}/{stage}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("choose another --out; or --resume", "choose another OUT; or RESUME=1"),
        ("--resume continues from it, --restart sets it aside", "RESUME=1 continues from it, RESUME=0 sets it aside"),
        ("--hw NAME or --recipe DIR; `rlhf recipes` lists", "HW=NAME or RECIPE=DIR; `{make} recipes` lists"),
        ("--set ppo.stpes=3: unknown key", "SET=ppo.stpes=3: unknown key"),
        ("--recipe cpu-tiny: no recipe.yaml there", "RECIPE=cpu-tiny: no recipe.yaml there"),
        ("--data sets this key too", "DATA sets this key too"),
        ("first `rlhf run sft --with-parents --resume` with", "first `{make} sft RESUME=1` with"),
        ("`rlhf plan --recipe a/v1 --fastest` looks", "`{make} plan RECIPE=a/v1 FIT=card` looks"),
        ("`rlhf run … --set data.drop=[a,b]` leaves", "`{make} … SET='data.drop=[a,b]'` leaves"),
        ("`rlhf run evaluate 'my runs/a/v1'`", "`{make} evaluate RUN='my runs/a/v1'`"),
        ("`rlhf run ppo --set a=1 --set b=2`", "`{make} ppo SET='a=1 b=2'`"),
        ("`rlhf data check FILE` lists all", "`{make} data-check DATA=FILE` lists all"),
        ("(`rlhf run --help`)", "(`{make} help-all`)"),
        # what make has no target or variable for
        ("`rlhf data convert FILE --rename OLD=NEW --to new.jsonl`", None),
        ("`rlhf chat --hw cpu --tokens 3`", None),
        ("let `rlhf run` start them", None),
        ("--tokens 3 and --fit-for are none; a--out neither", None),
    ],
)
def test_a_message_is_in_make_s_spelling_alone_under_make(text, expected, monkeypatch):
    assert in_make_words(text) == text
    monkeypatch.setenv(make_words.STARTED, "make RUNTIME=local")
    assert in_make_words(text) == (text if expected is None else expected.format(make="make RUNTIME=local"))


def test_changes_are_one_variable_of_make_where_that_can_hold_them(monkeypatch):
    assert make_words.settings(["a=1", "b='x y'"]) == """--set a=1 --set 'b='"'"'x y'"'"''"""
    monkeypatch.setenv(make_words.STARTED, "make")
    assert make_words.settings(["a=1", "b=2"]) == "SET='a=1 b=2'"
    assert make_words.settings(["a=1 2"]).startswith("--set") and make_words.settings(["a='x'"]).startswith("--set")


@pytest.mark.parametrize("command", ["compare {run} {run}", "ab {run}"])
def test_a_missing_evaluation_is_made_by_a_command_on_the_run(tmp_path, monkeypatch, capsys, command):
    run = tmp_path / "my runs/cpu-tiny/v1"
    write_records(run / "sft", {})
    code, _, err = rlhf(monkeypatch, capsys, *shlex.split(command.format(run=f"'{run}'")))
    line = f"`rlhf run evaluate '{run}' --with-parents`"
    *said, last = err.splitlines()
    assert code == 1 and last == f"error: {run}/evaluate: no finished evaluation; first {line}"
    assert all("was edited since" in told for told in said), "the run's records are made up"
    (run / "evaluate.before-1").mkdir()
    write_records(run / "evaluate", {})
    (run / "evaluate/summary.json").unlink()
    err = rlhf(monkeypatch, capsys, *shlex.split(command.format(run=f"'{run}'")))[2]
    assert "the evaluation still runs, or was stopped" in err and "an earlier one is in evaluate.before-1" in err


def test_the_container_gets_the_spelling_by_name():
    words = subprocess.run([ROOT / "bin/in-container", "--print", "image"], capture_output=True, text=True, check=True)
    assert f"-e {make_words.STARTED} " in words.stdout
