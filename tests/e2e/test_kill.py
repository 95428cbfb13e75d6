"""PPO is killed without warning, again and again, and ends with the bytes of a run that was left alone."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.evaluation.policies import gains_over_start
from rlhf.run.checkpoints import checkpoint_problem, checkpoint_step
from rlhf.stages.online import session
from tests.helpers import RECIPE, SMALL, beside, content_of, run_stages, small
from tests.lines import read_intact_lines

ROOT = Path("cpu-tiny/v1")
PARENTS = ("pretrain", "sft", "rm")
LONG = {"ppo.steps": 16, "ppo.save_steps": 1, "ppo.eval_steps": 8}


def start(out: Path, *more: str) -> subprocess.Popen[bytes]:
    flags = [part for key, value in (SMALL | LONG).items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "rlhf.cli", "run", "ppo", "--recipe", str(RECIPE), "--out", str(out), *flags]
    return subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_when(process: subprocess.Popen[bytes], moment: Callable[[], bool], pause: float = 0.005) -> None:
    """Kill a process at a moment that is looked for every `pause` seconds; looking takes time from the process."""
    while process.poll() is None and not moment():
        time.sleep(pause)
    assert process.poll() is None, "it ended before the moment came"
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_twice_it_ends_with_the_same_bytes(trained, tmp_path):
    """Once at a random time after a random step, once while a checkpoint is being written."""
    whole = beside(trained, tmp_path / "whole", *PARENTS) / ROOT / "ppo"
    run_stages(small(**{key.replace(".", "__"): value for key, value in LONG.items()}), tmp_path / "whole", "ppo")
    cut = beside(trained, tmp_path / "cut", *PARENTS) / ROOT / "ppo"
    seed = int(os.environ.get("RLHF_KILL_SEED") or random.SystemRandom().randrange(10**6))
    draw = random.Random(seed)
    print(f"a random moment from RLHF_KILL_SEED={seed}")
    step, delay = draw.randint(2, 6), draw.uniform(0, 0.3)
    reached: list[float] = []

    def later() -> bool:
        log = cut / "metrics.jsonl"
        if not reached and log.exists() and log.read_bytes().count(b"\n") >= step:
            reached.append(time.monotonic() + delay)
        return bool(reached) and time.monotonic() >= reached[0]

    def while_writing() -> bool:
        partial = next((cut / "checkpoints").glob(".partial-*"), None)
        return partial is not None and int(partial.name.split("-")[1]) > 11

    def resumed_at() -> int:
        return checkpoint_step(Path(content_of(cut / "manifest.json")["resumed_from"] or "step-0"))

    kill_when(start(tmp_path / "cut"), later)
    kill_when(start(tmp_path / "cut", "--resume"), while_writing, pause=0.0005)
    assert resumed_at() >= 1
    assert not (cut / "summary.json").exists()
    last = start(tmp_path / "cut", "--resume")
    assert last.wait() == 0
    assert resumed_at() >= 11
    assert not list(cut.parent.glob("ppo.before*")), "a run that starts over sets the old one aside"

    for name in ("metrics.jsonl", "samples.jsonl", "adapter/adapter_model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), f"{name} differs; the moment from seed {seed}"
    assert content_of(cut / "summary.json")["metrics"] == content_of(whole / "summary.json")["metrics"]


@pytest.mark.parametrize(("keep", "limited"), [(2, False), (1, True)])
def test_old_checkpoints_go_and_the_best_stays(trained, tmp_path, keep, limited, capsys):
    changes = {"ppo__steps": 5, "ppo__keep_checkpoints": keep, "ppo__learning_rate": 0.02, "ppo__adapter": "best"}
    if limited:
        changes["ppo__best_kl_limit"] = 1e-9  # nothing but an untrained policy could stay within it
    out = beside(trained, tmp_path, *PARENTS)
    summary = run_stages(small(**changes), out, "ppo")
    best = summary["metrics"]["best_step"]
    steps = sorted(map(checkpoint_step, (out / ROOT / "ppo/checkpoints").glob("step-*")))
    rows = {row["step"]: row for row in read_intact_lines(out / ROOT / "ppo/metrics.jsonl")}
    adapter = (out / ROOT / "ppo/adapter/adapter_model.safetensors").read_bytes()
    if limited:
        assert best is None
        assert steps == [5]
        assert "no checkpoint has a finite score within best_kl_limit" in capsys.readouterr().err
        chosen = 5
    else:
        scores = {step: row["eval/score"] for step, row in rows.items()}
        assert len(scores) == 5, "every checkpoint is evaluated"
        chosen = max(scores, key=lambda step: scores[step])
        assert best == chosen
        assert steps == sorted({chosen, 4, 5})
    kept = out / ROOT / f"ppo/checkpoints/step-{chosen:06d}/adapter/adapter_model.safetensors"
    assert adapter == kept.read_bytes()
    assert summary["metrics"]["score"] == pytest.approx(rows[chosen]["eval/score"], abs=1e-6)


def test_a_damaged_newest_checkpoint_does_not_crowd_out_the_good_ones(trained, tmp_path):
    changes = {"ppo__steps": 5, "ppo__keep_checkpoints": 2}
    out = beside(trained, tmp_path, *PARENTS)
    folder = out / ROOT / "ppo"
    run_stages(small(**changes), out, "ppo")
    (folder / "summary.json").unlink()
    (folder / "checkpoints/step-000005/state.pt").write_bytes(b"cut short")
    run_stages(small(**changes), out, "ppo", resume=True)
    assert content_of(folder / "manifest.json")["resumed_from"] == "step-000004"
    assert all(checkpoint_problem(found) is None for found in (folder / "checkpoints").glob("step-*"))


def test_an_evaluation_that_is_not_finite_is_no_candidate_for_the_best(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "gains_over_start", lambda *args: gains_over_start(*args) | {"score": math.nan})
    out = beside(trained, tmp_path, *PARENTS)
    summary = run_stages(small(ppo__steps=2), out, "ppo")
    assert summary["metrics"]["best_step"] is None
    rows = read_intact_lines(out / ROOT / "ppo/metrics.jsonl")
    assert [row["eval/score"] for row in rows] == [None, None]
