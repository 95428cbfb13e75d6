"""CUDA settings that can be checked without a GPU: variables, the choice of kernels, the memory cap."""

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.process import cuda
from rlhf.process.torch_setup import device_of, set_up_torch
from tests.helpers import small

ROOT = Path(__file__).parents[2]
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture
def environment(monkeypatch):
    """No variable of CUDA is set, whatever a test sets is undone."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def kernels() -> Iterator[None]:
    """The choice of kernels is as before when a test ends."""
    settings: Any = torch.utils.deterministic  # a module whose attribute is a property, which stubs lack
    cudnn, fill = torch.backends.cuda.cudnn_sdp_enabled(), settings.fill_uninitialized_memory
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    settings.fill_uninitialized_memory = fill


def on_cuda(**changes) -> recipe.Recipe:
    return small(hardware__device="cuda", **changes).recipe


def test_the_allocator_s_segments_can_grow_unless_the_user_chose_otherwise(environment):
    cuda.set_environment(small().recipe)
    assert not any(name in os.environ for name in NAMES)
    cuda.set_environment(on_cuda())
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    environment.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    cuda.set_environment(on_cuda())
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    environment.delenv("PYTORCH_ALLOC_CONF")
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")
    cuda.set_environment(on_cuda())
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(
    ("name", "value", "expandable"),
    [
        (None, "", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:true", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", False),
    ],
)
def test_predictions_follow_the_allocator_s_settings(environment, name, value, expandable):
    if name:
        environment.setenv(name, value)
    assert cuda.expandable_segments() is expandable


def test_a_deterministic_recipe_fixes_the_workspace_of_cublas(environment):
    cuda.set_environment(on_cuda(hardware__deterministic=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    environment.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cuda.set_environment(on_cuda(hardware__deterministic=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_stage_sets_the_variables_before_torch_starts(tmp_path):
    """Afterwards it stops: there is no GPU. By then all libraries are imported, without torch's compiler."""
    code = f"""
import os, sys
from rlhf import cli; from rlhf.process import cuda
def first(recipe, real=cuda.set_environment):
    real(recipe)
    print("torch" in sys.modules, os.environ["PYTORCH_ALLOC_CONF"])
    cuda.set_environment = real
cuda.set_environment = first
sys.argv = ["rlhf", "run", "pretrain", "--hw", "cpu", "--out", {str(tmp_path)!r}, "--set", "hardware.device=cuda"]
try:
    cli.main()
finally:
    print("peft" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
"""
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["False expandable_segments:True", "True False"]
    assert ("finds no usable GPU" if torch.version.cuda else "is built for CPUs alone") in done.stderr
    assert "--hw cpu" in done.stderr


@pytest.mark.parametrize(("built_for", "expected"), [(None, "`rm -r .venv`"), ("13.0", "see `nvidia-smi`")])
def test_a_torch_without_cuda_is_told_from_a_machine_without_a_gpu(monkeypatch, built_for, expected):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=expected):
        device_of(small(hardware__device="cuda").recipe)


@pytest.mark.parametrize("deterministic", [False, True])
def test_cudnn_attention_is_off_and_determinism_is_as_the_recipe_says(environment, kernels, deterministic):
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    environment.setattr(torch.cuda, "is_available", lambda: True)
    environment.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    set_up_torch(on_cuda(hardware__deterministic=deterministic))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    if deterministic:  # operations without a deterministic kernel must still run
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_cap_is_a_share_of_the_card_without_the_context(monkeypatch):
    """torch's own check of the device runs; only what asks the card is replaced."""
    shares = []
    properties = SimpleNamespace(total_memory=80_000_000_000)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *share: shares.append(share), raising=False)
    with pytest.raises(ValueError, match="specified index"):  # what torch does with a device of ours
        torch.cuda.set_per_process_memory_fraction(0.5, torch.device("cuda"))
    for cap, device in (("24GB", "cuda"), ("24GiB", "cuda:1"), ("200gb", "cuda")):
        monkeypatch.setenv("RLHF_VRAM_CAP", cap)
        cuda.cap_memory(torch.device(device))
    assert shares == [(pytest.approx(23.4 / 80), 3), (pytest.approx((24 * 1.073741824 - 0.6) / 80), 1), (1.0, 3)]
    for cap, message in (
        ("24", "write a size"),
        ("nan", "write a size"),
        ("0.5GB", "context alone takes about 0.6 GB"),
    ):
        monkeypatch.setenv("RLHF_VRAM_CAP", cap)
        with pytest.raises(UserError, match=f"RLHF_VRAM_CAP={cap}: .*{message}"):
            cuda.cap_memory(torch.device("cuda"))
        with pytest.raises(UserError, match=f"RLHF_VRAM_CAP={cap}: .*{message}"):  # on any device
            cuda.cap_memory(torch.device("cpu"))
    monkeypatch.setenv("RLHF_VRAM_CAP", "24GB")
    cuda.cap_memory(torch.device("cpu"))
    monkeypatch.delenv("RLHF_VRAM_CAP")
    cuda.cap_memory(torch.device("cuda"))
    assert len(shares) == 3


class Recorder:
    """Stands for torch.cuda's streams, for a graph and for the allocator: notes what is called on it.

    invalid: CUDA refuses what was captured. leaves: the allocator ends the capture all the same, as torch 2.13's does.
    """

    def __init__(self, invalid: bool = False, leaves: bool = True) -> None:
        self.called: list[str] = []
        self.invalid, self.leaves = invalid, leaves
        self.underway: list[object] = []  # pools that a capture allocates in
        self.uses = 0  # of the pool

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.called.append(f"begin {capture_error_mode}")
        self.underway.append(pool)
        self.uses += 1

    def capture_end(self) -> None:
        self.called.append("end")
        if self.leaves or not self.invalid:
            self.end_allocation(0, self.underway[-1])
        if self.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def end_allocation(self, device: int, pool: object) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording")
        self.underway.remove(pool)

    def release(self, device: int, pool: object) -> None:
        self.uses -= 1

    def wait_stream(self, stream: object) -> None:
        self.called.append("wait")


def stand_for_cuda(patch: pytest.MonkeyPatch, recorder: Recorder, free: int = 2**40, cap: float = 1.0) -> None:
    """Let a recorder stand for a card of 64 GiB of which torch holds 31."""
    cuda._capture_stream.cache_clear()
    patch.setattr(torch.cuda, "mem_get_info", lambda: (free, 64 * 2**30))
    patch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: cap)
    patch.setattr(torch.cuda, "memory_reserved", lambda: 31 * 2**30)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "empty_cache", lambda: recorder.called.append("empty"))
    patch.setattr(torch.cuda, "Stream", lambda: recorder)
    patch.setattr(torch.cuda, "current_stream", lambda: recorder)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    patch.setattr(torch._C, "_cuda_endAllocateToPool", recorder.end_allocation)
    patch.setattr(torch._C, "_cuda_releasePool", recorder.release)


@pytest.mark.parametrize(
    ("free", "cap", "emptied"), [(2**31, 1.0, False), (2**31 - 1, 1.0, True), (2**40, 0.5, True)], ids=str
)
def test_the_cache_is_emptied_before_a_capture_only_on_a_full_card(monkeypatch, free, cap, emptied):
    """A card of 64 GiB of which torch holds 31; half of it is the last case's cap. The capture ends in any case.

    On a card with room the memory of dropped graphs is returned at every eighth capture.
    """
    recorder = Recorder()
    stand_for_cuda(monkeypatch, recorder, free, cap)
    graph: Any = recorder
    with pytest.raises(ZeroDivisionError), cuda.capturing(graph):
        recorder.called.append("step")
        raise ZeroDivisionError
    assert recorder.called == [*["empty"] * emptied, "wait", "begin thread_local", "step", "end"]
    recorder.called.clear()
    for _ in range(2 * cuda.EMPTIED_EVERY):
        with cuda.capturing(graph):
            pass
    cuda._capture_stream.cache_clear()
    assert recorder.called.count("wait") == 4 * cuda.EMPTIED_EVERY
    assert recorder.called.count("empty") == (2 * cuda.EMPTIED_EVERY if emptied else 2)


@pytest.mark.parametrize("leaves", [False, True], ids=["torch 2.11", "torch 2.13"])
@pytest.mark.parametrize("says", ["operation not permitted when stream is capturing", None])
def test_after_a_refused_capture_the_allocator_is_in_none(monkeypatch, leaves, says):
    """The error is that of the block, if it has one."""
    recorder = Recorder(invalid=True, leaves=leaves)
    stand_for_cuda(monkeypatch, recorder)
    graph: Any = recorder
    with pytest.raises(RuntimeError, match=says or "previous error"), cuda.capturing(graph):
        if says:
            raise RuntimeError(says)
    assert not recorder.underway and recorder.uses == leaves
    assert gc.isenabled()
    recorder.invalid = False
    with cuda.capturing(graph):
        assert not gc.isenabled(), "a graph among the garbage would be destroyed, which may end a capture"
    cuda._capture_stream.cache_clear()
    assert not recorder.underway and gc.isenabled()


def test_determinism_is_no_other_run():
    """It decides rounding only: a run may go on with it, and its parents may have been without."""
    with_it, without = (
        recipe.deciding_settings(small(hardware__deterministic=on).recipe, "sft") for on in (True, False)
    )
    assert with_it == without
