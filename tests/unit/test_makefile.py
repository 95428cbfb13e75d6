"""The Makefile: a typed variable is the option of its name, and `make -n` prints a line that can be pasted."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def outside_of_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests start make as a user does, also when make runs them."""
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages as `make setup` leaves it, as far as make can see."""
    folder = tmp_path_factory.mktemp("venv")
    (folder / ".ready-all").touch()
    return folder


def make(*words: str, venv: Path, **environment: str) -> tuple[int, str, str]:
    """Return the exit code and both outputs of `make -n`."""
    clean = {name: os.environ[name] for name in ("PATH", "HOME")} | environment
    command = ["make", "-n", f"VENV={venv}", "EXTRAS=all", *words]
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True)
    return done.returncode, done.stdout.replace(f"{venv}/bin/", ""), done.stderr


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("ppo HW=4090", "rlhf run ppo --with-parents --hw 4090"),
        ("ppo HW=cpu SEED=3 RESUME=1", "rlhf run ppo --with-parents --hw cpu --seed 3 --resume"),
        ("dpo RUN=runs/a/v1 RESUME=0", "rlhf run dpo --with-parents runs/a/v1 --restart"),
        ("sft HW=4090 GUIDE=1 RUNTIME=local", "rlhf run sft --with-parents --hw 4090 --runtime local --guide"),
        ("ppo 'SET=a=1 b=2'", "rlhf run ppo --with-parents --set a=1 --set b=2"),
        ("ppo \"SET=a='x'\"", "rlhf run ppo --with-parents --set \"a='x'\""),
        ("ppo 'DATA=README.m* none.jsonl'", "rlhf run ppo --with-parents --data README.md --data none.jsonl"),
        ("plan HW=4090 PRICE=0.4", "rlhf plan --hw 4090 --price 0.4"),
        ("evaluate 'ONLY=ppo dpo'", "rlhf run evaluate --with-parents --only ppo --only dpo"),
        ("ppo STOP_ON=nan GPU=1 VRAM_CAP=24GB", "RLHF_VRAM_CAP=24GB CUDA_DEVICE_ORDER=PCI_BUS_ID "
         "CUDA_VISIBLE_DEVICES=1 rlhf run ppo --with-parents --stop-on nan"),
        ("compare A=runs/a B=runs/b ARGS=--json", "rlhf compare runs/a runs/b --json"),
        ("score HW=cpu 'FILES=a b'", "rlhf score a b --hw cpu"),
        ("reward REWARD=my:polite DATA=a", "rlhf reward my:polite --data a"),
        ("data-check 'DATA=a b' 'ARGS=--seed 1'", "rlhf data check a b --seed 1"),
        ("data-show DATA=a HW=cpu SET=data.turns=last", "rlhf data show a --hw cpu --set data.turns=last"),
        ("bench-against REV=HEAD~1", "python -m bench.against --rev HEAD~1"),
    ],
)  # fmt: skip
def test_a_target_is_one_line(installed, typed, line):
    code, out, err = make(*shlex.split(typed), venv=installed)
    assert (code, err) == (0, "") and len(out.splitlines()) == 1
    assert shlex.split(out) == shlex.split(line)


def test_variables_of_the_environment_are_of_other_programs(installed):
    _, out, _ = make("ppo", venv=installed, DATA="/srv", PORT="80", MODEL="m", HW="x")
    assert shlex.split(out) == ["rlhf", "run", "ppo", "--with-parents"]


@pytest.mark.parametrize("typed", ["SEEED=3", "BENCH_ARGS=x", "DATA=", "RESUME=yes", "HW=4091"])
def test_a_wrong_variable_is_refused_before_anything_is_installed(tmp_path, typed):
    code, out, err = make("ppo", typed, venv=tmp_path / "none")
    assert (code, out) == (2, "") and typed.partition("=")[0] in err


def test_a_target_that_is_none_is_answered_with_those_there_are(installed):
    done = subprocess.run(["make", "pppo"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "'pppo'" in done.stderr and " ppo " in done.stderr


def test_all_runs_each_stage_and_stops_at_a_failure(installed, tmp_path):
    shutil.copytree(installed, tmp_path / "venv")
    (tmp_path / "venv/bin").mkdir()
    log, rlhf = tmp_path / "log", tmp_path / "venv/bin/rlhf"
    rlhf.write_text(f'#!/bin/sh\necho "$2" >>{log}\n[ "$2" != rm ]\n')
    rlhf.chmod(0o755)
    done = subprocess.run(["make", "all", f"VENV={tmp_path / 'venv'}", "EXTRAS=all"], cwd=ROOT, capture_output=True)
    assert done.returncode and log.read_text().split() == ["pretrain", "sft", "rm"]


def test_packages_are_installed_once_for_a_set_of_extras(tmp_path):
    (tmp_path / "bin").mkdir()
    log = tmp_path / "log"
    for name in ("pip", "rlhf"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{log}\n')
        (tmp_path / "bin" / name).chmod(0o755)
    for extras in ("a", "a", "a,b"):
        subprocess.run(["make", "plan", f"VENV={tmp_path}", f"EXTRAS={extras}"], cwd=ROOT, check=True)
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["pip", "rlhf", "rlhf", "pip", "rlhf"]


def test_help_lists_every_target_for_users_or_for_developers():
    texts = [subprocess.run(["make", name], cwd=ROOT, capture_output=True, text=True).stdout for name in
             ("help", "help-dev")]  # fmt: skip
    users, developers = ({word for line in t.splitlines() if line[:1].strip() for word in line.split()} for t in texts)
    assert {"ppo", "plan", "compare", "data-check"} <= users and {"bench", "test", "lint", "image"} <= developers
    assert users.isdisjoint(developers)


def test_it_can_be_read():
    assert len((ROOT / "Makefile").read_text().splitlines()) <= 110
