"""Stages that are stopped, run out of memory or cannot write: one line, the last checkpoint named, nothing lost."""

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.run.directory import StageRun
from tests.helpers import RECIPE, SMALL, beside, content_of, rlhf, run_stages, small

ROOT = Path("cpu-tiny/v1")
SETS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a stage at test size. Return its exit code, what it printed, and its line on stderr."""

    def run(stage: str, out: Path) -> tuple[int, str, str]:
        code, printed, err = rlhf(monkeypatch, capsys, "run", stage, "--recipe", RECIPE, "--out", out, *SETS)
        said = ("training pairs are", "are trained", ", on cpu, into ", "sampling and training agree", "]: ")
        (line,) = (line for line in err.splitlines() if not any(words in line for words in said))
        return code, printed, line

    return run


@pytest.mark.parametrize(
    ("stage", "name"), [("sft", "SIGTERM"), *(("ppo", name) for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1"))]
)
def test_a_signal_ends_a_stage_in_one_line_with_its_checkpoint(command, trained, tmp_path, monkeypatch, stage, name):
    out = beside(trained, tmp_path, *(parent for parent in ("pretrain", "sft", "rm") if parent != stage))
    seal = StageRun.seal_checkpoint

    def seal_and_signal(run: StageRun, step: int, folder: Path) -> None:
        seal(run, step, folder)
        os.kill(os.getpid(), signal.Signals[name])

    with monkeypatch.context() as during:
        during.setattr(StageRun, "seal_checkpoint", seal_and_signal)
        code, printed, line = command(stage, out)
    checkpoint = next((out / ROOT / stage / "checkpoints").glob("step-*"))
    assert code == 128 + signal.Signals[name] and not printed
    assert str(checkpoint) in line and "--resume" in line and (name in line or name == "SIGINT")
    assert not (out / ROOT / stage / "summary.json").exists()
    if (stage, name) == ("ppo", "SIGTERM"):
        assert run_stages(small(), out, "ppo", resume=True)["status"] == "done"
        assert content_of(out / ROOT / "ppo/manifest.json")["resumed_from"] == checkpoint.name


class OutOfMemoryError(RuntimeError):
    """As torch's is called."""


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (MemoryError(), "--fit card"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "memory"),
        (OutOfMemoryError("CUDA out of memory"), "rlhf plan"),
        (OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), "metrics.jsonl"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
    ],
)
def test_memory_and_disks_that_run_out_are_one_line(command, trained, tmp_path, monkeypatch, error, named):
    out = beside(trained, tmp_path, "pretrain")

    def save(folder: Path) -> None:
        (folder / "state").write_text("as it was")

    def fails(run: StageRun, *_: object) -> None:
        run.save_checkpoint(4, save)
        raise error

    monkeypatch.setattr(importlib.import_module("rlhf.stages.sft"), "run_stage", fails)
    code, _, line = command("sft", out)
    assert code and named in line and "--resume" in line
    assert (out / ROOT / "sft/checkpoints/step-000004/state").read_text() == "as it was"


def test_a_limit_of_memory_is_named(trained, tmp_path):
    out = beside(trained, tmp_path, "pretrain")
    line = [sys.executable, "-m", "rlhf.cli", "run", "sft", "--recipe", str(RECIPE), "--out", str(out), *SETS]
    limited = ["bash", "-c", 'ulimit -v 2100000; exec "$@"', "bash", *line]
    done = subprocess.run(limited, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode and last.startswith("error: ") and "memory" in last, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_directory_that_cannot_be_written_is_one_line(command, tmp_path, monkeypatch, stage):
    """As root nothing is read-only, so that the system's answer is played; below a file it is real."""
    (tmp_path / "file").write_text("")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for out in (tmp_path / "file" / "runs", Path("/proc/nothing"), tmp_path / "runs"):
        code, _, line = command(stage, out)
        assert code == 1 and str(out) in line and "--out" in line
        monkeypatch.setattr(Path, "mkdir", read_only)
