"""What a person is told when memory runs out, and how a smaller card is tried on a larger one."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from rlhf.models import loading
from rlhf.run import RunError
from rlhf.stages import _run


def test_running_out_of_memory_names_the_way_out(tmp_path, monkeypatch):
    def run_stage(run, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(run_stage=run_stage))
    run = SimpleNamespace(stage="sft", path=tmp_path, loaded=SimpleNamespace(directory="recipes/mine/v1"))
    with pytest.raises(RunError, match=r"sft: out of memory .*rlhf plan --recipe recipes/mine/v1 --fastest"):
        _run(run, None)


def test_a_cap_is_a_share_of_the_card(monkeypatch):
    shares = []
    properties = SimpleNamespace(total_memory=80_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    for cap in ("24GB", "24", "200gb"):
        monkeypatch.setenv("RLHF_VRAM_CAP", cap)
        loading._cap_memory(torch.device("cuda"))
    assert shares == [0.3, 0.3, 1.0]
    monkeypatch.setenv("RLHF_VRAM_CAP", "much")
    with pytest.raises(RunError, match="RLHF_VRAM_CAP=much: write a size"):
        loading._cap_memory(torch.device("cuda"))
    monkeypatch.delenv("RLHF_VRAM_CAP")
    loading._cap_memory(torch.device("cuda"))
    assert len(shares) == 3
