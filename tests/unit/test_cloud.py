"""The files for rented GPUs and clusters, as far as they can be tried without one."""

import os
import signal
import subprocess
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_a_slurm_job_stops_its_stage_and_is_queued_again(tmp_path):
    """A Makefile whose stage takes a minute unless it is interrupted, and a `scontrol` that notes what it is told."""
    (tmp_path / "Makefile").write_text(
        "ppo:\n\t@bash -c 'trap \"echo stopped; exit 130\" INT; sleep 60 & wait' >> log\n"
    )
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\necho scontrol $@ >> {tmp_path}/log\n")
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "HOME": str(tmp_path)}
    command = ["bash", str(ROOT / "cloud" / "slurm.sh"), "ppo"]
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    time.sleep(2)
    began = time.monotonic()
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=30) == 0
    assert time.monotonic() - began < 20
    assert (tmp_path / "log").read_text().split("\n")[:2] == ["stopped", "scontrol requeue 7"]


def test_a_slurm_job_without_a_target_says_how_it_is_used(tmp_path):
    done = subprocess.run(["bash", str(ROOT / "cloud" / "slurm.sh")], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr


def test_the_skypilot_task_is_yaml_with_the_keys_that_are_used():
    task = yaml.safe_load((ROOT / "cloud" / "skypilot.yaml").read_text())
    assert {"resources", "envs", "setup", "run"} <= set(task)
    assert "make fetch" in task["run"] and "RUNTIME=local" in task["run"]
