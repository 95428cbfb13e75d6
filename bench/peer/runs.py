"""Runs of contenders in separate processes: our stage, TRL's trainer, torchtune's recipe; and the floor's count."""

import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from typing_extensions import TypedDict

from bench.kinds import Floor
from bench.paths import ROOT
from bench.peer.contenders import LEAN, METHODS
from bench.peer.inputs import PEER_RECIPE, SETTINGS, InputSettings
from bench.reading import last_line, read
from bench.steps import telemetry
from rlhf.errors import UserError
from rlhf.process.children import child_environment
from rlhf.process.exhaustion import EXHAUSTED
from rlhf.recipe import Changes

TIMED_PHASES = ("rollout", "score", "update")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    # What `rlhf` asks of glibc itself, for both sides: pages of freed tensors stay with the process.
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}


class ContenderRun(TypedDict, total=False):
    """What one run of a contender prints; of one that does not fit only `out_of_memory`."""

    out_of_memory: bool
    wall: list[float]  # seconds of each counted step
    cpu: list[float]  # seconds of each counted step, of all threads
    growth: int  # bytes of the peak above the loaded models
    phases: dict[str, float]  # median seconds of each phase of ours: CPU's on a CPU, the wall's on a GPU


class _Summary(TypedDict):
    """The key of our summary.json that a run reports."""

    peak_over_loaded_bytes: int


class ContenderDidNotFit(Exception):
    """A contender did not fit on the GPU: a result, not a failure."""


def prepare_ours(method: str, inputs: Path, out: Path, changes: Changes, steps: int, micro: int) -> list[str]:
    """Train the parents of the stage; return the arguments with which `rlhf` runs the stage itself."""
    settings = read(inputs / SETTINGS, InputSettings)
    base = inputs / "base"
    sets: dict[str, object] = {
        "model.name": base,
        "tokenizer.name": base,
        "data.files": f"[{inputs / 'pairs.jsonl'}]",
        "model.dtype": settings["dtype"],
        "hardware.device": settings["device"],
        f"{method}.steps": steps + 1,
        f"{method}.per_device_train_batch_size": micro,
        **changes,
    }
    flags = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    chain = ["sft", "rm", "ppo"] if method == "ppo" else ["sft", method]
    *parents, last = [["run", stage, "--recipe", str(PEER_RECIPE), "--out", str(out), *flags] for stage in chain]
    for stage in parents:
        _call([sys.executable, "-m", "rlhf.cli", *stage, "--if-needed"])
    return last


def run_ours(method: str, inputs: Path, out: Path, changes: Changes, steps: int, micro: int) -> ContenderRun:
    """Run the stage once; return the same keys as TRL's script prints."""
    _call([sys.executable, "-m", "rlhf.cli", *prepare_ours(method, inputs, out, changes, steps, micro)])
    folder = out / "recipe" / "v1" / method
    prefix = "cpu/" if read(inputs / SETTINGS, InputSettings)["device"] == "cpu" else ""
    phases = {name: prefix + name for name in TIMED_PHASES}
    rows = counted_steps(telemetry(folder, ("total", "cpu/total", *phases.values())))
    summary = read(folder / "summary.json", _Summary)
    shutil.rmtree(folder)
    return {
        "wall": [row["total"] for row in rows],
        "cpu": [row["cpu/total"] for row in rows],
        "growth": summary["peak_over_loaded_bytes"],
        "phases": {name: statistics.median(row[key] for row in rows) for name, key in phases.items()},
    }


def counted_steps(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the rows of the steps that count: the first warms up, and the last one also evaluates."""
    return rows[1:-1]


def floor(method: str, inputs: Path, out: Path, micro: int) -> Floor:
    """Return the operations of each phase of a step with the lean trunk, and how many a second the device can do."""
    settings = read(inputs / SETTINGS, InputSettings)
    contender, changes = next((name, x) for name, x in METHODS[method].ours.items() if LEAN.items() <= x.items())
    arguments = prepare_ours(method, inputs, out, changes, 1, micro)
    printed = _call([sys.executable, "-m", "bench.peer.floor", settings["device"], settings["dtype"], "2", *arguments])
    counted = last_line(printed, Floor, "bench.peer.floor")
    counted["contender"] = contender
    return counted


def run_trl(method: str, python: Path, inputs: Path, flags: list[str], steps: int, micro: int) -> ContenderRun:
    """Run TRL's trainer once; return what its script prints."""
    return _run_script("trl_ppo.py" if method == "ppo" else "trl_groups.py", python, inputs, flags, steps, micro)


def run_torchtune(python: Path, inputs: Path, flags: list[str], steps: int, micro: int) -> ContenderRun:
    """Run torchtune's recipe once; return what its script prints."""
    return _run_script("torchtune_ppo.py", python, inputs, flags, steps, micro)


def _run_script(name: str, python: Path, inputs: Path, flags: list[str], steps: int, micro: int) -> ContenderRun:
    script = Path(__file__).with_name(name)
    printed = _call([str(python), str(script), str(inputs), "--steps", str(steps), "--micro", str(micro), *flags])
    return last_line(printed, ContenderRun, name)


def _call(command: list[str]) -> str:
    environment = child_environment(**ENVIRONMENT)
    if not command[1].startswith("-"):  # a script: it finds our modules, and its environment's packages stay its own
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == EXHAUSTED or (done.returncode and "CUDA out of memory" in done.stderr):  # ours, or a script
        raise ContenderDidNotFit
    if done.returncode:
        raise UserError(f"{' '.join(command[:6])} …", done.stderr[-2000:])
    return done.stdout


def attempt(run: Callable[[], ContenderRun]) -> ContenderRun:
    """Return what a run took, in the units of `ContenderRun`, or that it did not fit."""
    try:
        return run()
    except ContenderDidNotFit:
        return {"out_of_memory": True}
