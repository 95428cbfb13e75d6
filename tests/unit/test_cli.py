"""The command line: bad input is one line, a non-zero exit code, and nothing lost."""

import gzip
import importlib.util
import inspect
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import click
import pytest

import rlhf as package
from rlhf import cli, recipe
from rlhf.cli import overview
from rlhf.cli.choice import Choice
from rlhf.errors import OptionError, UserError
from rlhf.evaluation import reproduce
from rlhf.observe import tracking
from rlhf.process import distributed
from rlhf.process.task import Task
from rlhf.recipe import load, parse_overrides
from rlhf.recipe.folders import default_root, guide_of
from rlhf.recipe.published import Figure
from rlhf.recipe.stages import POLICIES
from rlhf.terminal import wording
from tests.helpers import RECIPE, SMALL, beside, not_none, noted, rlhf, run_stages, small, task_of
from tests.records import summary_of

SOURCE = Path(package.__file__).parent

ROW = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}
LINE = json.dumps(ROW) + "\n"


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *arguments: rlhf(monkeypatch, capsys, *arguments)


def changes(**more: object) -> list[str]:
    return [part for key, value in (SMALL | more).items() for part in ("--set", f"{key}={json.dumps(value)}")]


@pytest.mark.parametrize(
    "options", [["--seeds", "a b"], ["--seeds", ""], ["--seeds", "0 1 00"], ["--until", "foo"], ["--until", ""]]
)
def test_reproduce_refuses_what_is_no_seed_or_stage(command, options):
    code, _, err = command("reproduce", "--hw", "cpu", *options)
    assert code == 2
    assert options[0] in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "seed=5"], "--set seed: the seeds of this command are --seeds"),
        (["--until", "sft,grpo"], f"grpo: {RECIPE} has no such stage; add a section grpo (docs/groups.md)"),
    ],
)
def test_reproduce_refuses_what_no_seed_can_run_before_the_first(command, monkeypatch, tmp_path, options, message):
    monkeypatch.setattr(reproduce, "run_seeds", lambda *_: pytest.fail("a seed was run"))
    code, out, err = command("reproduce", "--recipe", RECIPE, "--out", tmp_path, *options)
    assert code and message in err and not out


def test_reproduce_evaluates_where_a_target_asks_for_it():
    plain = recipe.load(RECIPE)
    asks = plain._replace(figures=(plain.figures[0].model_copy(update={"stage": "evaluate"}),))
    assert reproduce.final_stages(plain) == ["sft", "rm", "ppo", "dpo"]
    assert reproduce.final_stages(asks) == ["sft", "rm", "ppo", "dpo", "evaluate"]


def test_several_files_may_follow_data(command, tmp_path, monkeypatch):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("")
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    read: list[object] = []

    def execute(_, loaded, *__, **___):
        read.extend(loaded.recipe.data.files)
        refuse()

    monkeypatch.setattr("rlhf.stages.runner.execute", execute)
    command("run", "sft", "--recipe", RECIPE, "--out", tmp_path / "runs", "--data", *files)
    assert read == [*map(str, files)]
    code, _, err = command("run", "sft", "b.jsonl", "--recipe", RECIPE)
    assert code == 2
    assert "Files to train on follow --data" in err


def test_recipes_are_listed(command):
    code, out, _ = command("recipes")
    assert code == 0
    assert "cpu-tiny" in out


def test_a_wrong_recipe_hides_no_other_one(command, tmp_path):
    """In the list, and where other recipes are named that have a stage."""
    for name in ("good", "bad"):
        shutil.copytree(RECIPE, tmp_path / name / "v1")
    shutil.copytree(RECIPE.parents[1] / "cpu-tiny-groups/v1", tmp_path / "groups/v1")
    text = (RECIPE / "recipe.yaml").read_text()
    (tmp_path / "bad/v1/recipe.yaml").write_text(text.replace("\nppo:", "\npop:"))
    code, out, _ = command("recipes", "--recipe-root", tmp_path)
    assert code == 0 and "good/v1" in out and "bad/v1" in out and out.count(" wrong ") == 1
    code, _, err = command("run", "grpo", "--recipe", tmp_path / "good/v1", "--out", tmp_path / "runs")
    assert code and f"or use --recipe {tmp_path}/groups/v1" in err


def test_the_version_that_hw_takes_is_said_once_on_stderr_where_there_are_several(command, tmp_path):
    out = ("--out", tmp_path)
    _, stdout, err = command("report", "--hw", "h100", *out)
    first, *others = err.splitlines()
    folder = default_root() / "h100-mistral-7b/v1"
    about = "v1 has the H100 guide's own settings: --guide"
    assert first == f"recipe: {folder.with_name('v2')} (draft; {about})"
    assert not stdout
    assert not [line for line in others if line.startswith("recipe: ")]
    toy = f"recipe: {folder.parents[1] / 'cpu-tiny/v2'} (released; v1 trains another model)\n"
    assert toy in command("report", "--hw", "cpu", *out)[2]
    assert "recipe: " not in command("report", "--hw", "2x4090", *out)[2]
    assert "recipe: " not in command("chat", "--hw", "cpu", "--set", "ppo.kl=1", *out)[2], "an error stands alone"
    assert "recipe: " not in command("report", "--recipe", folder, *out)[2]
    of_guide = command("report", "--hw", "h100", "--guide", *out)[2].splitlines()
    assert of_guide[0] == f"recipe: {folder} (draft)"


def test_the_version_that_keeps_a_guide_s_settings(command):
    root = default_root()
    for hw, folder in (("4090", "4090-llama2-7b/v1"), ("h100", "h100-mistral-7b/v1")):
        assert Choice(hw, guide=True).directory_of_recipe() == root / folder
        assert guide_of(root / folder) == guide_of(Choice(hw).directory_of_recipe())
    code, _, err = command("reproduce", "--hw", "cpu", "--guide")
    assert code == 2 and f"--guide: {root / 'cpu-tiny'} follows no published guide" in err
    code, _, err = command("plan", "--guide", "--recipe", root / "4090-llama2-7b/v2")
    assert code == 2 and "--recipe names a version, which --guide would choose" in err


def test_a_shell_completes_hardware_and_stages():
    from click.shell_completion import BashComplete

    def completed(*words):
        found = BashComplete(cli.cli, {}, "rlhf", "_RLHF_COMPLETE").get_completions(list(words[:-1]), words[-1])
        return [item.value for item in found]

    assert completed("plan", "--hw", "h") == ["h100"]
    assert completed("run", "pp") == ["ppo"]
    assert completed("plan", "--set", "ppo.kl_c") == ["ppo.kl_coef="]


def test_a_rank_does_not_repeat_it(command, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "launched", lambda: True)
    assert "recipe: " not in command("report", "--hw", "h100", "--out", tmp_path)[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "sft", "--resume"],
            "name a recipe: --hw NAME or --recipe DIR; `rlhf recipes` lists them; or name a run",
        ),
        (["chat", "--hw", "cpu", ""], "RUN '' names nothing"),
        (["run", "sft", "--hw", "cpu", ""], "RUN '' names nothing"),
        (["run", "sft", "--hw", "tpu"], "--hw tpu: no recipe for such hardware"),
        (["run", "sft", "--recipe", "nowhere/v1"], "--recipe nowhere/v1: no recipe.yaml there; `rlhf recipes` lists"),
        (["plan", "--recipe", "recipes/cpu-tiny"], "name one: recipes/cpu-tiny/v1 or recipes/cpu-tiny/v2"),
        (["plan", "--recipe", "recipes/cpu-tinny/v2"], "nearest: recipes/cpu-tiny/v2"),
        (["plan", "--recipe", "h100-mistral7b"], "nearest: recipes/h100-mistral-7b/v"),
        (["run", "sft", "--hw", "cpu", "--set", "ppo.kl_coeff=1"], "nearest: ppo.kl_coef"),
        (
            ["run", "sft", "--hw", "cpu", "--set", "kl_coef=1"],
            "nearest: ppo.kl_coef",
        ),
        (
            ["run", "sft", "--hw", "cpu", "--set", "ppo.algorithm=x"],
            "unknown key 'ppo.algorithm'",
        ),
        (["run", "sft", "--hw", "cpu", "--set", "save_steps=1"], "nearest: pretrain.save_steps, sft.save_steps, "),
        (["run", "sft", "--hw", "cpu", "--set", "ppo.kl_coef"], "write it as key=value"),
        (["run", "sftt", "--hw", "cpu"], "'sftt' is not one of"),
        (["run", "sft", "--hw", "cpu", "--seed", "-1"], "-1"),
        (["data", "check", "nowhere.jsonl"], "nowhere.jsonl"),
        (["plan", "--hw", "cpu", "--fit", "12"], "--fit"),
        (["plan", "--hw", "cpu", "--set", "ppo.kl_coef=x"], "ppo.kl_coef"),
        (["chat", "--hw", "cpu", "--weights", "nowhere"], "--weights nowhere: no config.json there"),
        (["run", "sft", "--hw", "cpu", "--data", ""], "--data '': no such file; check its path"),
        (["data", "check", ""], "'': no such file; check its path"),
        (["run", "sft", "--hw", "cpu", "--data", "some/set"], "--set data.name=some/set --set data.revision=COMMIT"),
    ],
)
def test_a_bad_command_is_explained(command, arguments, message):
    code, _, err = command(*arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_command_that_takes_a_run_says_so_whatever_its_help_calls_it(command, monkeypatch):
    for parameter in not_none(cli.cli.get_command(click.Context(cli.cli), "chat")).params:
        monkeypatch.setattr(parameter, "metavar", None)
    assert "or name a run directory as RUN" in " ".join(command("chat")[2].split())
    assert "or name a run" not in command("plan")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run sft --hw cpu --data {file} --set data.files=[x.jsonl]", "--set data.files: --data sets this key too"),
        ("run sft --hw cpu --weights random --set model.source=hub", "--set model.source: --weights sets this key too"),
        ("run sft --hw cpu --set seed=5 --seed 6", "--set seed and --seed both set the seed; leave one of them out"),
        ("run sft --hw cpu --weights random --set sft.max_stepss=1", "nearest: sft.max_steps"),
        ("report {folder} --hw cpu", "leave one of them out"),
        ("report {folder} --out elsewhere", "leave one of them out"),
        ("recipes --recipe-root {folder}", "no recipes there"),
        ("plan --hw cpu --recipe-root {folder}", "no recipes there"),
    ],
)
def test_of_two_options_none_is_dropped_silently(command, tmp_path, arguments, message):
    (tmp_path / "rows.jsonl").write_text(LINE)
    code, out, err = command(*arguments.format(file=tmp_path / "rows.jsonl", folder=tmp_path).split())
    assert (code, out) == (2, "")
    assert message in " ".join(err.split()) and "Traceback" not in err


def test_a_seed_among_the_changes_is_no_change():
    """A released recipe is meant to be run with several."""
    loaded = Choice(directory=RECIPE, changes=("seed=5", "sft.max_steps=2")).load()
    assert loaded.recipe.seed == 5 and loaded.overrides == {"sft.max_steps": 2}
    assert not Choice(directory=RECIPE, changes=("seed=5",)).load().modified
    with pytest.raises(OptionError, match="seed = 'few': input should be a valid integer"):
        Choice(directory=RECIPE, changes=("seed=few",)).load()


def test_a_mistake_in_a_recipe_s_file_is_none_of_the_command(command, tmp_path):
    (tmp_path / "mine/v1").mkdir(parents=True)
    (tmp_path / "mine/v1/recipe.yaml").write_text("status: draft\n")
    code, _, err = command("plan", "--recipe", tmp_path / "mine/v1", "--set", "ppo.steps=1")
    assert code == 1 and "recipe.yaml" in err


def test_a_stage_before_its_parent_says_which_command_to_run(command, tmp_path):
    code, _, err = command("run", "ppo", "--recipe", RECIPE, "--out", tmp_path / "my runs", "--seed", "3", "--resume")
    assert code == 1
    folder = tmp_path / "my runs/cpu-tiny/v1/pretrain"
    same = f"--recipe {RECIPE} --out {shlex.quote(f'{tmp_path}/my runs')} --seed 3"
    assert err.endswith(f"{folder}): first `rlhf run pretrain --with-parents {same}`\n")
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "my runs/cpu-tiny/v1/ppo").exists()


def refuse(*_, **__):
    """What stands in for a stage that a test must not run."""
    raise UserError("not run here")


@pytest.mark.parametrize(
    ("stage", "changes", "expected"),
    [
        ("pretrain", [], ""),
        ("sft", [], "pretrain"),
        ("rm", [], "pretrain sft"),
        ("ppo", [], "pretrain sft rm"),
        ("dpo", [], "pretrain sft"),
        ("evaluate", [], "pretrain sft rm ppo"),
        ("merge", [], "pretrain sft rm ppo"),
        ("merge", ["--set", "merge.stage=dpo"], "pretrain sft dpo"),
    ],
)
def test_parents_are_run_first_in_order_with_the_same_options(command, tmp_path, monkeypatch, stage, changes, expected):
    """Each in a process of its own; the stage itself is not run here."""
    children: list[Task] = []
    monkeypatch.setattr("rlhf.process.children.run_child", lambda words, _: noted(children, task_of(words), 0))
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

    def run_child(words, _):
        stage = task_of(words).stage
        return noted(children, stage, 3 * (stage == "sft"))

    monkeypatch.setattr("rlhf.process.children.run_child", run_child)
    code, out, err = command("run", "ppo", "--with-parents", "--recipe", RECIPE, "--out", tmp_path, "--no-preflight")
    assert (code, err) == (3, "") and children == ["pretrain", "sft"]
    assert out == "stage 1 of 4: pretrain\nstage 2 of 4: sft\n"


def test_a_chain_is_numbered_and_its_outcome_printed_once(command, trained, tmp_path, monkeypatch):
    """Parents that are done are named; the stages behind them have their numbers in the whole chain."""
    out = beside(trained, tmp_path, "pretrain", "sft")
    finished = summary_of(stage="ppo"), None, out / "cpu-tiny/v1/ppo"
    monkeypatch.setattr("rlhf.process.children.run_child", lambda *_: 0)
    monkeypatch.setattr("rlhf.stages.runner.execute", lambda *_, **__: finished)
    arguments = ("run", "ppo", "--with-parents", "--recipe", RECIPE, "--out", out, *changes())
    code, printed, _ = command(*arguments)
    assert code == 0
    lines = printed.splitlines()
    assert [line for line in lines if line.startswith("stage ")] == ["stage 3 of 4: rm", "stage 4 of 4: ppo"]
    assert [line.partition(" (")[0] for line in lines[:2]] == ["pretrain: done", "sft: done"]
    assert lines.count("next:") == 1 and lines.count("the chain so far") == 1
    monkeypatch.setenv("RLHF_PART_OF_COMMAND", "1")
    printed = command(*arguments)[1]
    assert "next:" not in printed and "the chain so far" not in printed


def test_a_stage_that_runs_alone_has_no_number(command, trained, monkeypatch):
    monkeypatch.setattr("rlhf.stages.runner.execute", refuse)
    _, out, _ = command("run", "rm", "--with-parents", "--recipe", RECIPE, "--out", trained, *changes())
    assert "sft: done" in out and "stage " not in out


def test_few_files_lie_between_the_command_and_a_stage(command, trained, tmp_path, monkeypatch):
    """Those whose functions are entered and not yet left where the stage's own code begins."""
    entered: list[str] = []

    def run_stage(*_):
        files = [Path(frame.filename) for frame in inspect.stack()[1:]]
        entered.extend(str(file.relative_to(SOURCE)) for file in files if file.is_relative_to(SOURCE))
        refuse()

    monkeypatch.setattr("rlhf.stages.runner.import_stage", lambda stage: run_stage)
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    command("run", "ppo", "--with-parents", "--recipe", RECIPE, "--out", out, *changes())
    assert {*entered} == {f"cli/{name}.py" for name in ("entry", "guard", "recipe_options", "train")} | {
        "stages/runner.py"
    }


def test_a_signal_ends_a_chain_in_one_line(tmp_path):
    words = [sys.executable, "-m", "rlhf.cli", "run", "sft", "--with-parents", "--recipe", str(RECIPE)]
    options = ["--out", str(tmp_path), "--no-preflight", *changes(**{"pretrain.max_steps": 100_000})]
    running = subprocess.Popen([*words, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    checkpoints = tmp_path / "cpu-tiny/v1/pretrain/checkpoints"
    while not list(checkpoints.glob("step-*")):
        assert running.poll() is None
        time.sleep(0.05)
    running.terminate()
    _, err = running.communicate(timeout=60)
    (line,) = [line for line in err.splitlines() if "stopped" in line]
    assert running.returncode == 143
    assert line.startswith(f"stopped by SIGTERM; {checkpoints}/step-") and " with --resume" in line


@pytest.mark.parametrize("code", [143, -15], ids=["while it ran", "before it listened"])
def test_a_signal_to_a_parent_stage_alone_is_reported(command, tmp_path, monkeypatch, code):
    monkeypatch.setattr("rlhf.process.children.run_child", lambda *_: code)
    ended, _, err = command("run", "sft", "--with-parents", "--recipe", RECIPE, "--out", tmp_path, "--no-preflight")
    says = "pretrain has no checkpoint yet (the first is due at step 500): the same command begins it anew"
    assert (ended, err) == (143, f"stopped by SIGTERM; {says}\n")


DAMAGED = {
    "truncated.jsonl.gz": (gzip.compress(LINE.encode() * 5000)[:-40], "gzip"),
    "empty.jsonl": (b"", "empty"),
    "no-rejected.jsonl": ((LINE + json.dumps({"chosen": ROW["chosen"]}) + "\n").encode(), ":2: no 'rejected' key"),
    "latin.jsonl": (LINE.encode() + b'{"chosen": "\xe9"}\n', ":2"),
    "broken.jsonl": (LINE.encode() + b"{oops}\n", ":2"),
    "model.parquet": (b"PAR1 but nothing more", "arquet"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("way", ["check", "train"])
def test_damaged_data_is_one_line_with_file_and_place(command, tmp_path, name, way):
    content, message = DAMAGED[name]
    file = tmp_path / name
    file.write_bytes(content)
    out = tmp_path / "runs"
    if way == "check":
        code, _, err = command("data", "check", file)
    else:
        code, _, err = command("run", "pretrain", "--recipe", RECIPE, "--data", file, "--out", out, *changes())
    assert code == 1
    assert str(file) in err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not list(out.rglob("summary.json"))


def test_good_data_is_described(command, tmp_path):
    file = tmp_path / "good.jsonl"
    file.write_text(LINE)
    code, out, err = command("data", "check", file)
    assert (code, err) == (0, "")
    assert "pairs" in out
    code, out, _ = command("data", "check", "--json", "--to", tmp_path / "report.json", file)
    assert json.loads(out)["pairs"] == 1
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(out)


def test_the_exit_code_of_a_data_check_says_how_bad_it_is(command, tmp_path):
    file = tmp_path / "rows.jsonl"
    for content, expected in ((LINE, 0), (LINE * 3, 3), (LINE * 3 + '{"chosen": 1}\n', 1)):
        file.write_text(content)
        assert command("data", "check", file)[0] == expected
    err = command("data", "check", file)[2]
    assert "rows.jsonl:4: " in err and "more" not in err and "`rlhf run … --set data.on_bad_row=skip`" in err
    file.write_text(LINE * 6 + '{"chosen": 1}\n' * 5)
    err = command("data", "check", file)[2]
    assert (
        "rows.jsonl:9: " in err and "; and 2 more. Repair it; a run leaves such rows out with `rlhf run … --set" in err
    )
    assert command("data", "check", "--heldout-fraction", "2", file)[0] == 2
    assert command("data", "check", "--heldout", tmp_path / "none.jsonl", file)[0] == 2
    code, _, err = command("data", "check", "--tokenizer", tmp_path / "none", file)
    assert code == 2 and "none: no such folder; name one that holds a tokenizer.json" in err


def test_a_data_check_looks_for_leakage_into_another_file(command, tmp_path):
    (tmp_path / "train.jsonl").write_text(LINE)
    (tmp_path / "test.jsonl").write_text(LINE)
    where = ("--heldout", tmp_path / "test.jsonl", tmp_path / "train.jsonl")
    code, out, _ = command("data", "check", "--json", *where)
    leakage = json.loads(out)["leakage"]
    assert (code, leakage["heldout"], leakage["training"], leakage["same_start"]) == (3, 1, 1, 1)


def test_rows_may_hold_what_looks_like_markup(command, tmp_path):
    file = tmp_path / "markup.jsonl"
    message = {"role": "[/INST]", "content": "[bold]Hi[/nothing]"}
    good = {"prompt": "Hi [b]", "chosen": "yes [/b]", "rejected": "no"}
    file.write_text("".join(json.dumps(row) + "\n" for row in (good, good, good, {**good, "prompt": [message]})))
    code, out, err = command("data", "check", file)
    assert code == 1
    assert "[/INST]" in err
    assert "pairs" in out


def test_a_failed_stage_leaves_finished_ones_alone(command, trained, tmp_path):
    """Other data in the same root: the reward model refuses, and SFT stays as it was."""
    root = trained / "cpu-tiny/v1/sft/summary.json"
    before = root.read_bytes()
    file = tmp_path / "other.jsonl"
    file.write_text(LINE * 30)
    code, _, err = command("run", "dpo", "--recipe", RECIPE, "--data", file, "--out", trained, *changes())
    assert code == 1
    assert "was made with data.files [] (asked for: [" in err and "data.source toy (asked for: files)" in err
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


def test_restarting_a_finished_stage_says_why_nothing_was_run_and_how_to_run_it_again(command, trained):
    code, out, err = command("run", "sft", "--recipe", RECIPE, "--out", trained, "--restart", *changes())
    assert code == 0 and "nothing was run" in out
    assert "--restart is for unfinished runs" in err and "choose another --out" in err


def test_if_needed_skips_a_stage_that_the_recipe_lacks(command, tmp_path):
    code, out, _ = command("run", "grpo", "--recipe", RECIPE, "--out", tmp_path, "--with-parents", "--if-needed")
    assert (code, out.strip()) == (0, "grpo: not part of cpu-tiny v1")
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_is_not_installed_is_named_before_any_work(command, trained, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = command("run", "dpo", "--recipe", RECIPE, "--out", trained, "--report-to", "wandb", *changes())
    assert code == 1
    assert "wandb is not installed; pip install '.[wandb]'" in err
    assert not (trained / "cpu-tiny/v1/dpo").exists()


def test_a_tracker_that_does_not_start_is_one_line(command, trained, tmp_path, monkeypatch):
    def init(**options):
        raise ValueError("api_key not configured\n(no-tty)")

    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: name == "wandb" or find_spec(name, *more))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    out = beside(trained, tmp_path / "runs", "pretrain", "sft")
    code, _, err = command("run", "dpo", "--recipe", RECIPE, "--out", out, "--report-to", "wandb", *changes())
    assert code == 1
    assert err.strip().endswith("--report-to wandb: api_key not configured (no-tty)")
    assert "Traceback" not in err


def test_wandb_writes_beside_the_run_s_other_files(tmp_path, monkeypatch):
    started, logged = [], []
    wandb = types.SimpleNamespace(
        init=lambda **options: started.append(options),
        log=lambda values, step: logged.append((step, values)),
        finish=lambda: started.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with tracking.trackers(["wandb"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {"seed": 0}) as logs:
        for log in logs:
            log(3, {"loss": 0.5})
    named = {"project": "cpu-tiny-v1", "name": "sft-seed0"}
    expected = named | {"config": {"seed": 0}, "dir": str(tmp_path / "sft")}
    assert started == [expected, "finished"]
    assert logged == [(3, {"loss": 0.5})]


def test_a_tracker_is_closed_when_another_does_not_start_or_close(tmp_path, monkeypatch, capsys):
    def fail(**options):
        raise OSError("no network")

    closed = []
    module = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "wandb", module(init=dict, finish=lambda exit_code=0: closed.append(exit_code)))
    monkeypatch.setitem(sys.modules, "trackio", module(init=fail, finish=fail))
    with (
        pytest.raises(UserError, match="trackio: no network"),
        tracking.trackers(["wandb", "trackio"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}),
    ):
        pass
    monkeypatch.setitem(sys.modules, "trackio", module(init=dict, finish=fail))
    with tracking.trackers(["wandb", "trackio"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}):
        pass
    assert closed == [1, 0]
    assert "trackio could not be closed: no network" in capsys.readouterr().err


def test_a_tracker_that_fails_gets_no_more_rows_and_ends_no_run(tmp_path, monkeypatch, capsys):
    """The stage's own logs have everything."""

    def fail(row, step):
        sent.append(step)
        raise ConnectionError("no network")

    sent: list[int] = []
    trackio = types.SimpleNamespace(init=dict, finish=dict, log=fail)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with tracking.trackers(["trackio"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}) as (record,):
        record(1, {"loss": 0.5})
        record(2, {"loss": 0.4})
    assert sent == [1]
    assert capsys.readouterr().err.count("trackio gets no more metrics: no network") == 1


def test_trackers_name_a_run_after_recipe_stage_and_seed(trained, tmp_path, monkeypatch):
    opened: list[tuple[object, ...]] = []
    monkeypatch.setattr(tracking, "trackers", lambda *arguments: noted(opened, arguments, nullcontext([])))
    out = beside(trained, tmp_path / "runs", "pretrain")
    run_stages(small(sft__max_samples=16), out, "sft")
    ((_, _, project, name, _, first_step),) = opened
    assert (project, name, first_step) == ("cpu-tiny-v1", "cpu-tiny-v1-sft-seed0", None)


@pytest.mark.parametrize("fails", ["init", "log"])
def test_tensorboard_ends_no_run_either(tmp_path, monkeypatch, capsys, fails):
    class Writer:
        def __init__(self, folder: str, purge_step: int | None):
            if fails == "init":
                raise OSError("no room")

        def add_scalar(self, *_: object) -> None:
            raise OSError("no room")

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    opened = tracking.trackers(["tensorboard"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {})
    if fails == "init":
        with pytest.raises(UserError, match="--report-to tensorboard: no room"), opened:
            pass
        return
    with opened as (record,):
        record(1, {"loss": 0.5})
        record(2, {"loss": 0.4})
    assert capsys.readouterr().err.count("tensorboard gets no more metrics: no room") == 1


def test_only_wandb_is_told_that_a_stage_has_failed(tmp_path, monkeypatch):
    """It would list the run as finished. Trackio's function takes nothing."""
    closed = []
    wandb = types.SimpleNamespace(init=dict, finish=lambda exit_code=0: closed.append(exit_code))
    trackio = types.SimpleNamespace(init=dict, finish=lambda: closed.append("trackio"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with (
        pytest.raises(MemoryError),
        tracking.trackers(["wandb", "trackio"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}),
    ):
        raise MemoryError
    with tracking.trackers(["wandb"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}):
        pass
    assert closed == ["trackio", 1, 0]


def test_an_output_folder_that_cannot_be_written_is_named(command, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    code, _, err = command("run", "pretrain", "--recipe", RECIPE, "--out", tmp_path / "file" / "runs")
    assert code == 1
    assert str(tmp_path / "file") in err
    assert "Traceback" not in err


def test_reproduce_shows_each_seed_and_their_mean():
    def summary(value):
        target = {"name": "accuracy", "published": [0.71, None], "published_mean": [0.73, None], "measured": value}
        return {"rm": summary_of(stage="rm", targets=[target], wall_seconds=10.0)}

    seeds = {"0": summary(0.70), "1": summary(0.72), "2": summary(0.74)}
    header, accuracy, wall, total = reproduce.rows(seeds)
    assert header[3:] == ("seed 0", "seed 1", "seed 2", "mean ± sd", "verdict")
    asked, verdict = "≥ 0.71; mean ≥ 0.73", "2 of 3 met, mean missed"
    assert accuracy == ("rm", "accuracy", asked, "0.7", "0.72", "0.74", "0.72 ± 0.02", verdict)
    assert wall == ("rm", "wall time, s", "", "10", "10", "10", "10", "")
    assert total == ("all", "wall time, s", "", "10", "10", "10", "10", "")


@pytest.mark.parametrize(
    ("low", "high", "text"), [(None, 5, "≤ 5"), (0.6, None, "≥ 0.6"), (0.05, 0.3, "0.05 – 0.3"), (None, None, "-")]
)
def test_ranges_in_words(low, high, text):
    assert wording.span(low, high) == text


def test_targets_are_measured_against_their_range():
    from rlhf.run.comparisons import comparison

    target = Figure(name="KL", stage="ppo", metric="kl_per_token", range=(0.05, 0.3), unit="nats/token", source="here")
    verdicts = [comparison(target, {"kl_per_token": value}).outcome.word for value in (0.04, 0.05, 0.2, 0.3, 0.31)]
    assert verdicts == ["missed", "met", "met", "met", "missed"]
    assert (
        comparison(target, {}).outcome.word
        == comparison(target, {"kl_per_token": math.nan}).outcome.word
        == "not compared"
    )


def test_a_model_that_is_trained_from_nothing_on_own_rows_is_called_a_trial(command, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {i} of a few words"}) + "\n" for i in range(40)))
    arguments = ["run", "pretrain", "--recipe", RECIPE, "--data", file, "--out", tmp_path / "runs", *changes()]
    code, _, err = command(*arguments)
    assert code == 0 and "a trial of every step, not an assistant" in " ".join(err.split())


def commands(group: click.Group = cli.cli, name: str = "rlhf") -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, groups included."""
    for word, command in group.commands.items():
        yield f"{name} {word}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {word}")


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_each_line_of_help_stands_alone(name, command):
    """No option without help, no line that continues the option's name, no summary that 80 columns would cut."""
    assert command.get_short_help_str(1000) == command.get_short_help_str(66)
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{name} {option.opts[0]} has no help"
            assert not re.match(r"(Of|Whose|As|The same|What|That|Where)\b", option.help), f"{name}: {option.help}"
            assert option.help[0].isupper(), f"{name}: {option.help}"
            if option.multiple:
                assert re.search(r" May be repeated\.| twice", option.help), f"{name}: {option.help}"
            if isinstance(option.type, click.types.IntParamType):
                assert option.metavar == "N", f"{name} {option.opts[0]}"


@pytest.mark.parametrize("module", ["rlhf", "rlhf.cli"])
def test_the_package_runs_as_the_command(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: rlhf [OPTIONS] COMMAND")


def test_the_version_is_printed(command):
    code, out, _ = command("--version")
    assert code == 0 and out.strip().endswith(package.__version__)


def test_the_examples_of_compare_are_runs_of_one_recipe_on_the_same_data():
    for example in overview.EXAMPLES["compare"]:
        a, b = (Path(word) for word in shlex.split(example)[2:4])
        assert a.parts[-2:] == b.parts[-2:]


@pytest.mark.parametrize("words", [("ab",), ("judge",)])
def test_the_help_of_b_names_the_policies_in_the_order_of_the_choice(command, words):
    code, out, _ = command(*words, "--help")
    assert code == 0 and f"first of {', '.join(POLICIES)}" in " ".join(out.split())


def test_the_help_lists_every_command_once_in_the_order_of_use(command):
    code, out, _ = command("--help")
    assert code == 0
    listed = re.findall(r"^  (\w+)  +[A-Z]", out.partition("Prepare:")[2], re.M)
    assert sorted(listed) == sorted(cli.cli.commands)
    assert listed == cli.cli.list_commands(click.Context(cli.cli))
    assert [listed.index(name) for name in ("new", "data", "plan", "run", "report", "serve")] == sorted(
        listed.index(name) for name in ("new", "data", "plan", "run", "report", "serve")
    )


@pytest.mark.parametrize("group", [cli.cli, *(c for c in cli.cli.commands.values() if isinstance(c, click.Group))])
def test_no_line_of_a_list_of_commands_is_cut_at_80_columns(group):
    context = click.Context(group, terminal_width=80, max_content_width=80)
    assert "..." not in group.get_help(context).partition("--help")[2]


def leaves() -> list[tuple[str, click.Command]]:
    return [(name, command) for name, command in commands() if not isinstance(command, click.Group)]


def examples(command: click.Command) -> list[str]:
    return [line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("rlhf ")]


@pytest.mark.parametrize(("name", "command"), leaves(), ids=[name for name, _ in leaves()])
def test_the_examples_of_a_help_text_are_commands_of_its_name_that_parse(name, command):
    lines = examples(command)
    assert 1 <= len(lines) <= 2
    for line in lines:
        assert line.startswith(f"{name} ") or line == name
        words = shlex.split(line.removeprefix(name))
        values, _, order = command.make_parser(click.Context(command)).parse_args(words)
        assert {param for param in command.params if param.required} <= {*order}
        for param in command.params:
            if isinstance(param.type, click.Choice) and isinstance(value := values.get(str(param.name)), str):
                assert value in param.type.choices, line


@pytest.mark.parametrize(("name", "command"), leaves(), ids=[name for name, _ in leaves()])
def test_the_examples_are_lines_of_their_own_at_the_end_of_the_help(name, command):
    context = click.Context(command, terminal_width=80, max_content_width=80)
    end = command.get_help(context).rstrip().splitlines()[-len(examples(command)) :]
    assert [line.strip() for line in end] == examples(command)
