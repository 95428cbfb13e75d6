"""The files for rented GPUs and clusters, as far as they can be tried without one."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]


def test_a_slurm_job_stops_its_stage_and_is_queued_again(tmp_path):
    """A Makefile whose stage takes a minute unless it is interrupted, and a `scontrol` that notes what it is told."""
    (tmp_path / "Makefile").write_text(
        "ppo:\n\t@bash -c 'trap \"echo stopped; exit 130\" INT; echo started; sleep 60 & wait' >> log\n"
    )
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\necho scontrol $@ >> {tmp_path}/log\n")
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "HOME": str(tmp_path)}
    command = ["bash", str(ROOT / "cloud" / "slurm.sh"), "ppo"]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background would not
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "start_new_session": True, "preexec_fn": listens}
    job = subprocess.Popen(command, env=environment, **options)
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and log.read_text() == "started\n")
    job.send_signal(signal.SIGINT)
    assert job.wait() == 0
    assert log.read_text().splitlines() == ["started", "stopped", "scontrol requeue 7"]


def stand_in(folder: Path, name: str, line: str) -> None:
    """A program of that name."""
    (folder / name).write_text(f"#!/bin/bash\n{line}\n")
    (folder / name).chmod(0o755)


def test_a_slurm_job_on_several_machines_starts_a_launcher_on_each(tmp_path):
    """srun runs its command as on the first of two machines with four GPUs each."""
    stand_in(tmp_path, "scontrol", "echo node-7; echo node-8")
    stand_in(tmp_path, "srun", 'shift; exec "$@"')
    stand_in(tmp_path, "torchrun", 'echo "$@"')
    shutil.copytree(ROOT / "cloud", tmp_path / "cloud")  # away from .venv, whose torchrun would be taken
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "h100:4"}
    command = ["bash", str(ROOT / "cloud" / "slurm-nodes.sh"), "ppo", "--hw", "8xh100"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    arguments = done.stdout.strip()
    assert arguments.startswith("--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node-7:29400")
    assert arguments.endswith("-m rlhf.cli run ppo --hw 8xh100")


def test_rays_workers_run_the_stage(monkeypatch, tmp_path):
    """What each worker does; Ray itself is not installed here."""
    spec = importlib.util.spec_from_file_location("ray_train", ROOT / "cloud" / "ray_train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen: list[list[str]] = []
    monkeypatch.setattr("rlhf.cli.main", lambda: seen.append(sys.argv))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.chdir(tmp_path)
    module.work({"folder": str(ROOT), "arguments": ["ppo", "--hw", "8xh100"]})
    assert seen == [["rlhf", "run", "ppo", "--hw", "8xh100"]]
