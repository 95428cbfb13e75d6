"""Two processes over gloo make the run that one makes, and end and go on as one does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.process.task import task_of
from rlhf.recipe import PinnedRecipe, as_yaml
from rlhf.recipe.rehearsal import random_weights_changes
from rlhf.stages import runner
from tests.helpers import FIXTURES, GROUP, RECIPE, beside, content_of, free_port, run_stages, small
from tests.lines import read_intact_lines

pytestmark = pytest.mark.slow

ROOT = Path("cpu-tiny/v1")
PARENTS = {"sft": ["pretrain"], "rm": ["pretrain", "sft"], "dpo": ["pretrain", "sft"], "ppo": ["pretrain", "sft", "rm"]}
SIXTEEN = {"logging_steps": 1, "save_steps": 8, "num_train_epochs": 9, "max_steps": 16}  # two epochs
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def sizes(changes: Mapping[str, object]) -> PinnedRecipe:
    return small(**{key.replace(".", "__"): value for key, value in changes.items()})


def command(stage: str, out: Path, changes: Mapping[str, object], recipe: Path = RECIPE) -> list[str]:
    flags = [part for key, value in sizes(changes).overrides.items() for part in ("--set", f"{key}={as_yaml(value)}")]
    return ["rlhf.cli", "run", stage, "--recipe", str(recipe), "--out", str(out), *flags]


def run_two(stage: str, out: Path, changes: Mapping[str, object], recipe: Path = RECIPE) -> None:
    line = command(stage, out, {**changes, "hardware.count": 2}, recipe)
    done = subprocess.run([sys.executable, "-m", *line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compare(one: Path, two: Path, steps: int, adapter: str = "adapter") -> None:
    """Every number that was logged, and the adapter, agree but for the rounding of float32."""
    rows, others = read_intact_lines(one / "metrics.jsonl")[:steps], read_intact_lines(two / "metrics.jsonl")
    assert len(rows) == len(others) == steps
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert row == pytest.approx(other, abs=2e-5, rel=2e-5)
    adapters = (load_file(folder / adapter / "adapter_model.safetensors") for folder in (one, two))
    difference = torch.cat([(a - b).abs().flatten() for a, b in zip(*map(dict.values, adapters), strict=True)])
    assert difference.max() < 5e-6 and difference.mean() < 2e-7


CHANGES: dict[str, dict[str, Any]] = {
    **{stage: {f"{stage}.{key}": value for key, value in SIXTEEN.items()} for stage in ("sft", "rm", "dpo")},
    **{stage: {stage: GROUP | {"steps": 6, "save_steps": 3, "eval_steps": 3}} for stage in ("rloo", "grpo")},
}
for _stage in ("sft", "rm", "dpo"):
    CHANGES[_stage] |= {f"{_stage}.max_samples": 60, f"{_stage}.eval_steps": 8, f"{_stage}.max_eval_samples": 14}


# On a random base, which needs no training; NF4 wants rows of whole blocks of 64.
FOUR_BITS: dict[str, Any] = {"model.architecture.hidden_size": 64, "model.architecture.intermediate_size": 128}
FOUR_BITS |= {"model.quantization": "nf4", "hardware.engine": "fsdp"}
FOUR_BITS |= random_weights_changes(sizes(FOUR_BITS).recipe, 120, "hh")


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory) -> Path:
    """Root of what PPO on a base in four bits builds on."""
    out: Path = tmp_path_factory.mktemp("four-bits")
    run_stages(sizes(FOUR_BITS), out, "sft", "rm")
    return out


@pytest.fixture(scope="module")
def run_by_two(trained, four_bits, tmp_path_factory) -> Path:
    """Root of stages that two processes have run; each is left as a command of its own would leave it."""
    out = beside(trained, tmp_path_factory.mktemp("two"), *PARENTS["ppo"])
    stages_to_run = [(stage, str(out), CHANGES[stage] | {"hardware.count": 2}) for stage in ("dpo", "rloo", "grpo")]
    # the chain's reward model is among the parents of these, so that another one is trained elsewhere
    rm = beside(trained, tmp_path_factory.mktemp("two"), *PARENTS["rm"])
    stages_to_run.append(("rm", str(rm), CHANGES["rm"] | {"hardware.count": 2}))
    divided = beside(four_bits, out / "four-bits", "sft", "rm")  # their stages under fsdp need the processes alone
    stages_to_run.append(("ppo", str(divided), FOUR_BITS | {"hardware.count": 2}))
    (out / "stages.json").write_text(json.dumps(stages_to_run))
    command = [*LAUNCHER, "-m", "tests.e2e.ranks", str(out / "stages.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    (out / ROOT / "rm").unlink()
    (rm / ROOT / "rm").rename(out / ROOT / "rm")
    return out


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_trl_stages_take_the_same_sixteen_steps(request, trained, tmp_path, stage):
    """60 rows in batches of 8: the last of each epoch is a short one, which two processes share too.

    So is the last of the two validations' batches.
    """
    changes = CHANGES[stage]
    one = beside(trained, tmp_path / "one", *PARENTS[stage])
    run_stages(sizes(changes), one, stage)
    if stage == "sft":
        two = beside(trained, tmp_path / "two", *PARENTS[stage])
        run_two(stage, two, changes)
    else:
        two = request.getfixturevalue("run_by_two")
    compare(one / ROOT / stage, two / ROOT / stage, 16 + 2)
    manifest = content_of(two / ROOT / stage / "manifest.json")
    assert manifest["device"]["processes"] == 2 and manifest["device"]["engine"] == "ddp"
    loaded = sizes(changes | {"hardware.count": 2})
    again, is_new = runner.execute(task_of(loaded, stage, two), loaded)
    assert not is_new and again is not None and again.plain() == content_of(two / ROOT / stage / "summary.json"), (
        "done: nobody else is needed"
    )


PPO = {"ppo.steps": 16, "ppo.save_steps": 6, "ppo.eval_steps": 6, "ppo.lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def ppo_alone(trained, tmp_path_factory) -> Path:
    """Sixteen steps of PPO in one process."""
    out = beside(trained, tmp_path_factory.mktemp("alone"), *PARENTS["ppo"])
    run_stages(sizes(PPO), out, "ppo")
    return out / ROOT / "ppo"


def with_fsdp(folder: Path) -> Path:
    """The recipe with accelerate's settings for FSDP beside it."""
    recipe = folder / ROOT
    recipe.mkdir(parents=True)
    for file in (RECIPE / "recipe.yaml", FIXTURES / "2xcpu-tiny/v1/accelerate-fsdp.yaml"):
        shutil.copy(file, recipe)
    return recipe


def test_ppo_takes_the_same_steps_with_its_base_divided(trained, tmp_path, ppo_alone):
    recipe = with_fsdp(tmp_path)
    two = beside(trained, tmp_path / "two", *PARENTS["ppo"])
    changes = PPO | {"ppo.steps": 6, "hardware.engine": "fsdp", "ppo.gradient_checkpointing": True}
    run_two("ppo", two, changes, recipe)
    compare(ppo_alone, two / ROOT / "ppo", 6, "checkpoints/step-000006/adapter")


def test_a_base_in_four_bits_is_divided_too(four_bits, run_by_two):
    run_stages(sizes(FOUR_BITS), four_bits, "ppo")
    compare(four_bits / ROOT / "ppo", run_by_two / "four-bits" / ROOT / "ppo", 4)


def test_a_rank_that_dies_ends_the_run_and_another_number_of_processes_resumes_it(trained, tmp_path, ppo_alone):
    out = beside(trained, tmp_path, *PARENTS["ppo"])
    folder = out / ROOT / "ppo"
    line = command("ppo", out, PPO | {"hardware.count": 2})
    started = subprocess.Popen([sys.executable, "-m", *line], stderr=subprocess.PIPE, text=True)
    while len(read_intact_lines(folder / "metrics.jsonl")) < 14:
        assert started.poll() is None
        time.sleep(0.01)
    ranks = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    victim = next(pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(int(victim), signal.SIGKILL)
    _, err = started.communicate()
    assert started.returncode == 1
    (error,) = (text for text in err.splitlines() if text.startswith("error: "))
    assert error.startswith("error: ppo: rank 1 was killed by SIGKILL") and "`--resume`" in error, err
    run_stages(sizes(PPO), out, "ppo", resume=True)
    assert content_of(folder / "manifest.json")["resumed_from"] == "step-000012"
    compare(ppo_alone, folder, 16)


def test_ranks_gather_rows_numbers_and_shards_as_one_process_has_them(run_by_two):
    assert {file.name for file in run_by_two.glob("gathered-*")} == {"gathered-0", "gathered-1"}


def test_ranks_that_differ_do_not_start(trained, tmp_path):
    """As on two machines: each process is given its rank, and rank 1 another learning rate."""
    out = beside(trained, tmp_path, "pretrain")
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in (0, 1):
        line = command("sft", out, {"hardware.count": 2, "sft.learning_rate": [1e-3, 2e-3][rank]})
        ranked = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen([sys.executable, "-m", *line], env=ranked, stderr=subprocess.PIPE, text=True)
        started.append(process)
    for process in started:
        _, err = process.communicate()
        assert process.returncode == 1 and "has another recipe than rank 0" in err and "rank 1 (on " in err
    assert not (out / ROOT / "sft").exists()


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_groups_take_the_same_steps(trained, tmp_path, run_by_two, stage):
    """Two prompts with four answers each: a group is sampled by one process, and both know all rewards."""
    one = beside(trained, tmp_path, *PARENTS["ppo"])
    run_stages(sizes(CHANGES[stage]), one, stage)
    compare(one / ROOT / stage, run_by_two / ROOT / stage, 6)
