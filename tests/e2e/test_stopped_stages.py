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

from rlhf.process import endings
from rlhf.run.directory import StageRun
from rlhf.stages import runner
from tests.helpers import RECIPE, SMALL, beside, content_of, rlhf, run_stages, small

ROOT = Path("cpu-tiny/v1")
PARENTS = ("pretrain", "sft", "rm")


def flags(**more: object) -> list[str]:
    return [part for key, value in (SMALL | more).items() for part in ("--set", f"{key}={json.dumps(value)}")]


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *arguments: rlhf(monkeypatch, capsys, *arguments)


def one_line(err: str) -> str:
    said = ("training pairs are", ", on cpu, into ", "[")  # as a stage begins, and findings
    (line,) = (line for line in err.splitlines() if not any(words in line for words in said))
    return line


@pytest.mark.parametrize(
    ("stage", "name"),
    [("sft", "SIGTERM"), *(("ppo", name) for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1"))],
)
def test_a_signal_ends_a_stage_in_one_line_with_its_checkpoint(command, trained, tmp_path, monkeypatch, stage, name):
    out = beside(trained, tmp_path, *(parent for parent in PARENTS if parent != stage))
    seal = StageRun.seal_checkpoint

    def seal_and_signal(run: StageRun, step: int, folder: Path) -> None:
        seal(run, step, folder)
        os.kill(os.getpid(), signal.Signals[name])

    with monkeypatch.context() as during:
        during.setattr(StageRun, "seal_checkpoint", seal_and_signal)
        code, printed, err = command("run", stage, "--recipe", RECIPE, "--out", out, *flags())
    checkpoint = next((out / ROOT / stage / "checkpoints").glob("step-*"))
    assert code == 128 + signal.Signals[name]
    by = "" if name == "SIGINT" else f" by {name}"
    assert one_line(err) == (f"stopped{by}; {checkpoint} is kept: the same command with --resume continues from it")
    assert not printed
    assert not (out / ROOT / stage / "summary.json").exists()
    if (stage, name) == ("ppo", "SIGTERM"):
        summary = run_stages(small(), out, "ppo", resume=True)
        assert summary["status"] == "done"
        assert content_of(out / ROOT / "ppo/manifest.json")["resumed_from"] == checkpoint.name


def test_a_stage_without_a_checkpoint_says_so(command, tmp_path, monkeypatch):
    monkeypatch.setattr(StageRun, "start", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    code, _, err = command("run", "pretrain", "--recipe", RECIPE, "--out", tmp_path, *flags())
    assert code == 143
    says = "pretrain has no checkpoint yet (the first is due at step 6): the same command begins it anew"
    assert err == f"stopped by SIGTERM; {says}\n"


class OutOfMemoryError(RuntimeError):
    """As torch's is called."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            MemoryError(),
            "out of memory: free some, or allow more, or try a smaller sft.per_device_train_batch_size (now 8)",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "(now 8)"),
        (OutOfMemoryError("CUDA out of memory"), "out of memory on the GPU; `rlhf plan"),
        (OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), "the disk is full; make room"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full; make room"),
        (OSError(errno.EFBIG, "File too large", "a/b"), "a/b: larger than a file may be here; allow more and continue"),
    ],
)
def test_memory_and_disks_that_run_out_are_one_line(command, trained, tmp_path, monkeypatch, error, said):
    out = beside(trained, tmp_path, "pretrain")
    sft = importlib.import_module("rlhf.stages.sft")

    def save(folder: Path) -> None:
        (folder / "state").write_text("as it was")

    def fails(run: StageRun, *_: object) -> None:
        run.save_checkpoint(4, save)
        raise error

    monkeypatch.setattr(sft, "run_stage", fails)
    code, _, err = command("run", "sft", "--recipe", RECIPE, "--out", out, *flags())
    opening, line = err.splitlines()
    assert code == (1 if isinstance(error, OSError) else 71)
    assert opening.startswith("sft: cpu-tiny v1, ") and said in line
    checkpoint = out / ROOT / "sft/checkpoints/step-000004"
    assert (checkpoint / "state").read_text() == "as it was"
    if not isinstance(error, OSError):
        assert f"{checkpoint} is kept: the same command with --resume" in err


def test_memory_that_runs_out_while_libraries_are_loaded(command, trained, tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise ImportError("libtorch.so") from MemoryError()

    monkeypatch.setattr(runner, "quiet_libraries", fails)
    code, _, err = command("run", "sft", "--recipe", RECIPE, "--out", beside(trained, tmp_path, "pretrain"), *flags())
    assert (code, len(err.splitlines())) == (71, 1)
    assert "sft: out of memory" in err and "sft has no checkpoint yet (the first is due at step " in err


@pytest.mark.parametrize(("gigabytes", "stage"), [(1.0, "sft"), (1.0, "ppo"), (2.4, "sft")])
def test_a_limit_of_memory_is_named(trained, tmp_path, gigabytes, stage):
    out = beside(trained, tmp_path, *(parent for parent in PARENTS if parent != stage))
    line = [sys.executable, "-m", "rlhf.cli", "run", stage, "--recipe", str(RECIPE), "--out", str(out), *flags()]
    limited = ["bash", "-c", f'ulimit -v {int(gigabytes * 1e6)}; exec "$@"', "bash", *line]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=300)
    assert (done.returncode, len(done.stderr.splitlines())) == (71, 1), done.stderr
    assert f"{stage}: out of memory (this process may have" in done.stderr and "ulimit -v" in done.stderr


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_directory_that_cannot_be_written_is_one_line(command, tmp_path, monkeypatch, stage):
    """As root nothing is read-only, so that the system's answer is played; below a file it is real."""
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "runs", Path("/proc/nothing")):
        code, _, err = command("run", stage, "--recipe", RECIPE, "--out", out)
        assert (code, len(err.splitlines())) == (1, 1)
        assert "cannot write there" in err and "choose another --out" in err

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    code, _, err = command("run", stage, "--recipe", RECIPE, "--out", tmp_path / "runs")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "cannot write there (Read-only file system); choose another --out" in err


@pytest.mark.parametrize("out", ["d" * 5000, "/".join(["d" * 200] * 40), "a\0b", "a\udcff"])
def test_an_output_folder_that_cannot_be_is_refused(command, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    code, _, err = command("run", "pretrain", "--recipe", RECIPE, "--out", out)
    assert code in (1, 2)
    assert "Traceback" not in err and max(map(len, err.splitlines())) <= 2007
    assert not list(tmp_path.rglob("manifest.json"))


def test_nobody_listens_when_a_stage_is_called_as_a_function():
    with endings.reporting_progress(lambda: "never asked"):
        assert endings.stop_for(15).progress == ""


def test_the_command_that_resumes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rlhf", "run", "sft", "--hw", "cpu", "--resume", "--out", "my runs"])
    assert runner.resume_command() == "`rlhf run sft --hw cpu --out 'my runs' --resume`"
    monkeypatch.setattr(sys, "argv", ["rlhf", "run", "sft", "--set", "x" * 600])
    assert runner.resume_command() == "the same command with --resume"
    monkeypatch.setattr(sys, "argv", ["bench", "--steps", "3"])
    assert runner.resume_command() == "the same command with --resume"
