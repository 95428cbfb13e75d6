"""CUDA settings that can be checked without a GPU: variables, the choice of kernels, the memory cap."""

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
from rlhf.process import torch_setup
from rlhf.process.environment import expandable_segments, prepare
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
    prepare(small().recipe)
    assert not any(name in os.environ for name in NAMES)
    prepare(on_cuda())
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    environment.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    prepare(on_cuda())
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    environment.delenv("PYTORCH_ALLOC_CONF")
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")
    prepare(on_cuda())
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(
    ("name", "value", "expandable"),
    [
        (None, "", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", False),
    ],
)
def test_predictions_follow_the_allocator_s_settings(environment, name, value, expandable):
    if name:
        environment.setenv(name, value)
    assert expandable_segments() is expandable


def test_a_stage_sets_the_variables_before_torch_starts(tmp_path):
    """Afterwards it stops: there is no GPU. By then all libraries are imported, without torch's compiler."""
    code = f"""
import os, sys
from rlhf import cli; from rlhf.process import environment
def first(recipe, real=environment.prepare):
    real(recipe)
    print("torch" in sys.modules, os.environ["PYTORCH_ALLOC_CONF"])
    environment.prepare = real
environment.prepare = first
sys.argv = ["rlhf", "run", "pretrain", "--hw", "cpu", "--out", {str(tmp_path)!r}, "--set", "hardware.device=cuda"]
try:
    cli.main()
finally:
    print("peft" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
"""
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path), "RLHF_RUNTIME": "local"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["False expandable_segments:True", "True False"]
    assert "finds no usable GPU" in done.stderr and (torch.version.cuda or "built for CPUs alone") in done.stderr
    assert "--hw cpu" in done.stderr


def test_cudnn_attention_is_off(environment, kernels):
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    environment.setattr(torch.cuda, "is_available", lambda: True)
    environment.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    torch_setup.set_up_torch(on_cuda())
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


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
        torch_setup.cap_memory(torch.device(device))
    assert shares == [(pytest.approx(23.4 / 80), 3), (pytest.approx((24 * 1.073741824 - 0.6) / 80), 1), (1.0, 3)]
    for cap in ("24", "nan", "0.5GB"):
        monkeypatch.setenv("RLHF_VRAM_CAP", cap)
        for device in ("cuda", "cpu"):
            with pytest.raises(UserError, match=f"RLHF_VRAM_CAP={cap}: "):
                torch_setup.cap_memory(torch.device(device))
    monkeypatch.setenv("RLHF_VRAM_CAP", "24GB")
    torch_setup.cap_memory(torch.device("cpu"))
    monkeypatch.delenv("RLHF_VRAM_CAP")
    torch_setup.cap_memory(torch.device("cuda"))
    assert len(shares) == 3
