"""SFT, reward model and DPO with the lean trunk in TRL's trainers: the same steps, but for rounding."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.errors import UserError
from rlhf.models.trunk import Trunk
from rlhf.rollout.trunk_decoding import TrunkDecoding
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine
from tests.conftest import beside, run_stages, small

ROOT = Path("cpu-tiny/v1")
PARENTS = {"sft": ["pretrain"], "rm": ["pretrain", "sft"], "dpo": ["pretrain", "sft", "rm"]}
STEPS = 3


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often the lean trunk computes each role, and how often it decodes."""
    calls: Counter[str] = Counter()
    hidden, run = Trunk.hidden, TrunkDecoding.run

    def counted(self: Trunk, role: str, *arguments: Any) -> torch.Tensor:
        calls[role] += 1
        return hidden(self, role, *arguments)

    def counted_run(self: TrunkDecoding) -> list[torch.Tensor]:
        calls["decoding"] += 1
        return run(self)

    monkeypatch.setattr(Trunk, "hidden", counted)
    monkeypatch.setattr(TrunkDecoding, "run", counted_run)
    return calls


@pytest.mark.parametrize(("stage", "accumulated"), [("sft", 1), ("sft", 2), ("rm", 1), ("dpo", 2)])
def test_the_lean_trunk_changes_rounding_only(trained, tmp_path, calls, stage, accumulated):
    results, losses = {}, {}
    for trunk in ("library", "lean"):
        beside(trained, tmp_path / trunk, *PARENTS[stage])
        changes: dict[str, Any] = {f"{stage}__max_steps": STEPS, f"{stage}__save_steps": STEPS}
        changes |= {f"{stage}__logging_steps": 1, "hardware__trunk": trunk}
        changes |= {f"{stage}__gradient_accumulation_steps": accumulated, f"{stage}__per_device_train_batch_size": 4}
        run_stages(small(**changes), tmp_path / trunk, stage)
        folder = tmp_path / trunk / ROOT / stage
        results[trunk] = weights(folder)
        rows = read_lines(folder / "metrics.jsonl", MetricsLine)
        losses[trunk] = [row.values["loss"] for row in rows if "loss" in row.values]
        assert bool(calls) == (trunk == "lean")
    assert calls.keys() >= ({"default", "ref"} if stage == "dpo" else {"default"})
    assert calls["default"] == STEPS * accumulated
    assert losses["lean"] == pytest.approx(losses["library"], rel=1e-4) and len(losses["lean"]) == STEPS
    moved = apart = 0.0
    start = weights(tmp_path / "lean" / ROOT / PARENTS[stage][1]) if stage != "sft" else {}
    for name, library in results["library"].items():
        before = start.get(name, torch.zeros_like(library) if "lora_B" in name else library)
        moved += float((library - before).square().sum())
        apart += float((results["lean"][name] - library).square().sum())
    assert 0 < apart**0.5 < 1e-3 * moved**0.5


def test_a_model_that_it_does_not_support_is_refused(trained, tmp_path, monkeypatch):
    beside(trained, tmp_path, "pretrain")
    monkeypatch.setattr("rlhf.models.trunk.SUPPORTED", ())
    monkeypatch.setattr("rlhf.models.trunk.CLASSIFIERS", ())
    with pytest.raises(UserError, match=r"hardware\.trunk: lean does not support LlamaForCausalLM"):
        run_stages(small(hardware__trunk="lean"), tmp_path, "sft")


def test_evaluation_gives_the_same_figures(trained, tmp_path, calls):
    figures = {}
    for trunk in ("library", "lean"):
        beside(trained, tmp_path / trunk, "pretrain", "sft", "rm", "ppo", "dpo")
        figures[trunk] = run_stages(small(hardware__trunk=trunk), tmp_path / trunk, "evaluate")["metrics"]
        assert bool(calls["decoding"]) == bool(calls["reference"]) == (trunk == "lean")
    assert figures["lean"].keys() == figures["library"].keys() and len(figures["lean"]) > 20
    for name, value in figures["library"].items():
        assert figures["lean"][name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name
