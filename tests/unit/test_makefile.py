"""The front door: what `make` prints, and which commands each target runs."""

import functools
import http.server
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from bin import check_make, install
from bin.check_make import TARGETS, VARIABLES
from rlhf import __version__, recipe
from rlhf.cli import next_steps
from rlhf.commands.chat import CHAT_STAGES
from rlhf.errors import UserError
from rlhf.observe import tracking, watch
from tests.records import write_records

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

ROOT = Path(__file__).resolve().parents[2]
IMAGE = f"rlhf-one-gpu:{__version__}"
STAGES = ["pretrain", "sft", "rm", "ppo", "rloo", "grpo", "dpo", "evaluate", "merge"]
MAKEFILE = (ROOT / "Makefile").read_text()


def make(*arguments, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make in the checkout, with nothing handed down from a make or a shell that runs these tests.

    `variables` are those of make that stand in its environment.
    """
    handed_down = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", *VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in handed_down}
    command = ["make", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=60)


def calls(*arguments) -> list[list[str]]:
    """The arguments of each `rlhf` command that make would run, in order."""
    result = make("-n", *arguments)
    assert result.returncode == 0, result.stderr
    commands = [shlex.split(line) for line in result.stdout.splitlines() if "/bin/rlhf " in line]
    return [words for program, *words in commands if program == ".venv/bin/rlhf"]


def option(words: list[str], name: str) -> list[str]:
    """Each value that an option is given."""
    return [value for flag, value in pairwise(words) if flag == name]


# ---- help ----


@functools.cache
def help_all() -> str:
    """What `make help-all` prints, which is the same for every test."""
    return make("help-all").stdout


def test_help_is_what_make_alone_prints():
    assert make().stdout == make("help").stdout


@pytest.mark.parametrize("name", [*TARGETS, *VARIABLES])
def test_help_all_has_one_line_for_each_target_and_variable(name):
    lines = [line for line in help_all().splitlines() if re.match(rf"  {name} +\S", line)]
    assert len(lines) == 1
    assert len(lines[0]) <= 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("ppo", "FIT=12GB"),
            "FIT changes nothing in `make ppo`; it is for plan. First `make plan FIT=12GB`, then its SET=",
        ),
        (("evaluate", "TEMPERATURE=0"), "TEMPERATURE changes nothing in `make evaluate`; it is for chat."),
        (("plan", "VRAM_CAP=4GB"), "VRAM_CAP changes nothing in `make plan`"),
        (("reproduce", "SEED=3"), "SEED changes nothing in `make reproduce`"),
        (("report", "SET=nonsense.key=1"), "SET changes nothing in `make report`"),
        (("budgets", "HW=4090"), "HW changes nothing in `make budgets`; it is for setup pretrain sft and 25 more"),
        (("test", "RECIPE=recipes/cpu-tiny/v1"), "RECIPE changes nothing in `make test`"),
        (("report", "REUSE=runs"), "REUSE changes nothing in `make report`; it is for pretrain sft"),
        (("ab", "SET=ppo.steps=1"), "SET changes nothing in `make ab`"),
        (("plan", "FLASH_ATTN=1"), "FLASH_ATTN changes nothing in `make plan`"),
        (("setup", "VENV=a b"), "VENV=a b: give one word"),
        (("chat", "PRICE=3"), "PRICE changes nothing in `make chat`"),
        (("bench-gpu", "HW=4090", "FLASH_ATTN=1"), "FLASH_ATTN changes nothing in `make bench-gpu`"),
        (("bench-gpu", "HW=4090", "BASE=debian"), "BASE changes nothing in `make bench-gpu`"),
        (("ppo", "SEED=1'"), "SEED=1': one whole number"),
        (("ppo", "HW=.*"), "HW=.*: no recipe for such hardware"),
        (("ppo", "HW=$(touch x)"), "HW=$(touch x): no recipe for such hardware"),
    ],
)
def test_a_variable_without_effect_is_refused(arguments, message):
    result = make("-n", *arguments)
    assert result.returncode == 2 and message in result.stderr


def test_a_run_directory_is_enough(tmp_path):
    """It has recipe, root and settings, and its manifest says whether the recipe is for a CPU."""
    run = tmp_path / "cpu-tiny/v2"
    settings = {"hardware": {"name": "cpu", "device": "cpu"}}
    write_records(run / "ppo", {"settings": settings})
    targets = {"chat": "", "evaluate": "", "merge": "", "serve": "", "report": "", "ab": ""}
    targets |= {"score": "FILES=Makefile", "judge": "URL=u MODEL=m"}
    for folder in (run, run / "ppo"):
        for target, others in targets.items():
            line = make("-n", target, f"RUN={folder}", *others.split()).stdout.splitlines()[-1]
            assert f"'{folder}'" in line and not {"--out", "--hw", "bin/in-container"} & {*line.split()}
    for variable in ("HW=cpu", "OUT=runs", "SEED=1", "RECIPE=recipes/cpu-tiny/v1"):
        refused = make("-n", "chat", f"RUN={run}", variable).stderr
        assert f"{variable}: RUN={run} has the settings that it was made with; leave " in refused
    assert "RUN=docs: no run there" in make("-n", "chat", "RUN=docs").stderr
    write_records(run / "ppo", {"settings": {"hardware": {"name": "4090", "device": "cuda"}}})
    assert f"--write '{tmp_path / 'cpu-tiny'}'" in make("-n", "merge", f"RUN={run}").stdout


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_names_as_next_is_accepted_with_its_variables(stage, files):
    own = f"DATA={files[0]}", "OUT=o", "REUSE=runs", "SEED=1", "SET=ppo.steps=2", "PRICE=2", "RUNTIME=local"
    for words, _ in next_steps.steps(stage, recipe.load(ROOT / "recipes/cpu-tiny/v2").recipe):
        line = next_steps.make_line(words, ["HW=cpu", *own])
        result = make("-n", *shlex.split(line)[1:])
        assert result.returncode == 0, result.stderr


def test_a_variable_that_one_of_the_targets_reads_is_accepted():
    assert make("-n", "plan", "ppo", "HW=cpu", "SEED=3").returncode == 0


def test_help_is_the_part_of_it_that_people_use_most():
    some, everything = make("help").stdout, help_all().splitlines()
    shown = [line for line in some.splitlines() if re.match(r"  [\w-]+ +\S", line)]
    targets = [line for line in shown if line[2].islower()]
    assert len(targets) == 15 and len(shown) == 27
    assert [line for line in some.splitlines() if line.startswith("Variables")] == ["Variables [default]"]
    assert set(shown) <= set(everything)
    assert {"setup", "plan", "ppo", "report", "help-all"} <= {line.split()[0] for line in targets}
    assert {"fetch", "data-check", "all", "PRICE", "PIP_ARGS"} <= {line.split()[0] for line in shown}


def test_variables_are_listed_below_what_they_are_for():
    headings: dict[str, str] = {}
    for block in help_all().split("\n\n"):
        heading, *lines = block.splitlines()
        headings |= {line.split()[0]: heading.partition(": ")[2] for line in lines if line[2:3].isupper()}
    assert set(headings) == set(VARIABLES) and "" not in headings.values()
    assert headings["HW"] == "what to run" and headings["RESUME"] == "train" and headings["URL"] == "use a finished run"
    assert max(list(headings.values()).count(heading) for heading in headings.values()) <= 11


def test_columns_of_the_help_are_straight():
    lines = help_all().splitlines()
    assert lines[0].startswith("Usage: make TARGET")
    for first in ("[a-z-]", "[A-Z_]"):
        rows = [row for line in lines if (row := re.match(rf"  {first}+  +", line))]
        assert len(rows) > 30 and len({row.end() for row in rows}) == 1
    assert not [line for line in lines if re.match(r"  \S+ \S", line)], "two spaces between a name and its text"


def test_the_variables_people_use_are_there():
    promised = "HW RECIPE DATA OUT SEED SEEDS SET RESUME REPORT_TO PYTHON VENV PIP_ARGS"
    assert set(promised.split()) <= set(VARIABLES)


# ---- the stages ----


def test_ppo_runs_the_stages_before_it_first():
    assert calls("ppo", "HW=cpu") == [["run", "ppo", "--with-parents", "--hw", "cpu", "--out", "runs"]]


@pytest.mark.parametrize("jobs", ["-j1", "-j8"])
def test_all_runs_every_kind_of_result_in_order(jobs):
    runs = calls("all", jobs)
    assert [words[1] for words in runs] == ["ppo", "rloo", "grpo", "dpo", "evaluate", "merge"]
    assert all("--with-parents" in words for words in runs)


def test_all_asks_for_no_stage_in_particular():
    assert all("--if-needed" in words for words in calls("all"))


def test_hardware_is_cpu_unless_given():
    assert calls("ppo") == calls("ppo", "HW=cpu")
    assert {value for words in calls("ppo", "HW=4090", "RUNTIME=local") for value in option(words, "--hw")} == {"4090"}


def test_recipe_is_used_instead_of_hardware():
    (words,) = calls("ppo", "RECIPE=recipes/cpu-tiny/v1")
    assert option(words, "--recipe") == ["recipes/cpu-tiny/v1"]
    assert "--hw" not in words


def test_every_stage_gets_the_same_options():
    for words in calls("ppo", "SEED=3", "SET=ppo.steps=2 sft.lr=[1,2]", "RESUME=1", "REPORT_TO=tensorboard"):
        assert option(words, "--seed") == ["3"]
        assert option(words, "--set") == ["ppo.steps=2", "sft.lr=[1,2]"]
        assert option(words, "--report-to") == ["tensorboard"]
        assert "--resume" in words


@pytest.mark.parametrize(
    ("value", "on"),
    [("", False), ("0", False), ("no", False), ("false", False), ("1", True), ("yes", True), ("true", True)],
)
def test_switches_are_on_or_off(value, on):
    assert ("--resume" in calls("pretrain", f"RESUME={value}")[0]) == on
    assert ("--summary" in calls("ab", f"SUMMARY={value}")[0]) == on


@pytest.mark.parametrize(
    ("value", "trackers"),
    [("", []), ("none", []), ("wandb", ["wandb"]), ("tensorboard trackio", ["tensorboard", "trackio"])],
)
def test_metrics_go_elsewhere_only_when_asked(value, trackers):
    assert option(calls("pretrain", f"REPORT_TO={value}")[0], "--report-to") == trackers


def test_reproduce_is_one_call():
    assert calls("reproduce") == [["reproduce", "--hw", "cpu", "--seeds", "0 1 2", "--out", "runs"]]
    (words,) = calls("reproduce", "SEEDS=5 6", "RECIPE=recipes/cpu-tiny/v1", "OUT=elsewhere")
    assert words == ["reproduce", "--recipe", "recipes/cpu-tiny/v1", "--seeds", "5 6", "--out", "elsewhere"]


@pytest.mark.parametrize("target", ["pretrain", "reproduce", "report", "plan"])
def test_a_price_reaches_every_table_that_can_show_a_cost(target):
    assert option(calls(target, "PRICE=1.99")[-1], "--price") == ["1.99"]
    assert "--price" not in calls(target)[-1]


@pytest.mark.parametrize("limit", ["12GB", "card"])
def test_a_limit_reaches_the_plan_as_it_is_written(limit):
    assert calls("plan", f"FIT={limit}") == [["plan", "--hw", "cpu", "--fit", limit]]


def test_ratings_are_of_the_recipe_s_run():
    (words,) = calls("ab", "SEED=3", "AB_ARGS=--a sft --b dpo")
    assert words == ["ab", "--hw", "cpu", "--out", "runs/seed-3", "--a", "sft", "--b", "dpo"]
    assert calls("ab", "HW=4090", "SUMMARY=1") == [["ab", "--hw", "4090", "--out", "runs", "--summary"]]
    (words,) = calls("judge", "URL=http://127.0.0.1:8000/v1", "MODEL=some/model", "AB_ARGS=--limit 5")
    assert words[3:5] == ["--out", "runs"]
    assert words[5:] == ["--url", "http://127.0.0.1:8000/v1", "--model", "some/model", "--limit", "5"]


# ---- data and the root of the run directories ----


@pytest.fixture
def files(tmp_path) -> list[Path]:
    paths = [tmp_path / "pairs.v1.jsonl.gz", tmp_path / "more(1).jsonl"]
    for path in paths:
        path.touch()
    return paths


@pytest.mark.parametrize(
    ("arguments", "root"),
    [
        ("", "runs"),
        ("SEED=7", "runs/seed-7"),
        ("DATA={0}", "runs/data-pairs.v1"),
        ("DATA={0} SEED=7", "runs/data-pairs.v1/seed-7"),
        ("OUT=mine", "mine"),
        ("DATA={0} SEED=7 OUT=mine", "mine"),
    ],
)
def test_other_data_or_another_seed_have_their_own_root(arguments, root, files):
    for words in calls("sft", *arguments.format(*files).split()):
        assert option(words, "--out") == [root]


def test_a_plan_takes_data(files):
    (words,) = calls("plan", "HW=4090", f"DATA={files[0]} {files[1]}", "PRICE=2")
    assert words == ["plan", "--hw", "4090", "--data", str(files[0]), "--data", str(files[1]), "--price", "2"]


def test_data_takes_several_files(files):
    for words in calls("sft", "DATA=" + " ".join(map(str, files))):
        assert option(words, "--data") == [str(path) for path in files]


def test_data_takes_a_pattern(files):
    (words, *_) = calls("sft", f"DATA={files[0].parent}/*.jsonl")
    assert option(words, "--data") == [str(files[1])]
    assert option(words, "--out") == ["runs/data-more(1)"]


def test_missing_data_stops_at_once(tmp_path):
    result = make("-n", "sft", f"DATA={tmp_path}/my pairs.jsonl")
    assert result.returncode != 0
    assert f"DATA='{tmp_path}/my': no such file" in result.stderr
    assert "spaces" in result.stderr
    assert not result.stdout


def test_a_message_about_a_missing_file_ends_with_one_full_stop(tmp_path):
    assert "no such file.  Stop." in make("-n", "sft", f"DATA={tmp_path}/none.jsonl").stderr


def test_hardware_in_another_case_is_answered_with_what_was_meant():
    assert "Did you mean cpu? `make recipes` lists them" in make("-n", "ppo", "HW=CPU").stderr
    assert "Did you mean" not in make("-n", "ppo", "HW=foo").stderr


def test_the_name_of_a_hub_set_is_answered_with_how_it_is_named():
    result = make("-n", "sft", "DATA=some/set")
    assert result.returncode
    assert 'SET="data.source=hub data.name=some/set data.revision=COMMIT"' in result.stderr


@pytest.mark.parametrize("target", ["data-check", "data-show"])
def test_of_data_that_is_missing_the_command_that_looks_at_it_is_named(target):
    message = make("-n", target, "DATA=a/b c.jsonl").stderr
    assert f"use `rlhf {target.replace('-', ' ')}`" in message and "SET=" not in message


@pytest.mark.parametrize("path", ["/tmp/none", "./none", "none", "some/set.jsonl", "some/set.csv.gz", "a/b/c"])
def test_a_path_is_not_taken_for_the_name_of_a_hub_set(path):
    result = make("-n", "data-check", f"DATA={path}")
    assert f"DATA='{path}': no such file" in result.stderr
    assert "hub" not in result.stderr


def test_data_check(files):
    assert calls("data-check", f"DATA={files[0]} {files[1]}") == [["data", "check", *map(str, files)]]
    (words,) = calls("data-check", f"DATA={files[0]}", "CHECK_ARGS=--heldout test.jsonl")
    assert words == ["data", "check", "--heldout", "test.jsonl", str(files[0])]
    assert "needs DATA=" in make("-n", "data-check").stderr


def test_data_show(files):
    assert calls("data-show", f"DATA={files[0]}", "SHOW_ARGS=--rows 2") == [
        ["data", "show", "--rows", "2", str(files[0])]
    ]
    assert "needs DATA=" in make("-n", "data-show").stderr


def test_a_path_in_the_home_folder_is_expanded_whatever_the_shell():
    """`make OUT=~/runs` in bash, in dash and in quotes."""
    (words,) = calls("pretrain", "HW=cpu", "OUT=~/runs", "REUSE=~/others")
    home = os.environ["HOME"]
    assert option(words, "--out") == [f"{home}/runs"] and option(words, "--reuse") == [f"{home}/others"]


def test_the_image_s_test_has_its_base_and_what_pip_is_told(tmp_path):
    """It reads both from its environment; in a copy of the Makefile with another script in its place."""
    for name in ("Makefile", "pyproject.toml", "bin/check_make.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    script = tmp_path / "tests/image/test.sh"
    script.parent.mkdir(parents=True)
    script.write_text('#!/bin/bash\necho "base $BASE, pip $PIP_ARGS"\n')
    script.chmod(0o755)
    command = ["make", "-o", "setup", "test-image", "BASE=debian:trixie", "PIP_ARGS=--index-url 'x y'"]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "base debian:trixie, pip --index-url 'x y'" in done.stdout.splitlines(), done.stderr


def test_score_takes_a_prompt_with_any_quotes_or_files(files, tmp_path):
    (words,) = calls("score", "HW=cpu", f"FILES={files[0]} {files[1]}", "SCORE_ARGS=--to s.jsonl")
    assert words == ["score", "--hw", "cpu", "--out", "runs", *map(str, files[:2]), "--to", "s.jsonl"]
    program = tmp_path / "bin" / "rlhf"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    prompt, response = 'Why, "it" isn\'t $5, $HOME or $(x)?', "It's 2 + `2`, $$."
    result = make("score", "HW=cpu", f"PROMPT={prompt}", f"VENV={tmp_path}", "-o", "setup", RESPONSE=response)
    assert result.stdout.splitlines()[-4:] == ["--prompt", prompt, "--response", response], result.stderr


def test_a_dollar_is_no_name_of_make():
    for value in ("data.name=$x", "data.name=$(HW)$$"):
        assert option(calls("sft", f"SET={value}")[-1], "--set") == [value]
    assert option(calls("sft", "OUT=$HOME/x")[-1], "--out") == ["$HOME/x"]


def test_data_check_fails_where_the_check_does(files, tmp_path):
    """With the exit code that a stand-in for the command gives, which make prints."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rlhf").write_text("#!/bin/bash\nexit 3\n")
    (tmp_path / "bin/rlhf").chmod(0o755)
    installed = tmp_path / ".ready-gpu,math,report,serve,tracking"
    result = make("data-check", f"DATA={files[0]}", f"VENV={tmp_path}", "-o", installed)
    assert result.returncode and "data-check] Error 3" in result.stderr


# ---- targets ----


@pytest.mark.parametrize("name", ["pop", "tests", "rlhf"])
def test_unknown_target_is_an_error_even_where_a_folder_has_its_name(name):
    result = make("-n", name)
    assert result.returncode != 0
    assert f"no target '{name}'" in result.stderr


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("pppo", "Did you mean ppo? "),
        ("SFT", "Did you mean sft? "),
        ("bench-peers", "Did you mean one of: bench-peer bench-gpu bench-memory? "),
        ("x", ""),
        ("x';ls;'", ""),
    ],
)
def test_the_targets_that_are_spelt_alike_are_named(word, meant):
    assert f"no target '{word}'. {meant}`make help-all` lists them" in make("-n", word).stderr


@pytest.mark.parametrize(("word", "meant"), [("train", "one of: pretrain sft rm ppo "), ("install", "setup? ")])
def test_the_targets_that_another_word_may_mean_are_named(word, meant):
    assert f"no target '{word}'. Did you mean {meant}" in make("-n", word).stderr


@pytest.mark.parametrize("target", TARGETS)
def test_no_target_is_taken_for_a_file_of_that_name(target, files):
    needed = {
        "judge": ("URL=http://127.0.0.1:8000/v1", "MODEL=some/model"),
        "score": ("PROMPT=a", "RESPONSE=b"),
        "data-check": (f"DATA={files[0]}",),
        "data-show": (f"DATA={files[0]}",),
    }
    result = make("-n", target, *needed.get(target, ()))
    assert result.returncode == 0, result.stderr
    assert "Nothing to be done" not in result.stdout or target == "setup"


# ---- setup, with a stand-in for Python, pip and rlhf ----


@pytest.fixture
def fake(tmp_path):
    """An interpreter of Python 3.12, as far as make can see; all programs write their arguments to `log`."""
    bin_ = tmp_path / "tools"
    bin_.mkdir()
    tool = bin_ / "tool"
    tool.write_text(
        "#!/usr/bin/env bash\n"
        f'echo "$(basename "$0") $*" >>{tmp_path}/log\n'
        'case "$*" in\n'
        "--version) echo Python 3.12.1 ;;\n"
        f'"bin/check_make.py "*|"bin/install.py "*) exec {sys.executable} "$@" ;;\n'
        '"-m venv "*) mkdir -p "$3/bin" && for name in pip python rlhf; do cp "$0" "$3/bin/$name"; done ;;\n'
        '"run rm "*) exit 3 ;;\n'
        "esac\n"
    )
    tool.chmod(0o755)
    (tmp_path / "log").touch()
    return tmp_path


def log(folder: Path) -> list[str]:
    lines = (folder / "log").read_text().splitlines()
    (folder / "log").write_text("")
    own = ("bin/check_make.py", "bin/install.py")  # what every make runs first, and what runs pip
    return [line for line in lines if not any(program in line.split()[:2] for program in own)]


def test_setup_installs_the_pinned_package_once(fake):
    variables = [f"PYTHON={fake}/tools/tool", f"VENV={fake}/venv"]
    result = make("setup", *variables)
    assert result.returncode == 0, result.stderr
    assert "pip install -c requirements/cpu.txt -e .[gpu,math,report,serve,tracking]" in log(fake)
    assert result.stdout.splitlines()[-1] == f"setup: `source {fake}/venv/bin/activate` puts rlhf on your path"
    again = make("setup", *variables)
    assert again.returncode == 0
    assert log(fake) == []

    assert make("setup", *variables, "HW=4090").returncode == 0 and log(fake) == [], "the same for a card"
    assert make("setup", *variables, "REPORT_TO=wandb", "PIP_ARGS=--no-cache-dir").returncode == 0
    assert "pip install --no-cache-dir -c requirements/cpu.txt -e .[gpu,math,report,serve,tracking,wandb]" in log(fake)


@pytest.mark.parametrize("target", ["test", "test-image", "fuzz", "lint", "bench-micro", "bench-gpu"])
def test_what_developers_need_is_installed_for_their_targets_alone(target, fake):
    variables = [f"PYTHON={fake}/tools/tool", f"VENV={fake}/venv"]
    assert make("ppo", *variables).returncode == 0
    assert ["dev" in line for line in log(fake) if line.startswith("pip")] == [False]
    assert "-e '.[gpu,math,report,serve,tracking,dev]'" in make("-n", target, *variables).stdout


@pytest.mark.parametrize("target", ["bench-gpu", "test", "setup", "ppo", "plan"])
def test_a_target_installs_nothing_when_all_that_it_needs_is_installed(target, fake):
    variables = [f"PYTHON={fake}/tools/tool", f"VENV={fake}/venv"]
    assert make("setup", "lint", "-o", "lint", *variables, "HW=4090").returncode == 0
    log(fake)
    assert make(target, *variables).returncode == 0
    assert not [line for line in log(fake) if line.startswith("pip")]

    (stamp,) = (fake / "venv").glob(".ready-*")
    os.utime(stamp, (0, 0))
    assert make(target, *variables).returncode == 0
    assert [line for line in log(fake) if line.startswith("pip")], "older than its pins"


def test_what_was_installed_at_several_times_counts_together(fake):
    variables = [f"PYTHON={fake}/tools/tool", f"VENV={fake}/venv"]
    for extras in ("gpu,math", "tracking,report,serve"):
        assert make("setup", *variables, f"EXTRAS={extras}").returncode == 0
    log(fake)
    assert make("setup", *variables, "HW=4090").returncode == 0
    assert log(fake) == []
    assert make("plan", *variables, "HW=4090").returncode == 0
    assert [line.split()[0] for line in log(fake)] == ["rlhf"]
    assert make("setup", *variables, "REPORT_TO=trackio").returncode == 0
    assert "pip install -c requirements/cpu.txt -e .[gpu,math,report,serve,tracking,trackio]" in log(fake)


@pytest.mark.parametrize("target", ["plan", "recipes", "report", "ab", "judge", "data-check", "data-show"])
def test_commands_without_a_gpu_use_the_environment_that_is_there(target, fake, files):
    data = [] if target in ("plan", "recipes") else [f"DATA={files[0]}"]
    data += ["URL=http://127.0.0.1:9/v1", "MODEL=m"] if target == "judge" else []
    hardware = ["HW=4090"] if target in ("plan", "report", "ab", "judge") else []
    variables = [f"PYTHON={fake}/tools/tool", f"VENV={fake}/venv", *hardware, *data]
    assert make(target, *variables).returncode == 0
    assert "pip install -c requirements/cpu.txt -e .[gpu,math,report,serve,tracking]" in log(fake)

    shutil.rmtree(fake / "venv")
    assert make("setup", *variables[:2]).returncode == 0
    log(fake)
    assert make(target, *variables).returncode == 0
    assert [line.split()[0] for line in log(fake)] == ["rlhf"]

    (stamp,) = (fake / "venv").glob(".ready-*")
    os.utime(stamp, (0, 0))
    assert make(target, *variables).returncode == 0
    again = "pip install -c requirements/cpu.txt -e .[gpu,math,report,serve,tracking]"
    assert again in log(fake), "older than its pins"


def test_a_failing_stage_stops_the_chain(fake):
    result = make("sft", "rm", "ppo", f"PYTHON={fake}/tools/tool", f"VENV={fake}/venv")
    assert result.returncode != 0
    stages = [line.split()[2] for line in log(fake) if line.startswith("rlhf run")]
    assert stages == ["sft", "rm"]


def test_failing_pip_leaves_setup_undone(fake):
    variables = [f"PYTHON={fake}/tools/tool", f"VENV={fake}/venv"]
    (fake / "venv" / "bin").mkdir(parents=True)
    pip = fake / "venv" / "bin" / "pip"
    pip.write_text("#!/usr/bin/env bash\necho no space left >&2; exit 1\n")
    pip.chmod(0o755)
    shutil.copy(fake / "tools/tool", fake / "venv/bin/python")
    result = make("setup", *variables)
    assert result.returncode != 0 and "no space left" in result.stderr
    assert make("-q", "setup", *variables).returncode != 0


@pytest.fixture
def mute() -> Iterator[str]:
    """The URL of an index that takes a connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"


@pytest.fixture
def refusing() -> Iterator[str]:
    """The URL of an index that answers each request with an error of HTTP."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()
    server.server_close()


def test_an_index_that_does_not_answer_is_named_before_pip_asks_it(fake, mute):
    variables = [f"PYTHON={fake}/tools/tool", f"VENV={fake}/venv"]
    started = time.monotonic()
    result = make("setup", *variables, f"PIP_ARGS=--extra-index-url {mute}")
    assert time.monotonic() - started < 15
    assert result.returncode and f"setup: the index {mute} in PIP_ARGS does not answer" in result.stderr
    assert "leave it out of PIP_ARGS" in result.stderr
    assert not [line for line in log(fake) if line.startswith("pip")]
    assert make("setup", *variables).returncode == 0, "without it"


def test_an_index_that_answers_at_all_is_pip_s_to_judge(refusing):
    assert not install.silent([refusing])
    assert list(install.silent(["http://127.0.0.1:9/simple"])) == ["http://127.0.0.1:9/simple"]


def test_the_indexes_are_those_of_the_arguments():
    words = ["pip", "install", "--extra-index-url=http://a", "-i", "https://b", "--find-links", "http://c", "-e", "."]
    assert install.indexes(words) == ["https://b", "http://a"]
    assert install.indexes([*words, "--index-url", "file:///d"]) == ["https://b", "http://a"]
    assert not install.indexes([*words, "--proxy", "http://p"])
    assert install.indexes(["-i", "https://name:secret@host/simple"]) == ["https://host/simple"]


def test_setup_is_never_silent_for_long(monkeypatch, capsys):
    monkeypatch.setattr(install, "EVERY", 0.2)
    lines = "Collecting a\n  Downloading a.whl (1.5 MB)\n  Downloading b.whl (9 kB)\nInstalling collected packages: a"
    assert install.run(["bash", "-c", f'echo "{lines}"; sleep 0.7; exit 4']) == 4
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["  Downloading a.whl (1.5 MB)", "  Unpacking"]
    assert 2 <= len(printed[2:]) <= 4 and all(re.fullmatch(r"  still at work, \d+ s", line) for line in printed[2:])


def test_setup_speaks_at_least_every_20_seconds():
    assert install.EVERY < 20


@pytest.mark.parametrize("python", ["{}/old", "{}/absent"])
def test_python_too_old_or_missing_is_one_line(python, tmp_path):
    old = tmp_path / "old"
    old.write_text("#!/usr/bin/env bash\nexit 1\n")
    old.chmod(0o755)
    result = make("setup", f"PYTHON={python.format(tmp_path)}", f"VENV={tmp_path}/venv")
    assert result.returncode != 0
    ours = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(ours) == 1
    assert "needs Python 3.11, 3.12 or 3.13" in ours[0]
    assert make("help", f"PYTHON={python.format(tmp_path)}", f"VENV={tmp_path}/venv").stdout == make("help").stdout
    assert not (tmp_path / "venv").exists()


# ---- which target reads which variable ----

SOME_VALUES = [
    *("HW=4090", "RECIPE=recipes/cpu-tiny/v1", "WEIGHTS=random", "SET=seed=1", "SEED=3", "SEEDS=5", "OUT=o", "REUSE=r"),
    *(
        "RESUME=1",
        "STOP_ON=nan",
        "REPORT_TO=wandb",
        "FIT=9GB",
        "PRICE=2",
        "VRAM_CAP=9GB",
        "GPU=1",
        "CHECK_ARGS=--x",
        "SHOW_ARGS=--x",
    ),
    *(
        "BENCH_ARGS=--x",
        "STAGE=sft",
        "TEMPERATURE=0.5",
        "PORT=81",
        "SCORE_ARGS=--x",
        "AB_ARGS=--x",
        "SUMMARY=1",
        "URL=http://x",
    ),
    *("MODEL=m", "TEST_ARGS=-x", "CASES=5", "KILLS=5", "ONLY=kills", "BASE=b", "FLASH_ATTN=1", "RUNTIME=podman"),
]


@pytest.fixture(scope="module")
def everything_installed(tmp_path_factory) -> str:
    """VENV=, where make has nothing to install."""
    venv = tmp_path_factory.mktemp("venv")
    (venv / ".ready-gpu,math,report,serve,tracking,wandb,trackio,dev,docs").touch()
    return f"VENV={venv}"


@pytest.mark.parametrize("variable", SOME_VALUES)
def test_a_variable_changes_nothing_in_targets_that_are_said_not_to_read_it(variable, everything_installed, files):
    """It is refused there on the command line, not in the environment: all other targets run the same as without it."""
    name, _, value = variable.partition("=")
    needed = {"URL": "http://y", "MODEL": "n", "PROMPT": "a", "RESPONSE": "b", "DATA": str(files[0])}
    others = [target for target in TARGETS if target not in check_make.READ_BY[name]]
    plain, changed = (make("-n", everything_installed, *others, **needed | own) for own in ({}, {name: value}))
    assert plain.returncode == 0, plain.stderr
    assert changed.stdout == plain.stdout


# ---- the container ----


def containers(*arguments) -> list[list[str]]:
    """The words of each `docker run` or `podman run` that make would start, in order."""
    result = make("-n", *arguments)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("bin/in-container ")]
    return [printed(*shlex.split(line)[1:]) for line in lines]


def printed(*words: str) -> list[str]:
    """The words of the engine's command that bin/in-container would run."""
    command = [str(ROOT / "bin/in-container"), "--print", *words]
    return shlex.split(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout)


def test_recipes_for_a_gpu_run_in_a_container_and_those_for_a_cpu_do_not():
    for where in ("HW=cpu", "RECIPE=recipes/cpu-tiny/v1", "HW=2xcpu", "RECIPE=recipes/2xcpu-tiny/v1/"):
        assert containers("ppo", where) == []
    for where in ("HW=4090", "HW=h100", "RECIPE=recipes/4090-llama2-7b/v1"):
        assert [words[0] for words in containers("ppo", where)] == ["docker"]
        assert containers("ppo", where, "RUNTIME=local") == []
    assert [words[0] for words in containers("sft", "HW=cpu", "RUNTIME=podman")] == ["podman"]


def test_the_recipe_s_device_decides_and_not_a_folder_s_name(tmp_path):
    for name, hardware, expected in (
        ("cpu01", 'hardware:\n  name: "4090"  # a card\n  device: cuda\n', 1),
        ("mine", "hardware:\n  name: laptop\n  device: cpu\n", 0),
        ("flow", "hardware: {name: cpu-like, device: cuda, memory_gb: 24}\n", 1),
    ):
        folder = tmp_path / name / "v1"
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(f"status: draft\nmodel:\n  device: none\n{hardware}data:\n  name: x\n")
        assert len(containers("sft", f"RECIPE={folder}")) == expected, name
    assert containers("sft", "HW=4090", "SET=hardware.device=cpu sft.max_steps=1") == []


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (
            "hw=4090",
            "there is no variable 'hw'. A recipe's key is set with SET=\"ppo.steps=10\". Did you mean HW? `make help-",
        ),
        (
            "FTI=12GB",
            "there is no variable 'FTI'. A recipe's key is set with SET=\"ppo.steps=10\". Did you mean FIT? `make help",
        ),
        ("STEPS=10", "there is no variable 'STEPS'. A recipe's key is set with SET=\"ppo.steps=10\". Did you mean"),
        (
            "x=1",
            "there is no variable 'x'. A recipe's key is set with SET=\"ppo.steps=10\". `make help-all` lists them",
        ),
        (
            "HW=4091",
            "2x4090, 2xcpu, 4090, 8gb, 8xh100, cpu, h100. Did you mean 4090? `make recipes` lists them",
        ),
        ("RECIPE=cpu-tiny", "RECIPE=cpu-tiny: no recipe.yaml there"),
        ("RECIPE=recipes/cpu-tyni/v2", "name the folder of a version, such as recipes/cpu-tiny/v2 or "),
        ("RECIPE=recipes/cpu-tiny", "name the folder of a version, such as recipes/cpu-tiny/v2."),
        ("HW=cpu RECIPE=recipes/cpu-tiny/v1", "both choose a recipe; leave one of them out"),
        ("RESUME=y", "RESUME=y: write 1 or 0"),
        ("ab SUMMARY=on", "SUMMARY=on: write 1 or 0"),
        ("RECIPE=recipes/cpu-tiny", "the folder of a version, such as recipes/cpu-tiny/v2.  Stop"),
        ("serve PORT=abc", "PORT=abc: a whole number from 1 to 65535"),
        ("serve PORT=70000", "PORT=70000: a whole number from 1 to 65535"),
        ("serve PORT=", "PORT=: a whole number"),
        ("SEED=x", "SEED=x: one whole number; several are SEEDS="),
        ("PRICE=cheap", "PRICE=cheap: a number, 0 or more"),
        ("chat TEMPERATURE=-1", "TEMPERATURE=-1: a number, 0 or more"),
        ("image FLASH_ATTN=on", "FLASH_ATTN=on: write 1 or 0"),
        ("fuzz KILLS=many", "KILLS=many: a whole number"),
        ("fuzz CASES=1.5", "CASES=1.5: a whole number"),
        ("STOP_ON=nans", "STOP_ON=nans: nan, flat_loss, "),
        ("reproduce SEEDS=1,x", "SEEDS=1,x: whole numbers, for example"),
        ("judge=x", "there is no variable 'judge'"),
        ("it's=x", "there is no variable 'it's'"),
        ("RESUME=TRUE", "RESUME=TRUE: write 1 or 0"),
        ("plan FIT=1.2.3GB", "FIT=1.2.3GB: a size such as 12GB, or card"),
        ("report OUT=", "OUT is empty: give it a value"),
        ("SET=[1,", "SET: '[1,' is no KEY=VALUE"),
        ("SEED=4294967296", "SEED=4294967296: seeds are below 2^32"),
        ("WEIGHTS=none", "WEIGHTS=none: no such folder; a checkpoint's folder, or random"),
        ("DATA=rlhf", "DATA='rlhf' is a folder; name its files, for example 'rlhf/*.jsonl'"),
        ("IMAGE=mine", "IMAGE changes nothing without a container (RUNTIME=local)"),
        ("chat STAGE=rm", "STAGE=rm: base, sft, ppo"),
        ("REPORT_TO=wandbb", "REPORT_TO=wandbb: tensorboard, trackio, wandb or none"),
        ("score", "score needs PROMPT="),
        ("score PROMPT=a", "score needs PROMPT="),
        ("judge", "judge needs URL=http://HOST:PORT/v1 and MODEL=NAME"),
        ("judge URL=http://127.0.0.1:8000/v1", "judge needs URL=http://HOST:PORT/v1 and MODEL=NAME"),
    ],
)
def test_what_make_would_ignore_is_refused_before_anything_is_built(variable, expected):
    result = make("-n", "ppo", *variable.split())
    assert result.returncode and not result.stdout
    assert expected in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("ppo", "OUT=it's"), "OUT: an apostrophe cannot pass through make; use `rlhf` itself"),
        (("ppo", "SET=a='b'"), "SET: an apostrophe"),
        (("chat", "STAGE=sft dpo"), "STAGE=sft dpo: give one word"),
        (("ppo", "RUNTIME=local docker"), "RUNTIME=local docker: give one word"),
        (("ppo", "WEIGHTS=/x/my model"), "WEIGHTS=/x/my model: give one word"),
        (("sft", "HW=4090", "OUT=my runs"), "OUT=my runs: no spaces, which cannot pass into a container"),
        (("sft", "HW=4090", "REUSE=my runs"), "REUSE=my runs: no spaces, which cannot pass into a container"),
        (("ppo", "RECIPE=my recipes/v1"), "a folder whose name has spaces goes to `rlhf` itself"),
        (("score", "FILES=no file"), "FILES='no': no such file. A name with spaces cannot pass through make"),
        (("ppo", "SEED=1 2"), "SEED=1 2: one whole number"),
    ],
)
def test_values_that_cannot_pass_through_make_are_named(arguments, expected):
    result = make("-n", *arguments)
    assert result.returncode and not result.stdout
    assert expected in result.stderr and result.stderr.count("\n") == 1


def test_a_variable_of_the_environment_counts_only_where_a_target_reads_it():
    """Other programs have names such as STAGE and PORT too."""

    def run(target: str) -> str:
        other = {"DATA": "/none", "FILES": "/none", "MODEL": "gpt'4"}
        return make("-n", target, STAGE="prod", PORT="http", KILLS="many", **other).stderr

    assert run("help") == run("test") == ""
    assert "STAGE=prod (from the environment): base, sft" in run("chat")
    assert "KILLS=many (from the environment): a whole number" in run("fuzz")
    assert "MODEL: an apostrophe" in run("judge")
    assert "DATA='/none' (from the environment): no such file" in make("-n", "sft", DATA="/none").stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"HW": "foo"}, "HW=foo (from the environment): no recipe for such hardware, only for 12gb"),
        ({"RECIPE": "nowhere"}, "RECIPE=nowhere (from the environment): no recipe.yaml there"),
        ({"RUNTIME": "prod"}, "RUNTIME=prod (from the environment): docker, podman or local"),
        ({"RLHF_RECIPES": "docs"}, "docs: no recipes there. RLHF_RECIPES names their folder"),
    ],
)
def test_a_recipe_or_a_runtime_that_is_not_there_stops_what_needs_it_and_nothing_else(given, message):
    result = make("-n", "help", "help-all", "recipes", "lint", "test", "clean", **given)
    assert result.returncode == 0, result.stderr
    assert message in make("-n", "ppo", **given).stderr


@pytest.mark.parametrize(("given", "expected"), [((), "24GB"), (("VRAM_CAP=12GB",), "12GB"), (("VRAM_CAP=",), "24GB")])
def test_a_memory_cap_of_the_environment_is_kept(monkeypatch, given, expected):
    monkeypatch.setenv("RLHF_VRAM_CAP", "24GB")
    lines = make("-pn", "ppo", *given).stdout.splitlines()
    assert f"RLHF_VRAM_CAP := {expected}" in lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (check_make.CHOICES["STAGE"], CHAT_STAGES),
        (check_make.CHOICES["REPORT_TO"], [*tracking.TRACKERS, "none"]),
        (check_make.CHOICES["STOP_ON"], [*watch.CHECK_NAMES, "all"]),
        (check_make.STAGES, get_args(recipe.StageName)),
        ([*TARGETS, *check_make.INNER_TARGETS], re.findall(r"^([a-z-]+):", MAKEFILE, re.M)),
    ],
)
def test_the_words_that_make_accepts_are_those_of_the_commands(words, expected):
    assert sorted(words) == sorted(expected)


def test_a_temperature_reaches_the_chat():
    assert option(calls("chat", "TEMPERATURE=0")[-1], "--temperature") == ["0"]
    assert "--temperature" not in calls("chat")[-1]


def test_parents_reach_every_stage_and_the_container():
    for words in calls("ppo", "SET=ppo.kl_coef=0.05", "OUT=runs/less-kl", "REUSE=runs"):
        assert option(words, "--reuse") == ["runs"] and option(words, "--out") == ["runs/less-kl"]
    mounts = option(containers("sft", "HW=4090", "OUT=x", "REUSE=y")[-1], "-v")
    assert f"{ROOT}/y:{ROOT}/y:ro" in mounts


def test_a_container_runs_what_the_local_command_runs():
    options = ("HW=4090", "SEED=3", "SET=ppo.steps=5 ppo.kl_coef=0.1", "RESUME=1")
    inside = [words[words.index(IMAGE) + 1 :] for words in containers("ppo", *options)]
    assert inside == calls("ppo", *options, "RUNTIME=local")


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_what_a_container_sees(engine, files):
    options = ("RECIPE=recipes/4090-llama2-7b/v1", f"RUNTIME={engine}", f"DATA={files[0]}", "OUT=x")
    words = containers("sft", *options)[-1]
    mounts = option(words, "-v")
    assert f"{ROOT}/recipes:{ROOT}/recipes:ro" in mounts
    assert f"{files[0]}:{files[0]}:ro" in mounts, "data are read-only, at the same path"
    assert f"{ROOT}/x:{ROOT}/x" in mounts
    (hub,) = (value.partition("=")[2] for value in option(words, "-e") if value.startswith("HF_HOME="))
    assert f"{hub}:{hub}" in mounts
    assert option(words, "-w") == [str(ROOT)]
    assert "HF_TOKEN" in option(words, "-e"), "by name: its value is in no command line"
    assert ("--gpus" in words) == (engine == "docker")
    assert ("nvidia.com/gpu=all" in words) == (engine == "podman")


@pytest.mark.parametrize(
    ("target", "module"), [("bench", "bench"), ("bench-memory", "bench.memory"), ("bench-ablation", "bench.ablation")]
)
def test_benchmarks_run_where_the_stages_run(target, module):
    (words,) = containers(target, "HW=4090")
    assert option(words, "--entrypoint") == ["python"]
    assert words[words.index(IMAGE) + 1 :][:2] == ["-m", module]
    assert f"{ROOT}/results:{ROOT}/results" in option(words, "-v"), "records land in the caller's folder"
    assert option(words, "-w") == [str(ROOT)]
    assert containers(target, "HW=4090", "RUNTIME=local") == []
    assert f".venv/bin/python -m {module}" in make("-n", target, "HW=cpu").stdout


def test_a_container_sees_the_folders_that_a_recipe_names(tmp_path):
    (tmp_path / "encoder").mkdir()
    recipe = tmp_path / "own" / "v1"
    shutil.copytree(ROOT / "recipes/4090-llama2-7b/v1", recipe)
    file = recipe / "recipe.yaml"
    file.write_text(file.read_text() + f"\n# {tmp_path}/absent\nextra: {{folder: {tmp_path}/own}}\n")
    words = containers("sft", f"RECIPE={recipe}", f"SET=evaluate.bertscore_model={tmp_path}/encoder")[-1]
    mounts = option(words, "-v")
    assert f"{tmp_path}/encoder:{tmp_path}/encoder:ro" in mounts and f"{tmp_path}/own:{tmp_path}/own:ro" in mounts
    assert not any("absent" in mount for mount in mounts)
    (words,) = containers("sft", "HW=4090", f"SET=data.files=[{tmp_path}/encoder,{tmp_path}/own]")[-1:]
    assert {f"{tmp_path}/{name}:{tmp_path}/{name}:ro" for name in ("encoder", "own")} <= {*option(words, "-v")}


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
    assert recipe.resolve("cpu", tmp_path / "recipes") == tmp_path / "recipes/b/v10"
    monkeypatch.setenv("RLHF_RECIPES", str(tmp_path / "recipes"))
    mounts = option(containers("sft", "HW=cpu", "RUNTIME=docker")[-1], "-v")
    seen = f"{tmp_path}/encoder-b10"
    assert [mount for mount in mounts if "encoder" in mount] == [f"{seen}:{seen}:ro"]


def test_the_device_is_that_of_the_recipe_that_rlhf_takes():
    root = ROOT / "recipes"
    for hardware in {recipe.load(folder).recipe.hardware.name for folder in recipe.available(root)}:
        device = recipe.load(recipe.resolve(hardware, root)).recipe.hardware.device
        typed = {"HW": check_make.Variable("HW", "command", hardware)}
        assert check_make.needs(["ppo"], typed) == [device], hardware


def test_hardware_is_that_of_recipes_that_rlhf_takes(tmp_path, monkeypatch, capsys):
    """Not of one that is no default, nor of a folder that is no version; and a file that cannot be read is named."""
    text = (ROOT / "recipes/cpu-tiny/v2/recipe.yaml").read_text().replace("name: cpu", "name: mine")
    for folder, default in (("a/v1", "false"), ("b/vb", "true")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "recipe.yaml").write_text(re.sub("^default:.*", f"default: {default}", text, flags=re.M))
    monkeypatch.setenv("RLHF_RECIPES", str(tmp_path))
    assert "HW=mine: no recipe for such hardware. `make recipes` lists them" in make("-n", "plan", "HW=mine").stderr
    with pytest.raises(UserError, match="--hw mine: no default recipe in"):
        recipe.resolve("mine", tmp_path)
    monkeypatch.setattr(check_make, "problems", lambda *_: (tmp_path / "absent").read_text())
    check_make.main(["plan", "--"])
    assert capsys.readouterr().out == f"{tmp_path}/absent cannot be read: No such file or directory\n"


def test_a_container_sees_reward_functions_of_the_user_s_own(tmp_path):
    """`my_rewards:polite` is looked for in the current folder."""
    root = tmp_path / "copy"
    (root / "bin").mkdir(parents=True)
    (root / "recipes").mkdir()
    shutil.copy(ROOT / "bin/in-container", root / "bin")
    for module in ("my_rewards.py", "setup.py"):
        (root / module).write_text("")
    command = [root / "bin/in-container", "--print", "image", "run", "grpo"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"{root}/my_rewards.py:{root}/my_rewards.py:ro" in printed and "RLHF_DEBUG" in printed
    assert "setup.py" not in printed
    refused = subprocess.run([root / "bin/in-container", "--engine"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (2, "error: bin/in-container: --engine needs a value\n")


CHOSEN = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
INHERITED = {"CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize(("given", "expected"), [((), INHERITED), (("GPU=1",), CHOSEN), (("GPU=",), INHERITED)])
def test_a_card_is_chosen_by_its_number(monkeypatch, given, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    lines = make("-pn", "ppo", "HW=4090", *given).stdout.splitlines()
    assert dict(re.findall(r"^(CUDA_\w+) :?= (.*)$", "\n".join(lines), re.M)) == expected
    assert {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} <= set(option(containers("sft", "HW=4090", *given)[-1], "-e"))


def test_without_a_chosen_card_all_stay_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in make("-pn", "ppo", "HW=4090").stdout.replace("An empty CUDA_VISIBLE", "")


def test_keys_of_trackers_pass_by_name(files):
    passed = option(containers("sft", "HW=4090", "REPORT_TO=wandb")[-1], "-e")
    assert {"WANDB_API_KEY", "WANDB_MODE", "TRACKIO_SPACE_ID"} <= set(passed), "no value in any command line"


def test_a_tracker_that_is_asked_for_is_installed():
    assert "gpu,math,report,serve,tracking,wandb,trackio]" in make("-n", "setup", "REPORT_TO=wandb trackio").stdout
    assert "gpu,math,report,serve,tracking]" in make("-n", "setup", "VENV=absent", "REPORT_TO=tensorboard").stdout


def test_the_generator_of_the_site_is_installed_for_it_alone():
    assert "gpu,math,report,serve,tracking,docs]" in make("-n", "-B", "docs").stdout
    assert ",docs" not in make("-n", "-B", "test").stdout


def test_a_cpu_recipe_in_a_container_asks_for_no_gpu():
    assert not [word for words in containers("sft", "HW=cpu", "RUNTIME=docker") for word in words if "gpu" in word[:5]]


def test_an_image_of_one_s_own_is_not_built():
    assert "docker build" in make("-n", "sft", "HW=4090").stdout
    result = make("-n", "sft", "HW=4090", "IMAGE=somewhere/rlhf@sha256:0")
    assert "docker build" not in result.stdout and "somewhere/rlhf@sha256:0 run sft" in result.stdout


@pytest.mark.parametrize("given", ["--find-links 'a b' $x", ""])
def test_arguments_for_pip_reach_the_image(given, tmp_path):
    (tmp_path / "docker").write_text('#!/bin/bash\n[ "$1" = info ] || echo "$PIP_ARGS: $*"\n')
    (tmp_path / "docker").chmod(0o755)
    result = make("image", f"PIP_ARGS={given}", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.stdout.startswith(f"{given}: build ") and " --build-arg PIP_ARGS " in result.stdout, result.stderr


# Stands for docker: it has the image `here`, any other once it is pulled, and prints the words of what it is to run.
ENGINE = """#!/bin/bash
cd "${BASH_SOURCE%/*}"
case $1 in
    image) [ "$3" = here ] || [ "$5" = here ] || [ -e pulled ] || exit 1; echo sha256:1 ;;
    pull) touch pulled; echo "pulling $2" ;;
    *) printf "%s\\n" "$@" ;;
esac
"""


def start_container(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run bin/in-container in `folder`, which has the stand-in for docker and is the user's home."""
    (folder / "docker").write_text(ENGINE)
    (folder / "docker").chmod(0o755)
    return subprocess.run(
        [ROOT / "bin/in-container", *map(str, words)],
        env={"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )


def test_a_container_is_started_with_the_image_s_identity_and_folders_that_exist(tmp_path):
    done = start_container(tmp_path, "--write", tmp_path / "a b", "here", "run", "sft", "--set", "x=1 2")
    words = done.stdout.splitlines()
    assert words[words.index("here") + 1 :] == ["run", "sft", "--set", "x=1 2"]
    assert "RLHF_IMAGE=sha256:1" in words and f"{tmp_path}/a b:{tmp_path}/a b" in words and "-it" not in words
    assert (tmp_path / "a b").is_dir() and (tmp_path / ".cache/huggingface").is_dir()
    assert not (tmp_path / "pulled").exists()


def test_an_image_that_is_not_here_is_pulled_before_its_identity_is_read(tmp_path):
    done = start_container(tmp_path, "--entrypoint", "bash", "elsewhere")
    assert "RLHF_IMAGE=sha256:1" in done.stdout.splitlines()
    assert done.stderr == "pulling elsewhere\n" and "pulling" not in done.stdout, "stdout is the command's"


def test_relative_paths_are_no_names_of_volumes(tmp_path):
    words = start_container(tmp_path, "--read", "pairs.jsonl", "--write", "runs/../out", "here").stdout.splitlines()
    assert f"{tmp_path}/pairs.jsonl:{tmp_path}/pairs.jsonl:ro" in words and f"{tmp_path}/out:{tmp_path}/out" in words
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("words", [("--gpus", "all", "an-image"), ()])
def test_a_container_s_options_are_checked(words):
    done = subprocess.run([ROOT / "bin/in-container", *words], capture_output=True, text=True)
    assert done.returncode and not done.stdout and "bin/in-container" in done.stderr


def test_without_an_engine_the_way_out_is_named(tmp_path):
    """Nothing but a shell and make's own tools on the path."""
    command = [str(shutil.which("make")), "sft", "HW=4090"]
    for name in ("bash", "sed", "git", "id", "mkdir", "grep", "python3"):
        (tmp_path / name).symlink_to(shutil.which(name))
    result = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode
    assert "RUNTIME=docker: there is no docker on this machine. Install it" in result.stderr
    assert "RUNTIME=local" in result.stderr
    (tmp_path / "docker").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    result = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode and "docker does not answer" in result.stderr
