"""PPO is killed without warning, again and again, and ends with the bytes of a run that was left alone."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.run import checkpoint_step, read_json, read_lines
from tests.conftest import RECIPE, SMALL, run_stages, small

ROOT = Path("cpu-tiny/v1")
LONG = {"ppo.steps": 24, "ppo.save_steps": 1, "ppo.eval_steps": 8}


def beside(trained: Path, out: Path) -> Path:
    (out / ROOT).mkdir(parents=True)
    for name in ("data", "pretrain", "sft", "rm"):
        (out / ROOT / name).symlink_to(trained / ROOT / name)
    return out


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    flags = [part for key, value in (SMALL | LONG).items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "rlhf.cli", "run", "ppo", "--recipe", str(RECIPE), "--out", str(out), *flags]
    return subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def kill_when(process: subprocess.Popen[str], moment: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and not moment():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.0005)
    assert process.poll() is None, f"it ended before the moment came: {process.stderr.read()}"
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_three_times_it_ends_with_the_same_bytes(trained, tmp_path):
    """Twice at a random time after a random step, once while a checkpoint is being written."""
    whole = beside(trained, tmp_path / "whole") / ROOT / "ppo"
    run_stages(small(**{key.replace(".", "__"): value for key, value in LONG.items()}), tmp_path / "whole", "ppo")
    ppo = beside(trained, tmp_path / "cut") / ROOT / "ppo"
    seed = random.SystemRandom().randrange(10**6)
    draw = random.Random(seed)
    print(f"random moments from seed {seed}")

    def later(first: int, last: int) -> Callable[[], bool]:
        step, delay = draw.randint(first, last), draw.uniform(0, 0.3)
        reached: list[float] = []

        def moment() -> bool:
            if not reached and len(read_lines(ppo / "metrics.jsonl")) >= step:
                reached.append(time.monotonic() + delay)
            return bool(reached) and time.monotonic() >= reached[0]

        return moment

    def while_writing() -> bool:
        partial = next((ppo / "checkpoints").glob(".partial-*"), None)
        return partial is not None and int(partial.name.split("-")[1]) > 12

    kill_when(start(tmp_path / "cut"), later(2, 6))
    kill_when(start(tmp_path / "cut", "--resume"), while_writing)
    kill_when(start(tmp_path / "cut", "--resume"), later(16, 20))
    assert not (ppo / "summary.json").exists()
    last = start(tmp_path / "cut", "--resume")
    assert last.wait(120) == 0, last.stderr.read()

    assert read_json(ppo / "manifest.json")["resumed_from"] != "step-000000"
    for name in ("metrics.jsonl", "samples.jsonl", "adapter/adapter_model.safetensors", "checkpoints/best.json"):
        assert (ppo / name).read_bytes() == (whole / name).read_bytes(), f"{name} differs; moments from seed {seed}"
    assert read_json(ppo / "summary.json")["metrics"] == read_json(whole / "summary.json")["metrics"]


@pytest.mark.parametrize(("keep", "limit"), [(2, None), (1, -1.0)])
def test_old_checkpoints_go_and_the_best_stays(trained, tmp_path, keep, limit, capsys):
    changes = {"ppo__steps": 5, "ppo__keep_checkpoints": keep, "ppo__learning_rate": 0.02, "ppo__adapter": "best"}
    if limit is not None:
        changes["ppo__best_kl_limit"] = 1e-9  # nothing but an untrained policy could stay within it
    out = beside(trained, tmp_path)
    summary = run_stages(small(**changes), out, "ppo")
    found = read_json(out / ROOT / "ppo/checkpoints/best.json")
    steps = sorted(map(checkpoint_step, (out / ROOT / "ppo/checkpoints").glob("step-*")))
    rows = {row["step"]: row for row in read_lines(out / ROOT / "ppo/metrics.jsonl")}
    adapter = (out / ROOT / "ppo/adapter/adapter_model.safetensors").read_bytes()
    if limit is not None:
        assert found["best"] is None is summary["metrics"]["best_step"]
        assert steps == [5]
        assert "no checkpoint is within best_kl_limit" in capsys.readouterr().err
        chosen = 5
    else:
        scores = {step: row["eval/score"] for step, row in rows.items()}
        assert len(scores) == 5, "every checkpoint is evaluated"
        chosen = max(scores, key=scores.get)
        assert found["best"]["step"] == summary["metrics"]["best_step"] == chosen
        assert steps == sorted({chosen, 4, 5})
    kept = out / ROOT / f"ppo/checkpoints/step-{chosen:06d}/adapter/adapter_model.safetensors"
    assert adapter == kept.read_bytes()
    assert summary["metrics"]["score"] == pytest.approx(rows[chosen]["eval/score"], abs=1e-6)
