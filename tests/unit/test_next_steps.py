"""The commands that a finished stage names as next: a copied line does what was meant."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf import cli
from rlhf.cli import next_steps
from rlhf.cli.choice import Choice
from rlhf.stages import runner
from rlhf.terminal import make_words
from tests.helpers import RECIPE, grouped, not_none, rlhf, small
from tests.records import summary_of, write_records

ROOT = Path(__file__).resolve().parents[2]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def printed(monkeypatch, capsys, tmp_path):
    """The lines below `next:` that a stage prints at its end; the stage itself is not run."""

    def lines(stage: str, *options: object) -> list[str]:
        finished = summary_of(stage=stage), None, tmp_path / stage
        monkeypatch.setattr(runner, "execute", lambda *_, **__: finished)
        code, out, err = rlhf(monkeypatch, capsys, "run", stage, *options)
        assert code == 0, err
        return [line.strip() for line in out.partition("next:\n")[2].splitlines()]

    monkeypatch.delenv(make_words.STARTED, raising=False)
    return lines


def options_of(line: str) -> dict[str, Any]:
    """The values of the options on a line of `rlhf`, as click reads them."""
    name, *words = shlex.split(line, comments=True)[1:]
    return cli.cli.commands[name].make_context(name, words, resilient_parsing=True).params


def test_next_commands_repeat_the_options_that_were_typed(printed, tmp_path, monkeypatch):
    files = [tmp_path / "a b.jsonl", tmp_path / "c.jsonl"]
    for file in files:
        file.write_text("")
    monkeypatch.setattr(Choice, "load", lambda self, more_data=(): small())
    change = "ppo.kl_coef=0.1"
    typed = ("--hw", "cpu", "--out", tmp_path / "my runs", "--seed", 3, "--set", change, "--resume", "--data", *files)
    chat, evaluate, report = printed("ppo", *typed)
    assert chat.startswith("rlhf chat --stage ppo --hw cpu --data ") and chat.endswith("# talk with it")
    for line, stage in ((chat, "ppo"), (evaluate, "evaluate")):
        values = options_of(line)
        assert (values["hw"], values["seed"], values["changes"], values["stage"]) == ("cpu", 3, (change,), stage)
        assert values["data"] == tuple(map(str, files)) and values["out"] == tmp_path / "my runs"
    assert "--resume" not in evaluate and "--with-parents" in evaluate
    assert options_of(report) | {"price": None} == options_of(f"rlhf report --hw cpu --out '{tmp_path}/my runs'")


def test_a_long_command_does_not_push_the_others_apart(printed, tmp_path):
    values = {"kl_coef": 0.1, "gamma": 0.9, "lam": 0.9, "cliprange": 0.1, "vf_coef": 0.2, "steps": 5}
    changes = [word for key, value in values.items() for word in ("--set", f"ppo.{key}={value}")]
    chat, _, report = printed("ppo", "--hw", "cpu", "--out", tmp_path, *changes)
    assert len(chat.partition(" # ")[0].rstrip()) > 120 and len(report.partition(" # ")[0]) <= len(str(tmp_path)) + 40


def test_a_seed_of_a_run_is_not_the_order_of_a_rating(printed):
    _, ab, _ = printed("evaluate", "--recipe", RECIPE, "--seed", 3)
    assert ab.startswith("rlhf ab ") and "--seed" not in ab


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("pretrain", ["make sft", "make report"]),
        ("sft", ["make rm", "make dpo", "make report"]),
        ("rm", ["make ppo", "make report"]),
        ("ppo", ["make chat STAGE=ppo", "make evaluate", "make report"]),
        ("evaluate", ["make report", "make ab", "make merge"]),
        ("merge", ["make serve", "make chat STAGE=merge"]),
    ],
)
def test_under_make_they_are_its_targets(printed, monkeypatch, stage, expected):
    monkeypatch.setenv(make_words.STARTED, "")
    assert [line.partition("#")[0].strip() for line in printed(stage, "--recipe", RECIPE)] == expected


def test_they_are_stages_that_the_recipe_has():
    """Without a reward model GRPO follows SFT, and without a section no merge is named."""
    checked = {"reward_funcs": ["exact_answer"], "normalize_scores": False}
    loaded = grouped("grpo", checked, rm=None, ppo=None, dpo=None, merge=None).recipe
    assert [words for words, _ in next_steps.steps("sft", loaded)] == [("run", "grpo"), ("report",)]
    assert [words for words, _ in next_steps.steps("evaluate", loaded)] == [("report",), ("ab",)]


@needs_make
def test_a_copied_line_of_make_has_the_variables_of_the_first(tmp_path):
    """make runs a stand-in for rlhf, which writes down what it was given."""
    seen, program = tmp_path / "seen.json", tmp_path / "bin/rlhf"
    program.parent.mkdir()
    dump = f"json.dump([sys.argv[1:], os.environ.get({make_words.STARTED!r})], open({str(seen)!r}, 'w'))"
    program.write_text(
        f'#!/usr/bin/env bash\n{sys.executable} -c {shlex.quote("import json, os, sys; " + dump)} "$@"\n'
    )
    python = program.with_name("python")
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    for file in (program, python):
        file.chmod(0o755)
    data = tmp_path / "pairs.jsonl"
    data.write_text("")

    def called(command: list[str], **environment: str) -> tuple[list[str], str | None]:
        clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **environment}
        subprocess.run([*command, "-o", "setup"], cwd=ROOT, env=clean, check=True, capture_output=True, timeout=60)
        words, variables = json.loads(seen.read_text())
        return words, variables

    typed = ["HW=4090", f"DATA={data}", "SET=ppo.steps=10 ppo.betas=[0.9,$x]", "OUT=my runs", "RESUME=1"]
    words, variables = called(["make", "ppo", *typed, "RUNTIME=local"], VENV=str(tmp_path))
    line = next_steps.make_line(("chat", "--stage", "ppo"), shlex.split(not_none(variables)))
    assert line.startswith(f"make chat HW=4090 DATA={data} OUT='my runs' SET='ppo.steps=10 ") and "RESUME" not in line
    chat, of_chat = called(shlex.split(line))
    assert shlex.split(not_none(of_chat))[:2] == ["HW=4090", f"DATA={data}"], "for a run that it may lack"
    assert "ppo.betas=[0.9,$x]" in words
    assert words[:3] == ["run", "ppo", "--with-parents"] and words[-1] == "--resume"
    assert chat == ["chat", *words[3:-1], "--stage", "ppo"]


@pytest.mark.parametrize(
    ("typed", "ending"),
    [
        ("--hw 2xcpu", "`rlhf run ppo --hw 2xcpu --with-parents`"),
        ("--hw 2xcpu --seed 3", "`rlhf run ppo --hw 2xcpu --seed 3 --with-parents`"),
        (f"--recipe {RECIPE}", f"`rlhf run ppo --recipe {RECIPE} --with-parents`"),
    ],
)
def test_of_a_missing_stage_the_command_is_named(tmp_path, monkeypatch, capsys, typed, ending):
    monkeypatch.delenv(make_words.STARTED, raising=False)
    monkeypatch.chdir(tmp_path)
    code, _, err = rlhf(monkeypatch, capsys, "chat", *typed.split())
    assert code == 1 and err.endswith(f": first {ending}\n")


@pytest.mark.parametrize("command", ["ratings export {run} --to rows.jsonl", "compare {run} {run}", "ab {recipe}"])
def test_a_missing_evaluation_is_named_with_the_options_of_the_run(tmp_path, monkeypatch, capsys, command):
    run = tmp_path / "my runs/cpu-tiny/v1"
    changes = {"ppo.steps": 2, "data.source": "files", "data.files": ["/a b.jsonl"], "merge.stage": "dpo"}
    for stage, started, overrides in (("sft", "2026-01-02", changes), ("pretrain", "2026-01-01", {"ppo.steps": 1})):
        (run / stage).mkdir(parents=True)
        write_records(run / stage, {"started": started, "overrides": overrides, "seed": 7})
    named = f"--recipe {RECIPE} --out '{tmp_path}/my runs'"
    code, _, err = rlhf(monkeypatch, capsys, *shlex.split(command.format(run=f"'{run}'", recipe=named)))
    assert code == 1 and err.startswith(f"error: {run}/evaluate: no finished evaluation; first `rlhf run evaluate ")
    assert err.endswith("`\n")
    values = options_of(err.split("`")[1])
    assert values["with_parents"] and values["stage"] == "evaluate" and values["out"] == tmp_path / "my runs"
    loaded = Choice(directory=values["directory"], changes=values["changes"], seed=values["seed"]).load()
    assert loaded.directory.resolve() == RECIPE and loaded.overrides == changes and loaded.recipe.seed == 7


def test_what_chat_lacks_is_named_with_the_variables_of_make(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # a run in the checkout would be named too
    change = "ppo.steps=3"
    options = ("--hw", "cpu", "--out", tmp_path, "--set", change)
    monkeypatch.setenv(make_words.STARTED, f"HW='cpu' OUT='{tmp_path}' SET='{change}'")
    code, _, err = rlhf(monkeypatch, capsys, "chat", *options)
    assert code == 1 and err.endswith(f": first `make ppo HW=cpu OUT={tmp_path} SET={change}`\n")


@pytest.mark.parametrize("command", ["ab", "judge --url http://127.0.0.1:9/v1 --model m"])
def test_a_missing_evaluation_repeats_the_recipe_as_it_was_typed(tmp_path, monkeypatch, capsys, command):
    out = tmp_path / "my runs"
    code, _, err = rlhf(monkeypatch, capsys, *command.split(), "--hw", "cpu", "--out", out)
    assert code == 1
    assert f"first `rlhf run evaluate --with-parents --hw cpu --out '{out}'`" in err
    own = shutil.copytree(RECIPE, tmp_path / "own" / "v1")
    code, _, err = rlhf(monkeypatch, capsys, *command.split(), "--recipe", own)
    assert code == 1 and f"first `rlhf run evaluate --with-parents --recipe {own}`\n" in err
    monkeypatch.setenv(make_words.STARTED, f"HW='cpu' OUT='{out}' SEED='3'")
    code, _, err = rlhf(monkeypatch, capsys, *command.split(), "--hw", "cpu", "--out", out)
    assert code == 1 and err.endswith(f"first `make evaluate HW=cpu OUT='{out}' SEED=3`\n")


def test_the_container_gets_the_variables_by_name():
    words = subprocess.run([ROOT / "bin/in-container", "--print", "image"], capture_output=True, text=True, check=True)
    assert f"-e {make_words.STARTED} " in words.stdout
