"""Targets of the Makefile as commands: what each runs, which variables it takes, and what a container sees."""

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import click
import pytest

from rlhf import recipe
from rlhf.cli import cli, from_make, next_steps
from rlhf.cli.from_make import Given, check, command_line, rules, takes
from rlhf.errors import UserError
from rlhf.recipe import STAGES
from rlhf.terminal import make_words
from tests.records import write_records

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "an-image"


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("RLHF_RECIPES", raising=False)
    monkeypatch.delenv(make_words.STARTED, raising=False)


def given(*typed: str, **environment: str) -> Given:
    """What make hands on of variables that were typed, and of its environment."""
    assignments = " ".join(re.sub(r"([ \t\\])", r"\\\1", word).replace("$", "$$") for word in typed)
    return Given.read({"MAKEFLAGS": f" -- {assignments}", **environment})


def called(target: str, *typed: str, asked: bool = True, **environment: str) -> list[str]:
    """The words that a target hands to `rlhf` without a container, after a check."""
    variables = given(*typed, **environment)
    program, *words = command_line(target, variables, "local", IMAGE, gpu=False, asked=asked)
    assert program == ".venv/bin/rlhf"
    return words


def shown(target: str, *typed: str, engine: str = "docker", gpu: bool = True) -> list[str]:
    """The words with which bin/in-container is called for a target."""
    program, *words = command_line(target, given(*typed), engine, IMAGE, gpu=gpu, asked=True)
    assert program == "bin/in-container"
    return words


def option(words: list[str], name: str) -> list[str]:
    """Each value that an option is given."""
    return [value for flag, value in pairwise(words) if flag == name]


def assert_same_command(words: list[str], expected: list[str]) -> None:
    """The same words, and each option with the same values; the order of options is free."""
    assert sorted(words) == sorted(expected)
    for name in {word for word in expected if word.startswith("-")}:
        assert option(words, name) == option(expected, name), name


@pytest.fixture
def files(tmp_path) -> list[Path]:
    paths = [tmp_path / "pairs.v1.jsonl.gz", tmp_path / "more(1).jsonl"]
    for path in paths:
        path.touch()
    return paths


# ---- what make was given


@pytest.mark.parametrize("value", ["a b", "$HOME/$$x", "back\\slash", "'single' \"double\"", "a=b=c", "two\nlines", ""])
def test_a_typed_value_is_taken_as_it_is(value):
    assert given("OUT=o", f"SET={value}").typed == {"OUT": "o", "SET": value}


def test_the_command_line_goes_before_the_environment_and_empty_values_are_none():
    variables = given("SEED=1", "WEIGHTS=", "OUT=", SEED="2", HW="4090", PRICE="", PATH="/bin")
    assert variables.values == {"SEED": "1", "OUT": "", "HW": "4090"}
    assert given("RECIPE=r", HW="4090").values == {"RECIPE": "r"}, "which was chosen instead"


@pytest.mark.parametrize(
    ("flags", "dry"),
    [("n -- HW=n", True), ("kn", True), (" -- OUT=n", False), ("", False), ("--no-print-directory", False)],
)
def test_a_dry_run_is_known(flags, dry):
    assert Given.read({"MAKEFLAGS": flags}).dry_run == dry


def test_a_path_in_the_home_folder_is_expanded_whatever_the_shell():
    words = called("pretrain", "OUT=~/runs", "DATA=~/a ~/b")
    assert option(words, "--out") == [f"{Path.home()}/runs"]
    assert option(words, "--data") == [f"{Path.home()}/a", f"{Path.home()}/b"]


# ---- what is run


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_those_before_it_first(stage):
    expected = ["run", stage, "--with-parents", "--hw", "cpu", "--out", "runs"]
    assert called(stage) == expected
    assert called(stage, asked=False) == [*expected[:3], "--if-needed", *expected[3:]], "for another target"


def test_a_stage_takes_all_variables_of_a_run():
    typed = ["SEED=3", "SET=ppo.steps=2 sft.lr=[1,2]", "RESUME=1", "REPORT_TO=wandb trackio", "STOP_ON=nan", "PRICE=2"]
    words = called("ppo", "RECIPE=recipes/cpu-tiny/v1", *typed, "REUSE=runs")
    assert option(words, "--recipe") == ["recipes/cpu-tiny/v1"] and "--hw" not in words and words[-1] == "runs"
    assert option(words, "--set") == ["ppo.steps=2", "sft.lr=[1,2]"] and option(words, "--seed") == ["3"]
    assert option(words, "--report-to") == ["wandb", "trackio"] and option(words, "--stop-on") == ["nan"]
    assert "--resume" in words and option(words, "--price") == ["2"]


@pytest.mark.parametrize(("value", "on", "off"), [("1", True, False), ("no", False, True), ("", False, False)])
def test_switches_are_on_or_off(value, on, off):
    words = called("pretrain", f"RESUME={value}")
    assert ("--resume" in words, "--restart" in words) == (on, off)
    assert ("--summary" in called("ab", f"SUMMARY={value}")) == on


@pytest.mark.parametrize(
    ("target", "typed", "expected"),
    [
        ("pretrain", ["REPORT_TO=none"], "run pretrain --with-parents --hw cpu --out runs"),
        ("reproduce", [], "reproduce --hw cpu --out runs"),
        ("reproduce", ["HW=4090", "GUIDE=1"], "reproduce --hw 4090 --out runs --guide"),
        ("reproduce", ["SEEDS=5 6", "OUT=o"], "reproduce --hw cpu --out o --seeds '5 6'"),
        ("plan", ["HW=4090", "FIT=12GB", "PRICE=2"], "plan --hw 4090 --fit 12GB --price 2"),
        ("recipes", [], "recipes"),
        ("fetch", ["HW=4090"], "fetch --hw 4090"),
        ("data-check", ["DATA=x", "CHECK_ARGS=--heldout 'a b'"], "data check x --heldout 'a b'"),
        ("data-show", ["DATA=x y", "SHOW_ARGS=--rows 2"], "data show x y --rows 2"),
        ("ab", ["SEED=3", "AB_ARGS=--a sft"], "ab --hw cpu --out runs/seed-3 --a sft"),
        ("judge", ["URL=u", "MODEL=m", "AB_ARGS=--limit 5"], "judge --hw cpu --out runs --url u --model m --limit 5"),
        ("report", ["SEED=3"], "report --hw cpu --out runs/seed-3"),
        ("chat", ["STAGE=dpo", "TEMPERATURE=0"], "chat --hw cpu --out runs --stage dpo --temperature 0"),
        ("serve", ["PORT=81"], "serve --hw cpu --out runs --port 81"),
        ("score", ["FILES=a b", "SCORE_ARGS=--to s"], "score --hw cpu --out runs a b --to s"),
        (
            "score",
            ["PROMPT=Why's $5?", "RESPONSE=a"],
            "score --hw cpu --out runs --prompt 'Why'\"'\"'s $5?' --response a",
        ),
    ],
)
def test_a_target_is_a_command(target, typed, expected):
    words = called(target, *typed)
    assert_same_command(words, shlex.split(expected))


@pytest.mark.parametrize(
    ("typed", "root"),
    [
        ("", "runs"),
        ("SEED=7", "runs/seed-7"),
        ("DATA={0}", "runs/data-pairs.v1"),
        ("DATA={0} SEED=7", "runs/data-pairs.v1/seed-7"),
        ("WEIGHTS=random", "runs/weights-random"),
        ("WEIGHTS=/x/model/", "runs/weights-model"),
        ("DATA={0} SEED=7 OUT=mine", "mine"),
    ],
)
def test_other_data_or_another_seed_have_their_own_root(typed, root, files):
    assert option(called("sft", *typed.format(*files).split()), "--out") == [root]


def test_data_takes_patterns(files):
    words = called("sft", f"DATA={files[0]} {files[0].parent}/*.jsonl nowhere")
    assert option(words, "--data") == [str(files[0]), str(files[1]), "nowhere"], "what is no file is for rlhf to refuse"


@pytest.mark.parametrize("stage", ["", "/ppo"])
@pytest.mark.parametrize("target", ["chat", "evaluate", "merge", "serve", "report", "ab", "score", "judge"])
def test_a_run_directory_is_enough(target, stage):
    words = called(target, f"RUN=runs/a/v1{stage}")
    assert f"runs/a/v1{stage}" in words and not {"--out", "--hw", "--recipe"} & {*words}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("bench", "-m bench --hw 4090 --set a=1 --price 2 --save"),
        ("bench-memory", "-m bench.memory measure --hw 4090 --set a=1 --save"),
        ("bench-peer", "-m bench.peer --save"),
        ("bench-peer-supervised", "-m bench.peer --weights random --hw 4090 --set a=1 --save"),
    ],
)
def test_benchmarks_are_modules(target, expected):
    variables = given("HW=4090", "SET=a=1", "PRICE=2", "BENCH_ARGS=--save")
    program, *words = command_line(target, variables, "local", IMAGE, gpu=False, asked=True)
    assert program == ".venv/bin/python"
    assert_same_command(words, expected.split())


def test_the_fuzzer_s_variables_are_its_options():
    words = command_line("fuzz", given("SEED=1", "ONLY=kills"), "local", IMAGE, gpu=False, asked=True)
    assert words[1:] == ["-m", "tests.fuzz", "--seed", "1", "--only", "kills"]


# ---- what is refused


def refused(*words: str, runtime: str = "local", **environment: str) -> str:
    """Why targets with variables are refused."""
    goals, typed = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    with pytest.raises((UserError, click.UsageError)) as caught:
        check(goals, given(*typed, **environment), runtime)
    error = caught.value
    return error.format_message() if isinstance(error, click.UsageError) else str(error)


@pytest.mark.parametrize(("typed", "meant"), [("hw=4090", "HW"), ("FTI=12GB", "FIT"), ("x=1", ""), ("it's=x", "")])
def test_a_misspelt_variable_is_refused_with_the_nearest(typed, meant):
    message = refused("ppo", typed)
    assert f"no variable {typed.partition('=')[0]};" in message
    assert re.findall(r"mean (\w+)\?", message) == ([meant] if meant else [])


@pytest.mark.parametrize(
    "words",
    [
        *("ppo FIT=12GB", "evaluate TEMPERATURE=0", "plan VRAM_CAP=4GB", "reproduce SEED=3", "report SET=a.b=1"),
        *("budgets HW=4090", "test RECIPE=recipes/cpu-tiny/v1", "report REUSE=runs", "ab SET=a.b=1", "plan IMAGE=x"),
        *("plan FLASH_ATTN=1", "chat PRICE=3", "bench-gpu BASE=debian", "recipes HW=cpu", "lint SEED=1", "ppo IMAGE=x"),
    ],
)
def test_a_variable_without_effect_is_refused(words):
    assert f"{words.split()[1].partition('=')[0]} changes nothing " in refused(*words.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("ppo HW=4091", "--hw 4091"),
        ("setup HW=4091", "--hw 4091"),
        ("ppo RECIPE=cpu-tiny", "--recipe cpu-tiny"),
        ("ppo HW=cpu RECIPE=recipes/cpu-tiny/v1 STAGE=", "STAGE"),
        ("ppo RESUME=y", "RESUME=y"),
        ("ab SUMMARY=on", "SUMMARY=on"),
        ("image FLASH_ATTN=on", "FLASH_ATTN=on"),
        ("serve PORT=70000", "--port"),
        ("serve PORT=", "--port"),
        ("ppo SEED=x", "--seed"),
        ("ppo SEED=1' 2", "--seed"),
        ("ppo SEED=4294967296", "--seed"),
        ("ppo PRICE=cheap", "--price"),
        ("chat TEMPERATURE=-1", "--temperature"),
        ("ppo STOP_ON=nans", "--stop-on"),
        ("plan FIT=1.2.3GB", "12GB"),
        ("report OUT=", "--out"),
        ("chat STAGE=rm", "--stage"),
        ("ppo REPORT_TO=wandbb", "--report-to"),
        ("score FILES=none", "none: no such file"),
        ("data-check", "FILES"),
        ("judge URL=http://127.0.0.1:8000/v1", "--model"),
        ("chat RUN=docs", "docs: no run"),
        ("ppo RUNTIME=prod", "RUNTIME=prod"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_built(words, named):
    runtime = words.partition("RUNTIME=")[2] or "local"
    assert named in refused(*re.split(r" (?=[A-Za-z_-]+(?:=|$))", words), runtime=runtime)


def test_a_run_has_its_own_settings(tmp_path):
    run = tmp_path / "cpu-tiny/v2"
    write_records(run / "ppo", {})
    for name in ("HW=cpu", "SEED=1"):
        assert "leave out" in refused("chat", f"RUN={run}", name)


@pytest.mark.parametrize("card", ["1", "0,1", "GPU-1a2b", "MIG-3c"])
def test_a_card_may_be_chosen(card):
    check(["ppo"], given(f"GPU={card}"), "local")
    assert called("ppo", f"GPU={card}") == called("ppo"), "the environment names it"


@pytest.mark.parametrize("card", ["first", "-1", "1,", "cuda:1"])
def test_what_is_no_card_is_refused(card):
    assert f"GPU={card}: a card's number" in refused("ppo", f"GPU={card}")


def test_a_variable_that_one_of_the_targets_takes_is_accepted():
    check(["plan", "ppo"], given("HW=cpu", "SEED=3"), "local")
    check(["serve"], given("RESUME=1"), "local")
    check(["all"], given("STOP_ON=nan"), "local")
    check(["setup"], given("HW=4090", "REPORT_TO=wandb"), "docker")
    check(["bench-gpu"], given("VRAM_CAP=9GB"), "local")
    check(["shell"], given("HW=4090", "DATA=x", "IMAGE=i"), "docker")
    check(["test-image"], given("BASE=debian:trixie", "PIP_ARGS=-v"), "local")


def test_a_variable_of_the_environment_counts_only_where_a_target_takes_it():
    """Other programs have names such as STAGE and PORT too."""
    environment = {"STAGE": "prod", "PORT": "http", "FILES": "/none"}
    check(["recipes", "test", "lint", "budgets"], given(**environment), "local")
    assert "--stage" in refused("chat", **environment)


@pytest.mark.parametrize("target", [target for target in rules() if from_make.command_of(target)])
def test_a_variable_changes_nothing_where_it_is_refused(target):
    """All that a command is given comes from variables that `takes` says it takes."""
    values = {name: "1" for name in (*make_words.OPTION_NAMES, *from_make.OTHERS) if name not in ("RUN", "RECIPE")}
    taken = {name: value for name, value in values.items() if takes(target, name)}
    assert from_make.words_of(target, values) == from_make.words_of(target, taken)
    own = {name: value for name, value in taken.items() if name != "OUT"}  # whose default others change
    for name in own.keys() - {*from_make.ANYWHERE, *from_make.OF_CONTAINER, *from_make.OF_CARD}:
        others = {other: value for other, value in own.items() if other != name}
        first = any(takes(stage, name) for stage in rules()[target].prerequisites if stage in STAGES)
        assert first or from_make.words_of(target, others) != from_make.words_of(target, own), name


# ---- variables of a stage's own messages


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_names_as_next_is_accepted_with_its_variables(stage, files, tmp_path):
    own = f"DATA={files[0]}", "OUT=o", f"REUSE={tmp_path}", "SEED=1", "SET=ppo.steps=2", "PRICE=2", "RUNTIME=local"
    for words, _ in next_steps.steps(stage, recipe.load(ROOT / "recipes/cpu-tiny/v2").recipe):
        _, target, *typed = shlex.split(next_steps.make_line(words, ["HW=cpu", *own]))
        check([target], given(*typed), "local")


def test_messages_name_make_s_variables_under_make_alone(monkeypatch):
    text = "choose another --out, or --resume; `rlhf plan --hw cpu` and `rlhf run … --set a=1` help"
    assert make_words.with_make_words(text) == text
    assert make_words.settings(["a=1", "b=2"]) is None
    monkeypatch.setenv(make_words.STARTED, "")
    assert make_words.with_make_words(text) == f"{text} (make: --out is OUT=…, --resume is RESUME=1, --set is SET=…)"
    assert make_words.with_make_words("no option") == "no option"
    assert make_words.settings(["a=1", "b=2"]) == "SET='a=1 b=2'"
    assert make_words.settings(["a=1 2"]) is None and make_words.settings(["a='x'"]) is None


def test_each_option_of_the_table_is_one_of_a_command():
    known = {name for command in cli.commands.values() for p in command.params for name in p.opts}
    assert {*make_words.OPTION_NAMES.values()} <= known


# ---- the container


def test_a_container_runs_what_the_local_command_runs():
    typed = ("HW=4090", "SEED=3", "SET=ppo.steps=5 ppo.kl_coef=0.1", "RESUME=1")
    words = shown("ppo", *typed)
    assert words[words.index(IMAGE) + 1 :] == called("ppo", *typed)


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_sees_the_paths_that_variables_name(engine, files, tmp_path):
    typed = f"DATA={files[0]}", "OUT=x", f"REUSE={tmp_path}", "WEIGHTS=random"
    words = shown("sft", "HW=4090", *typed, engine=engine)
    assert option(words, "--engine") == [engine] and "--gpu" in words
    assert option(words, "--read") == [str(files[0]), str(tmp_path)]
    assert option(words, "--write") == [str(ROOT / "x"), str(ROOT / "results")]
    assert "--gpu" not in shown("sft", "HW=cpu", gpu=False)


def test_a_container_of_a_run_sees_what_it_needs(tmp_path):
    run = tmp_path / "runs/cpu-tiny/v2"
    (tmp_path / "encoder").mkdir()
    settings = {"hardware": {"name": "4090", "device": "cuda"}, "evaluate": {"bertscore_model": f"{tmp_path}/encoder"}}
    write_records(run / "ppo", {"settings": settings})
    words = shown("merge", f"RUN={run}")
    assert str(tmp_path / "runs/cpu-tiny") in option(words, "--write")
    assert option(words, "--read") == [f"{tmp_path}/encoder"]


@pytest.mark.parametrize("target", ["bench", "bench-memory", "bench-ablation"])
def test_benchmarks_run_where_the_stages_run(target):
    words = shown(target, "HW=4090")
    assert option(words, "--entrypoint") == ["python"] and words[words.index(IMAGE) + 1] == "-m"
    assert str(ROOT / "results") in option(words, "--write"), "records land in the caller's folder"


def test_a_server_is_reached_from_outside_of_its_container():
    words = shown("serve", "HW=4090", "PORT=81")
    assert option(words[: words.index(IMAGE)], "--port") == ["81"] == option(words[words.index(IMAGE) :], "--port")
    assert words[-2:] == ["--host", "0.0.0.0"]
    assert option(shown("serve", "HW=4090"), "--port") == ["8000"]


def test_a_shell_sees_what_a_stage_sees():
    words = shown("shell", "HW=4090", "OUT=x", engine="local")
    assert words[-3:] == ["--entrypoint", "bash", IMAGE] and str(ROOT / "x") in words
    assert option(words, "--engine") == ["docker"]


def test_a_container_sees_the_folders_that_a_recipe_names(tmp_path):
    (tmp_path / "encoder").mkdir()
    own = shutil.copytree(ROOT / "recipes/4090-llama2-7b/v1", tmp_path / "own" / "v1")
    file = own / "recipe.yaml"
    file.write_text(
        file.read_text() + f"\n# {tmp_path}/own\nextra: {{folders: [{tmp_path}/absent, {tmp_path}/encoder]}}\n"
    )
    assert {f"{tmp_path}/encoder", str(own)} == {*option(shown("sft", f"RECIPE={own}"), "--read")}
    words = shown("sft", "HW=4090", f"SET=data.files=[{tmp_path}/encoder,{tmp_path}/own]")
    assert option(words, "--read") == [f"{tmp_path}/encoder", f"{tmp_path}/own"]


def test_a_container_sees_the_folders_of_the_recipe_that_rlhf_takes(tmp_path, monkeypatch):
    """Neither those of other recipes for the hardware nor those of a newer draft."""
    text = (ROOT / "recipes/cpu-tiny/v2/recipe.yaml").read_text()
    for name, version, line in (("a", 1, "default: false"), ("b", 9, ""), ("b", 10, ""), ("b", 11, "status: draft")):
        folder, encoder = tmp_path / "recipes" / name / f"v{version}", tmp_path / f"encoder-{name}{version}"
        folder.mkdir(parents=True)
        encoder.mkdir()
        changed = re.sub(rf"^{line.split()[0]}.*", line, text, flags=re.M) if line else text
        changed = changed.replace("\nevaluate:\n", f"\nevaluate:\n  bertscore_model: {encoder}\n")
        (folder / "recipe.yaml").write_text(changed)
    monkeypatch.setenv("RLHF_RECIPES", str(tmp_path / "recipes"))
    assert option(shown("sft", "HW=cpu"), "--read") == [f"{tmp_path}/encoder-b10", f"{tmp_path}/recipes"]
