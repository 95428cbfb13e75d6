"""The front door: what `make` prints and installs, and where its targets run."""

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
from pathlib import Path

import pytest

from bin import install
from rlhf import __version__, recipe
from rlhf.cli import cli
from rlhf.recipe.stages import STAGES
from rlhf.terminal import make_words
from tests.makefile import ANYWHERE, known, takes
from tests.records import write_records

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

ROOT = Path(__file__).resolve().parents[2]
IMAGE = f"rlhf-one-gpu:{__version__}"


def make(*arguments, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make in the checkout, with nothing handed down from a make or a shell that runs these tests.

    `variables` are those of make that stand in its environment.
    """
    handed_down = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "RLHF_MAKE", *known()}
    environment = {name: value for name, value in os.environ.items() if name not in handed_down}
    command = ["make", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=60)


def commands(*arguments, program: str) -> list[list[str]]:
    """The words of each command of a program that `make -n` prints, in order."""
    result = make("-n", *arguments)
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines() if re.match(rf"(CPU=1 )?{program} ", line)]


# ---- help ----


@functools.cache
def help_all() -> str:
    """What `make help-all` prints, which is the same for every test."""
    return make("help-all").stdout


def test_help_is_what_make_alone_prints_and_needs_no_python():
    assert make().stdout == make("help", "PYTHON=absent", "VENV=absent").stdout
    assert "  ppo " in make().stdout and "  HW " in make().stdout


def test_help_all_has_one_line_for_each_target_and_variable():
    lines = help_all().splitlines()
    for name in [*takes(), *known()]:
        (line,) = [line for line in lines if re.match(rf"  {name} +\S", line)]
        assert len(line) <= 120, line


def test_help_is_the_part_of_it_that_people_use_most():
    some = [line for line in make("help").stdout.splitlines() if line.startswith("  ")]
    assert set(some) < set(help_all().splitlines())
    assert {"setup", "plan", "ppo", "report", "help-all", "HW", "PIP_ARGS"} <= {line.split()[0] for line in some}


def test_columns_of_the_help_are_straight():
    for first in ("[a-z-]", "[A-Z_]"):
        rows = [row for line in help_all().splitlines() if (row := re.match(rf"  {first}+  +", line))]
        assert len({row.end() for row in rows}) == 1


# ---- targets ----


def test_dry_runs_print_the_commands():
    assert commands("ppo", "HW=cpu", program=".venv/bin/rlhf") == [
        [".venv/bin/rlhf", "run", "ppo", "--with-parents", "--hw", "cpu", "--out", "runs"]
    ]


def test_all_runs_every_kind_of_result_in_order():
    runs = commands("all", "-j8", program=".venv/bin/rlhf")
    assert [words[2] for words in runs] == ["ppo", "rloo", "grpo", "dpo", "kto", "evaluate", "merge"]
    assert all("--if-needed" in words for words in runs), "no stage in particular"


@pytest.mark.parametrize("name", ["pop", "tests", "rlhf", "checked"])
def test_unknown_target_is_an_error_even_where_a_folder_has_its_name(name):
    result = make("-n", name)
    assert result.returncode and f"no target '{name}'" in result.stderr and not result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ppo HW=4090 STPES=3", 'no variable STPES; did you mean STAGES? SET="ppo.steps=10" changes a key'),
        ("ppo hw=4090", "no variable hw; did you mean HW?"),
        ("ppo it's=x", "no variable it's; SET="),
        ("ppo FIT=12GB", "FIT changes nothing in `make ppo`; it is for plan"),
        ("report SET=a.b=1", "SET changes nothing in `make report`"),
        ("recipes HW=cpu", "HW changes nothing in `make recipes`"),
        ("ppo IMAGE=x", "IMAGE changes nothing in `make ppo`"),
        ("budgets ppo SEEDS=1", "SEEDS changes nothing in `make budgets ppo`; it is for reproduce"),
        ("ppo HW=cpu DATA=", "DATA= names nothing"),
        ("chat RUN=", "RUN= names nothing"),
        ("ppo RESUME=y", "RESUME=y: write 1 or 0"),
        ("image FLASH_ATTN=on", "FLASH_ATTN=on: write 1 or 0"),
        ("ppo RUNTIME=prod", "RUNTIME=prod: docker, podman or local"),
    ],
)
def test_a_variable_that_would_be_ignored_stops_make_before_anything_else(words, message):
    result = make(*words.split())
    assert result.returncode and not result.stdout and message in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        *("plan ppo HW=cpu SEED=3", "serve RESUME=1", "all STOP_ON=nan", "setup HW=4090 REPORT_TO=wandb"),
        *("bench-gpu VRAM_CAP=9GB", "shell HW=4090 DATA=x IMAGE=i", "test-image BASE=debian:trixie PIP_ARGS=-v"),
    ],
)
def test_a_variable_that_one_of_the_targets_takes_is_accepted(words):
    assert make("-n", *words.split()).returncode == 0


def test_a_variable_of_the_environment_counts_only_where_a_target_takes_it():
    """Other programs have names such as STAGE and PORT too."""
    environment = {"STAGE": "prod", "PORT": "http", "FILES": "/none", "SUMMARY": "yes"}
    for target in ("recipes", "test", "lint", "budgets"):
        assert make("-n", target, **environment).returncode == 0
    assert "--stage 'prod'" in make("-n", "chat", **environment).stdout
    assert "--seed '2'" in make("-n", "sft", SEED="2").stdout and "'4090'" in make("-n", "sft", HW="4090").stdout
    assert "--hw" not in make("-n", "sft", "RECIPE=recipes/cpu-tiny/v1", HW="4090").stdout, "which was chosen instead"


# ---- each variable is the option of its name


def test_a_target_takes_the_variables_whose_options_its_command_has():
    """Neither more nor fewer, but for what shapes OUT's default, the merge before `serve`, and options of AB_ARGS."""
    of_out = {"DATA", "WEIGHTS", "SEED"}
    more = {"report": of_out, "ab": of_out, "judge": of_out, "serve": {"RESUME", "STOP_ON", "REPORT_TO", "PRICE"}}
    aside = ANYWHERE | {"VRAM_CAP", "GPU", "IMAGE", "BASE", "FLASH_ATTN"}
    aside |= {"RUN", "FILES", "REWARD", "AB_ARGS", "SCORE_ARGS", "SAMPLE_ARGS"}  # arguments without an option
    for target in [*STAGES, *cli.commands]:
        if target not in takes() or target == "run":
            continue
        command = cli.commands["run" if target in STAGES else target]
        options = {make_words.variable(name) for p in command.params for name in p.opts if name.startswith("--")}
        options -= {"ONLY"} if target in {*STAGES} - {"evaluate"} else set()  # policies to evaluate
        expected = (known() & options) - ({"SEED", "PORT"} if target == "ab" else set())
        assert takes()[target] - aside == (expected | more.get(target, set())) - aside, target
        has_run = any(
            "RUN" in str(p.metavar or p.name).upper() for p in command.params if not p.opts[0].startswith("-")
        )
        assert ("RUN" in takes()[target]) == has_run, target


def test_the_names_in_messages_are_those_that_are_options():
    options = {name for command in cli.commands.values() for p in command.params for name in p.opts}
    assert {name for name in known() if f"--{name.lower().replace('_', '-')}" in options} == make_words.VARIABLES


def line(target: str, *typed: str) -> list[str]:
    """The words that a target hands to `rlhf`."""
    (words,) = commands(target, *typed, "RUNTIME=local", program=".venv/bin/rlhf")
    return words[1:]


@pytest.mark.parametrize(
    ("target", "typed", "expected"),
    [
        ("pretrain", ["REPORT_TO=none"], "--hw cpu --out runs"),
        ("sft", ["RESUME=0", "STOP_ON=nan longer"], "--hw cpu --out runs --restart --stop-on nan --stop-on longer"),
        ("ppo", ["RECIPE=r", "SET=a=2 b=[1]", "RESUME=1"], "--recipe r --set a=2 --set b=[1] --out runs --resume"),
        ("sft", ["SEED=7"], "--hw cpu --out runs/seed-7 --seed 7"),
        ("sft", ["DATA={0}", "SEED=7"], "--hw cpu --out runs/data-pairs.v1/seed-7 --data '{0}' --seed 7"),
        ("sft", ["WEIGHTS=/x/model/"], "--hw cpu --out runs/weights-model --weights /x/model/"),
        ("sft", ["DATA={1}/*.jsonl no", "OUT=my runs"], "--hw cpu --out 'my runs' --data '{2}' --data no"),
        ("sft", ["OUT=~/r", "DATA=~/a ~/b"], "--hw cpu --out {3}/r --data {3}/a --data {3}/b"),
        ("reproduce", ["HW=4090", "GUIDE=1", "SEEDS=5 6"], "reproduce --hw 4090 --guide --out runs --seeds '5 6'"),
        ("plan", ["HW=4090", "FIT=12GB", "PRICE=2"], "plan --hw 4090 --fit 12GB --price 2"),
        ("recipes", [], "recipes"),
        ("data-check", ["DATA=x", "CHECK_ARGS=--heldout 'a b'"], "data check x --heldout 'a b'"),
        ("ab", ["SEED=3", "AB_ARGS=--a sft", "SUMMARY=1"], "ab --hw cpu --out runs/seed-3 --summary --a sft"),
        ("judge", ["URL=u", "MODEL=m"], "judge --hw cpu --out runs --url u --model m"),
        ("report", ["OUT="], "report --hw cpu --out ''"),
        ("chat", ["RUN=runs/a b/v1/ppo", "TEMPERATURE=0"], "chat 'runs/a b/v1/ppo' --temperature 0"),
        ("score", ["FILES=a b", "SCORE_ARGS=--to s"], "score --hw cpu --out runs a b --to s"),
    ],
)
def test_a_target_is_a_command(target, typed, expected, tmp_path):
    files = [tmp_path / "pairs.v1.jsonl.gz", tmp_path, tmp_path / "more(1).jsonl", Path.home()]
    for file in (files[0], files[2]):
        file.touch()
    words, wanted = line(target, *(word.format(*files) for word in typed)), shlex.split(expected.format(*files))
    wanted = ["run", target, "--with-parents", *wanted] if target in STAGES else wanted
    assert words == wanted


def test_benchmarks_are_modules():
    def words(*arguments: str) -> list[str]:
        return commands(*arguments, "RUNTIME=local", program=".venv/bin/python")[0][2:]

    typed = ("HW=4090", "SET=a=1", "BENCH_ARGS=--save")
    assert words("bench", *typed, "PRICE=2") == ["bench", "--hw", "4090", "--set", "a=1", "--price", "2", "--save"]
    assert words("bench-memory", *typed) == ["bench.memory", "measure", "--hw", "4090", "--set", "a=1", "--save"]
    assert words("bench-peer", "BENCH_ARGS=--save") == ["bench.peer", "--save"]


def stand_in(venv: Path, rlhf: str) -> None:
    """Make a folder of installed packages in which the command `rlhf` is a line of shell."""
    (venv / "bin").mkdir()
    for name, line in (("rlhf", rlhf), ("python", f'exec {sys.executable} "$@"')):
        (venv / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (venv / "bin" / name).chmod(0o755)
    (venv / ".ready-gpu,math,report,serve,tracking").touch()


def test_a_value_reaches_the_command_as_it_was_typed(tmp_path):
    """Past two shells and make: apostrophes, quotes and dollars."""
    stand_in(tmp_path, 'printf "%s\\n" "$@" "$RLHF_MAKE" "$RLHF_VRAM_CAP"')
    prompt, response = 'Why, "it" isn\'t $5, $HOME or $(x)?', "It's 2 + `2`, $$."
    result = make("score", f"PROMPT={prompt}", "VRAM_CAP=9GB", f"VENV={tmp_path}", RESPONSE=response)
    lines = result.stdout.splitlines()
    assert lines[-6:-2] == ["--prompt", prompt, "--response", response], result.stderr
    assert lines[-2:] == [f"make VENV={tmp_path}", "9GB"]


@pytest.mark.parametrize(("name", "value"), [("VENV", ""), ("VENV", "a b"), ("IMAGE", ""), ("PYTHON", "")])
def test_values_that_make_itself_cannot_take_are_named(name, value):
    assert f"{name}={value}: give one word" in make("setup", f"{name}={value}").stderr


def test_the_exit_code_is_the_command_s(tmp_path):
    stand_in(tmp_path, "exit 3")
    result = make("data-check", "DATA=README.md", f"VENV={tmp_path}")
    assert result.returncode and "data-check] Error 3" in result.stderr


def test_what_checks_variables_needs_only_the_small_packages():
    """bin/setup installs these before all others."""
    listed = re.search(r"^small=\((.*)\)", (ROOT / "bin/setup").read_text(), re.M)
    assert listed
    code = "import sys, rlhf.cli; print(*(m for m in sys.modules if hasattr(sys.modules[m], '__file__')))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name.partition(".")[0] for name in loaded.split()}
    third = {name for name in names if name not in sys.stdlib_module_names and not name.startswith("_")}
    theirs = {"annotated_types", "markupsafe", "pydantic_core", "typing_extensions", "typing_inspection"}
    assert third - theirs - {"rlhf", "peakmem"} == {"yaml" if name == "pyyaml" else name for name in listed[1].split()}


# ---- setup, with a stand-in for Python, pip and rlhf ----

EXTRAS = "gpu math report serve tracking"


@pytest.fixture
def fake(tmp_path):
    """An interpreter of Python 3.12, as far as bin/setup can see; all programs write their arguments to `log`."""
    tool = tmp_path / "tool"
    tool.write_text(
        "#!/usr/bin/env bash\n"
        f'echo "$(basename "$0") $*" >>{tmp_path}/log\n'
        'case "$*" in\n'
        "--version) echo Python 3.12.1 ;;\n"
        f'"bin/install.py "*) exec {sys.executable} "$@" ;;\n'
        '"-m venv "*) mkdir -p "$3/bin" && for name in pip python rlhf; do cp "$0" "$3/bin/$name"; done ;;\n'
        "'run rm '*) exit 3 ;;\n"
        "esac\n"
    )
    tool.chmod(0o755)
    return tmp_path


def setup(folder: Path, extras: str = EXTRAS, *pip_arguments: str) -> subprocess.CompletedProcess[str]:
    """Run bin/setup with the stand-in."""
    command = [str(word) for word in (ROOT / "bin/setup", folder / "venv", folder / "tool", extras, *pip_arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def installed(folder: Path) -> list[str]:
    """What pip was told since the last call."""
    lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    (folder / "log").write_text("")
    return [line.removeprefix("pip install ") for line in lines if line.startswith("pip ")]


def test_setup_installs_the_pinned_package_once(fake):
    done = setup(fake)
    assert done.stdout.splitlines()[-1] == f"setup: `source {fake}/venv/bin/activate` puts rlhf on your path", (
        done.stderr
    )
    assert installed(fake) == ["-e .[gpu,math,report,serve,tracking] -c requirements/cpu.txt"]
    assert setup(fake).returncode == setup(fake, "report,math").returncode == 0 and installed(fake) == []
    assert setup(fake, "small").returncode == 0 and installed(fake) == [], "all have them"
    setup(fake, f"{EXTRAS} wandb", "--no-cache-dir")
    assert installed(fake) == ["--no-cache-dir -e .[gpu,math,report,serve,tracking,wandb] -c requirements/cpu.txt"]


def test_what_was_installed_at_several_times_counts_together(fake):
    for extras in ("small", "gpu,math", "tracking,report,serve"):
        assert setup(fake, extras).returncode == 0
    assert len(installed(fake)) == 3
    assert setup(fake).returncode == 0 and installed(fake) == []


def test_what_is_older_than_its_pins_is_installed_again(fake):
    setup(fake)
    (stamp,) = (fake / "venv").glob(".ready-*")
    os.utime(stamp, (0, 0))
    assert setup(fake).returncode == 0 and len(installed(fake)) == 2


@pytest.mark.parametrize("target", sorted(takes()))
def test_a_target_is_no_file_and_what_developers_need_is_installed_for_their_targets_alone(target):
    tracked = ["wandb"] * ("REPORT_TO" in takes()[target])
    result = make("-n", target, "VENV=absent", *(["REPORT_TO=wandb none"] if tracked else []))
    assert result.returncode == 0 and "Nothing to be done" not in result.stdout, result.stderr
    found = [shlex.split(row) for row in result.stdout.splitlines() if re.match(r"(CPU=1 )?bin/setup ", row)]
    developers = {"test", "test-image", "test-vllm", "test-studies", "lint", "bench-micro", "bench-gpu"}
    for_dev = target in developers | {"bench-against"}
    own = ["dev"] * for_dev + ["docs"] * (target == "docs")
    assert all(words[-1].split() == [*EXTRAS.split(), *tracked, *own] for words in found if words[-1] != "small")
    assert found or target in ("help", "help-all", "clean")


def test_make_sets_up_before_it_runs_and_a_failing_stage_stops_the_chain(fake):
    result = make("sft", "rm", "ppo", f"PYTHON={fake}/tool", f"VENV={fake}/venv")
    assert result.returncode and "rm] Error 3" in result.stderr
    lines = [line for line in (fake / "log").read_text().splitlines() if line.startswith("rlhf run")]
    assert [line.split()[2] for line in lines] == ["sft", "rm"]
    (full,) = installed(fake)
    assert "-e .[" in full


def test_failing_pip_leaves_setup_undone(fake):
    setup(fake, "small")
    (fake / "venv/bin/pip").write_text("#!/usr/bin/env bash\necho no space left >&2; exit 1\n")
    for _ in range(2):
        result = setup(fake)
        assert result.returncode != 0 and "no space left" in result.stderr


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
    started = time.monotonic()
    result = setup(fake, EXTRAS, "--extra-index-url", mute)
    assert time.monotonic() - started < 15
    assert result.returncode and f"setup: the index {mute} in PIP_ARGS does not answer" in result.stderr
    assert installed(fake) == []
    assert setup(fake).returncode == 0, "without it"


def test_an_index_that_answers_at_all_is_pip_s_to_judge(refusing):
    assert not install.silent([refusing])
    assert list(install.silent(["http://127.0.0.1:9/simple"])) == ["http://127.0.0.1:9/simple"]


def test_the_indexes_are_those_of_the_arguments():
    words = ["pip", "install", "--extra-index-url=http://a", "-i", "https://b", "--find-links", "http://c", "-e", "."]
    assert install.indexes(words) == ["https://b", "http://a"]
    assert install.indexes([*words, "--index-url", "file:///d"]) == ["https://b", "http://a"]
    assert not install.indexes([*words, "--proxy", "http://p"])
    assert install.indexes(["-i", "https://name:secret@host/simple"]) == ["https://host/simple"]


def test_setup_is_never_silent_for_long_and_says_how_far_it_is(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(install, "EVERY", 0.2)
    packages = tmp_path / "lib/python3/site-packages"
    (packages / "old.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin/pip"
    lines = "Collecting a\n  Downloading a.whl (1.5 MB)\n  Downloading b.whl (9 kB)\nCollecting b"
    pip.write_text(
        f'#!/bin/bash\necho "{lines}"; sleep 0.5; echo "Installing collected packages: a, b"; sleep 0.1\n'
        f"mkdir {packages}/a.dist-info; sleep 0.5; exit 4\n"
    )
    pip.chmod(0o755)
    assert install.run([str(pip)]) == 4
    said = list(dict.fromkeys(line.partition(",")[0] for line in capsys.readouterr().out.splitlines()))
    assert said == ["  Downloading a.whl (1.5 MB)", "  2 packages found", "  Unpacking", "  1 of 2 packages unpacked"]


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
    assert not (tmp_path / "venv").exists()


# ---- the container ----


def where(*arguments) -> str:
    """Where make would run a stage: docker, podman or local."""
    boxed = [words for words in commands("sft", *arguments, program="bin/in-container") if "--build" not in words]
    for_cpu = bool(commands("setup", *arguments, program="CPU=1 bin/setup"))
    if not boxed:
        assert commands("sft", *arguments, program=".venv/bin/rlhf")
        return "local"
    ((_, _, engine, *words),) = boxed
    assert ("--gpu" in words) != for_cpu
    return engine


def test_a_container_runs_what_the_local_command_runs_and_sees_what_that_names():
    typed = ("sft", "HW=4090", "SEED=3", "SET=ppo.steps=5 ppo.kl_coef=0.1", "RESUME=1")
    *_, words = commands(*typed, program="bin/in-container")
    local = commands(*typed, "RUNTIME=local", program=".venv/bin/rlhf")[0][1:]
    assert words[words.index(IMAGE) + 1 :] == local
    seen = words[words.index("--paths") + 1 : words.index(IMAGE)]
    assert " ".join(seen) == f"<(.venv/bin/python -m rlhf.cli --paths {' '.join(local)} )"


@pytest.mark.parametrize("target", ["bench", "bench-memory", "bench-ablation"])
def test_benchmarks_run_where_the_stages_run(target):
    *_, words = commands(target, "HW=4090", "SET=a=1", program="bin/in-container")
    assert words[words.index("--write") + 1 : words.index(IMAGE)] == ["results", "--entrypoint", "python"]
    assert words[words.index(IMAGE) + 1] == "-m" and words[-4:] == ["--hw", "4090", "--set", "a=1"]


def test_a_server_is_reached_from_outside_of_its_container():
    *_, words = commands("serve", "HW=4090", "PORT=81", program="bin/in-container")
    at = words.index(IMAGE)
    assert words[at - 2 : at] == ["--port", "81"] and words[-2:] == ["--host", "0.0.0.0"]
    assert "--port 8000 rlhf" in " ".join(commands("serve", "HW=4090", program="bin/in-container")[-1])


def test_a_shell_sees_what_a_stage_sees():
    *_, words = commands("shell", "HW=4090", "OUT=x", "RUNTIME=local", program="bin/in-container")
    assert words[1:3] == ["--engine", "docker"] and words[-3:] == ["--entrypoint", "bash", IMAGE]
    assert "run sft --hw 4090 --out x" in " ".join(words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("ppo HW=4091", "HW=4091"),
        ("ppo RECIPE=cpu-tiny", "RECIPE=cpu-tiny"),
        ("chat SEED=x STAGE=dpo", "SEED"),
        ("score FILES=none", "none: no such file"),
    ],
)
def test_a_wrong_value_is_refused_before_an_image_is_built(words, named, tmp_path):
    (tmp_path / "docker").write_text("#!/bin/sh\necho docker\n")
    (tmp_path / "docker").chmod(0o755)
    result = make(*words.split(), "RUNTIME=docker", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode and named in result.stderr and not result.stdout


def test_recipes_for_a_gpu_run_in_a_container_and_those_for_a_cpu_do_not():
    for typed in ("HW=cpu", "RECIPE=recipes/cpu-tiny/v1", "RECIPE=recipes/2xcpu-tiny/v1/", "HW=2xcpu"):
        assert where(typed) == "local"
    for typed in ("HW=h100", "RECIPE=recipes/4090-llama2-7b/v1"):
        assert where(typed) == "docker"
    assert where("HW=4090", "RUNTIME=local") == "local"
    assert where("HW=4090", "SET=hardware.device=cpu sft.max_steps=1") == "local"
    assert where("HW=cpu", "RUNTIME=podman") == "podman"


def test_the_hardware_of_a_cpu_is_named_so():
    """The Makefile knows by the name that a recipe needs no card."""
    for folder in recipe.available(ROOT / "recipes"):
        hardware = recipe.load(folder).recipe.hardware
        assert (hardware.device == "cpu") == hardware.name.endswith("cpu"), folder


def test_the_recipe_s_device_decides_and_not_a_folder_s_name(tmp_path):
    for name, device, expected in (("cpu01", "cuda", "docker"), ("mine", "cpu", "local")):
        text = (ROOT / "recipes/4090-llama2-7b/v1/recipe.yaml").read_text()
        folder = tmp_path / name / "v1"
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(re.sub(r"^(\s+device:) cuda", rf"\1 {device}", text, flags=re.M))
        assert where(f"RECIPE={folder}") == expected, name


def test_a_run_s_device_is_that_of_its_manifest(tmp_path):
    run = tmp_path / "my runs/cpu-tiny/v2"
    for device, expected in (("cpu", "local"), ("cuda", "docker")):
        write_records(run / "ppo", {"settings": {"hardware": {"name": "mine", "device": device}}})
        assert where(f"RUN={run}") == where(f"RUN={run}/ppo") == expected


def test_an_image_of_one_s_own_is_not_built():
    built, run = commands("sft", "HW=4090", program="bin/in-container")
    assert built[-2:] == ["--build", IMAGE] and IMAGE in run
    (run,) = commands("sft", "HW=4090", "IMAGE=mine", program="bin/in-container")
    assert "mine" in run


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
    (tmp_path / "paths").write_text("read pairs.jsonl\nwrite out\n")
    words = start_container(tmp_path, "--paths", "paths", "--write", "runs/../out", "here").stdout.splitlines()
    assert f"{tmp_path}/pairs.jsonl:{tmp_path}/pairs.jsonl:ro" in words and f"{tmp_path}/out:{tmp_path}/out" in words
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("words", [("--gpus", "all", "an-image"), ()])
def test_a_container_s_options_are_checked(words):
    done = subprocess.run([ROOT / "bin/in-container", *words], capture_output=True, text=True)
    assert done.returncode and not done.stdout and "bin/in-container" in done.stderr


def test_an_image_is_built_with_what_pip_is_told(tmp_path):
    (tmp_path / "docker").write_text('#!/bin/bash\n[ "$1" = info ] || echo "$PIP_ARGS, $BASE: $*"\n')
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = make("image", "PIP_ARGS=--find-links 'a b'", "BASE=debian:trixie", "FLASH_ATTN=1", PATH=path)
    assert result.stdout.startswith("--find-links 'a b', debian:trixie: build --build-arg PIP_ARGS "), result.stderr
    assert "--build-arg BASE --build-arg FLASH_ATTN=1 -t " in result.stdout
    assert "BASE" not in make("image", PATH=path).stdout


def test_without_an_engine_the_way_out_is_named(tmp_path):
    """Nothing but a shell and make's own tools on the path."""
    for name in ("bash", "sed", "git", "id", "mkdir", "grep", "dirname", "find", "env"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command = [str(shutil.which("make")), "sft", "HW=4090"]
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode
    assert "RUNTIME=docker: there is no docker on this machine. Install it" in result.stderr
    assert "RUNTIME=local" in result.stderr
    (tmp_path / "docker").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode and "docker does not answer" in result.stderr
