"""Recipes that start from a pretrained checkpoint, as the 7B recipes do: from a folder, in float32, bfloat16, NF4."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.recipe import Loaded
from rlhf.run import RunError, read_json
from tests.conftest import run_stages, small


def pretrained(trained: Path, folder: Path, **changes) -> Loaded:
    """The small recipe without pretraining: base and tokenizer from a folder, data from files."""
    base = str(trained / "cpu-tiny/v1/pretrain/model")
    data = [str(next((trained / "cpu-tiny/v1/data").rglob("pairs.jsonl")))]
    return small(
        **{
            "pretrain": None,
            "model__architecture": None,
            "model__source": "local",
            "model__name": base,
            "tokenizer__source": "local",
            "tokenizer__name": base,
            "tokenizer__vocab_size": None,
            "data__source": "files",
            "data__files": data,
        }
        | changes
    )


def weights(root: Path, stage: str) -> dict[str, torch.Tensor]:
    return load_file(root / "cpu-tiny/v1" / stage / "adapter/adapter_model.safetensors")


def test_the_chain_starts_from_a_local_checkpoint(trained, tmp_path):
    loaded = pretrained(trained, tmp_path, merge__stage="dpo")
    run_stages(loaded, tmp_path, "sft", "rm", "ppo", "dpo", "evaluate", "merge")
    config = json.loads((tmp_path / "cpu-tiny/v1/ppo/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == loaded.recipe.model.name
    assert read_json(tmp_path / "cpu-tiny/v1/merge/summary.json")["metrics"]["adapter_effect"] > 0
    with pytest.raises(RunError, match=r"pretrain: .* has no such stage; it starts from"):
        run_stages(loaded, tmp_path, "pretrain")


def test_in_bfloat16_the_adapters_and_the_head_are_trained_in_float32(trained, tmp_path):
    """A head in bfloat16 would be too coarse for steps of 1e-5 and would never move."""
    loaded = pretrained(trained, tmp_path, model__dtype="bfloat16", rm__learning_rate=1e-5, rm__max_steps=4)
    run_stages(loaded, tmp_path, "sft", "rm", "ppo", "dpo")
    found = weights(tmp_path, "rm")
    assert {tensor.dtype for stage in ("sft", "rm", "ppo", "dpo") for tensor in weights(tmp_path, stage).values()} == {
        torch.float32
    }
    longer = pretrained(trained, tmp_path, model__dtype="bfloat16", rm__learning_rate=1e-5, rm__max_steps=8)
    run_stages(longer, tmp_path / "longer", "sft", "rm")
    head = "base_model.model.score.weight"
    moved = (weights(tmp_path / "longer", "rm")[head] != found[head]).float().mean()
    assert moved > 0.9


def test_a_quantised_base_trains_exact_adapters(trained, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes comes with the gpu extra")
    wide = {"hidden_size": 64, "intermediate_size": 128}  # blocks of 64 weights share a scale
    run_stages(small(**{f"model__architecture__{k}": v for k, v in wide.items()}), tmp_path / "wide", "pretrain")
    loaded = pretrained(tmp_path / "wide", tmp_path, model__quantization="nf4", model__dtype="bfloat16")
    run_stages(loaded, tmp_path, "sft", "rm", "ppo", "dpo", "merge")
    for stage in ("sft", "rm", "ppo", "dpo"):
        assert {tensor.dtype for tensor in weights(tmp_path, stage).values()} == {torch.float32}
    first = json.loads((tmp_path / "cpu-tiny/v1/dpo/metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["loss"] - 0.6931) < 0.02  # policy and reference begin equal: -log σ(0) = ln 2


def test_quantisation_without_bitsandbytes_says_what_to_install(trained, tmp_path, monkeypatch):
    import transformers.quantizers.quantizer_bnb_4bit as quantizer

    def missing(*_, **__):
        raise ImportError("no bitsandbytes")

    monkeypatch.setattr(quantizer.Bnb4BitHfQuantizer, "validate_environment", missing)
    with pytest.raises(RunError, match=r"needs bitsandbytes: pip install '\.\[gpu\]'"):
        run_stages(pretrained(trained, tmp_path, model__quantization="nf4"), tmp_path, "sft")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__name": "/nowhere/model"}, "cannot load the base model /nowhere/model: "),
        ({"tokenizer__name": "/nowhere/tokenizer"}, "cannot load the tokenizer /nowhere/tokenizer: "),
    ],
)
def test_a_checkpoint_that_is_not_there_is_one_line(trained, tmp_path, changes, message):
    with pytest.raises(RunError, match=message) as caught:
        run_stages(pretrained(trained, tmp_path, **changes), tmp_path, "sft")
    assert "\n" not in str(caught.value)


def test_a_damaged_checkpoint_is_one_line(trained, tmp_path):
    source = trained / "cpu-tiny/v1/pretrain/model"
    target = tmp_path / "model"
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    whole = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="cannot load the base model"):
        run_stages(pretrained(trained, tmp_path, model__name=str(target)), tmp_path, "sft")
