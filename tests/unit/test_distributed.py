"""Shares of batches, who may start, how processes are started, and what is said when one ends."""

import os
import sys
from types import SimpleNamespace

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.process import children, distributed, environment, launching
from rlhf.recipe.chain import differences
from rlhf.recipe.schema import Sft
from rlhf.recipe.stages import STAGES
from rlhf.stages.supervised.row_order import LengthBuckets, ShardedBatches
from tests.helpers import FIXTURES, RECIPE, small

RECIPES = RECIPE.parents[1]


def be(monkeypatch, rank: int, world: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.setenv(name, str(value))


def test_a_child_finds_this_checkout_and_what_this_process_was_given(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/carried", "/more"]))
    root = str(RECIPE.parents[2])
    environment = children.child_environment(HF_HUB_OFFLINE="1")
    assert environment["PYTHONPATH"].split(os.pathsep) == [root, "/carried", "/more"]
    assert environment["HF_HUB_OFFLINE"] == "1" and environment["PATH"] == os.environ["PATH"]
    monkeypatch.delenv("PYTHONPATH")
    assert children.child_environment()["PYTHONPATH"] == root  # an empty entry would be the working directory


@pytest.mark.parametrize(
    ("rows", "accumulated", "count", "share"),
    [(4, 16, 8, (4, 2)), (4, 1, 2, (2, 1)), (4, 2, 4, (2, 1)), (6, 3, 2, (3, 3)), (5, 7, 1, (5, 7))],
)
def test_a_step_has_the_same_rows_on_any_number_of_devices(rows, accumulated, count, share):
    """Accumulation is divided before micro-batches are."""
    changes = {"sft__per_device_train_batch_size": rows, "sft__gradient_accumulation_steps": accumulated}
    assert small(**changes).recipe.options(Sft).per_device(count) == share
    assert share[0] * share[1] * count == rows * accumulated


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(UserError, match=r"sft: gradient_accumulation_steps: 1 or per_device_train_batch_size: 8 must"):
        small(hardware__count=3)
    with pytest.raises(UserError, match=r"ppo: batch_size / num_mini_batches.* hardware.count"):
        small(hardware__count=2, ppo__batch_size=6, ppo__num_mini_batches=2)


def test_the_number_of_processes_decides_nothing():
    one, two = small().recipe, small(hardware__count=2, hardware__engine="fsdp").recipe
    for stage in STAGES:
        assert recipe.deciding_settings(one, stage) == recipe.deciding_settings(two, stage)
    alone = {"pretrain", "evaluate", "merge"}
    assert [two.processes(stage) for stage in STAGES] == [1 if s in alone else 2 for s in STAGES]


@pytest.mark.parametrize(("rows", "kept"), [(64, 64), (61, 60)])
def test_ranks_share_every_batch(monkeypatch, rows, kept):
    """What is left over and cannot be shared equally, of the last batch only, is left out."""
    order = LengthBuckets([1 + (7 * i) % 50 for i in range(rows)], 16, seed=3)
    shares = []
    for rank in (0, 1):
        be(monkeypatch, rank, 2)
        sharded = ShardedBatches(order, micro_batch=4, accumulated=2)
        shares.append(list(sharded))
        assert len(sharded) == len(shares[-1])
    steps = [
        [row for part in zip(*parts, strict=True) for piece in part for row in piece]
        for parts in zip(*([f[i : i + 2] for i in range(0, len(f), 2)] for f in shares), strict=True)
    ]
    whole = list(order)
    assert [sorted(step) for step in steps[:3]] == [sorted(whole[at : at + 16]) for at in (0, 16, 32)]
    assert sorted(row for step in steps for row in step) == sorted(whole[:kept])


@pytest.mark.parametrize(
    ("stage", "count", "world", "message"),
    [
        ("sft", 2, 1, "sft with hardware.count: 2 runs in 2 .* 1 were started"),
        ("ppo", 1, 2, "ppo with hardware.count: 1 runs in 1 .* 2 were started"),
        ("pretrain", 2, 2, "pretrain with hardware.count: 2 runs in 1 .* 2 were started"),
    ],
)
def test_another_number_of_processes_is_refused(monkeypatch, stage, count, world, message):
    be(monkeypatch, 0, world)
    with pytest.raises(UserError, match=message):
        launching.check_world(small(hardware__count=count).recipe, stage)


def test_the_recipe_for_two_processes_is_the_one_for_one():
    one, two = (
        recipe.load(root / name / "v1").recipe.model_dump(mode="json")
        for root, name in ((RECIPES, "cpu-tiny"), (FIXTURES, "2xcpu-tiny"))
    )
    keys = differences(one, two)
    assert [*keys] == ["description", *(f"hardware.{key}" for key in ("count", "name")), "status"]
    assert recipe.resolve("2xcpu", FIXTURES) == FIXTURES / "2xcpu-tiny/v1"


def failure(code: int, time: int = 5, file: str = "<N/A>", message: str = "") -> SimpleNamespace:
    return SimpleNamespace(exitcode=code, timestamp=time, error_file=file, message=message)


def test_the_rank_that_ended_first_is_named(tmp_path):
    file = tmp_path / "error.json"
    file.write_text("{}")
    message = failure(1, 4, str(file), "the data has changed")
    assert launching._failure_message({0: message, 1: failure(-15)}, "rm") == "the data has changed"
    killed = launching._failure_message({0: failure(distributed.LOST, 4), 1: failure(-9, 5)}, "rm")
    assert killed.startswith("rm: rank 1 was killed by SIGKILL") and "`--resume`" in killed
    assert "rank 1 ended with exit code 1" in launching._failure_message({0: failure(-15), 1: failure(1)}, "rm")


LAUNCHERS = (  # what each leaves behind, as their sources and public reports have it
    *("ACCELERATE_USE_FSDP", "FSDP_OFFLOAD_PARAMS", "PMI_SIZE", "PMIX_RANK", "PMI2_SIZE", "OMPI_COMM_WORLD_SIZE"),
    *("MV2_COMM_WORLD_RANK", "MPI_LOCALNRANKS", "MASTER_PORT", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "NODE_RANK"),
    *("TORCHELASTIC_RUN_ID", "PARALLELISM_CONFIG_CP_SIZE", "MEGATRON_LM_TP_DEGREE", "SMDATAPARALLEL_LOCAL_RANK"),
)
ARITHMETIC = (
    *("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DOWNCAST_BF16", "ACCELERATE_FP8_BACKEND"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCHDYNAMO_DISABLE"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "XLA_USE_BF16"),
)
KEPT = ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RANKING_FILE", "MPIRUN_NOTES")


@pytest.mark.parametrize("world", [None, 1, 2])
def test_no_variable_decides_in_the_recipe_s_place(monkeypatch, capsys, world):
    """One process loses what launchers and shells left, a rank of several what is arithmetic. Names are said once."""
    monkeypatch.setattr(os, "environ", dict.fromkeys(LAUNCHERS + ARITHMETIC + KEPT, "1"))
    if world:
        be(monkeypatch, 0, world)
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # a stage's process has not imported it yet
    environment.prepare(small().recipe)
    gone = {*ARITHMETIC} if world == 2 else {*LAUNCHERS, *ARITHMETIC}
    gone |= {*distributed.RANK_VARIABLES} if world == 1 else set()
    assert not gone & os.environ.keys() and set(KEPT) <= os.environ.keys()
    assert f" {', '.join(sorted(gone))}\n" in capsys.readouterr().err and distributed.world() == (world or 1)
    environment.prepare(small().recipe)
    assert capsys.readouterr().err == ""


def test_a_rank_that_is_no_number_is_named(monkeypatch):
    for name in distributed.RANK_VARIABLES:
        monkeypatch.setenv(name, "first")
    with pytest.raises(UserError, match="RANK=first"):
        distributed.rank()
