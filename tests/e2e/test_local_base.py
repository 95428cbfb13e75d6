"""Recipes that start from a pretrained checkpoint, as the 7B recipes do: from a folder, in float32, bfloat16, NF4."""

import functools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig

from rlhf.errors import UserError
from rlhf.files import sha256
from rlhf.models.end_tokens import end_ids
from rlhf.models.loading import ModelHead, load_base, load_tokenizer
from rlhf.run.directory import StageRun
from tests.helpers import content_of, noted, run_stages, small
from tests.lines import read_intact_lines
from tests.models import pretrained


def weights(root: Path, stage: str) -> dict[str, torch.Tensor]:
    return load_file(root / "cpu-tiny/v1" / stage / "adapter/adapter_model.safetensors")


def test_the_chain_starts_from_a_local_checkpoint(trained, tmp_path, monkeypatch):
    """Its folder is named from where the run is started. Its dropout acts nowhere.

    DPO starts at its reference, and PPO's first ratio is 1, also where it recomputes.
    """
    base = tmp_path / "base"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "cpu-tiny/v1/pretrain/model", base)
    (base / "config.json").write_text(json.dumps(content_of(base / "config.json") | {"attention_dropout": 0.3}))
    one_step = {"ppo__gradient_checkpointing": True, "ppo__num_mini_batches": 1, "ppo__num_ppo_epochs": 1}
    changes = {"model__name": "base", "merge__stage": "dpo", "dpo__logging_steps": 1}
    loaded = pretrained(trained, tmp_path, **changes, **one_step)
    run_stages(loaded, tmp_path, "sft", "rm", "ppo", "dpo", "evaluate", "merge")
    first = {stage: read_intact_lines(tmp_path / f"cpu-tiny/v1/{stage}/metrics.jsonl")[0] for stage in ("ppo", "dpo")}
    assert first["ppo"]["val/ratio"] == pytest.approx(1, abs=1e-6) and first["ppo"]["policy/approxkl_avg"] < 1e-9
    assert first["dpo"]["loss"] == pytest.approx(math.log(2)) and first["dpo"]["rewards/chosen"] == 0
    config = json.loads((tmp_path / "cpu-tiny/v1/ppo/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert content_of(tmp_path / "cpu-tiny/v1/merge/summary.json")["metrics"]["adapter_effect"] > 0
    with pytest.raises(UserError, match=r"pretrain: .* has no such stage; it starts from"):
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
    changes = {"model__quantization": "nf4", "model__dtype": "bfloat16", "hardware__trunk": "lean"}
    run_stages(pretrained(tmp_path / "wide", tmp_path, **changes), tmp_path / "lean", "sft")
    norms = [
        [json.loads(line).get("grad_norm") for line in (root / "cpu-tiny/v1/sft/metrics.jsonl").open()]
        for root in (tmp_path, tmp_path / "lean")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=0.05), "gradients reach all layers, after an evaluation too"


def test_a_package_that_is_not_there_is_the_one_that_is_named(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # importing it raises ImportError
    with pytest.raises(UserError, match=r"needs bitsandbytes .*: pip install '\.\[gpu\]'"):
        run_stages(pretrained(trained, tmp_path, model__quantization="nf4"), tmp_path, "sft")


def test_flash_attn_says_where_it_can_run(trained, tmp_path, monkeypatch):
    changes = {"model__attention": "flash_attention_2"}
    with pytest.raises(UserError, match="flash_attention_2 has kernels for CUDA only: use auto"):
        pretrained(trained, tmp_path, **changes)
    with pytest.raises(UserError, match=r"flash_attention_2 needs model.dtype: bfloat16"):
        pretrained(trained, tmp_path, hardware__device="cuda", **changes)

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    loaded = pretrained(trained, tmp_path, hardware__device="cuda", model__dtype="bfloat16", **changes)
    with pytest.raises(UserError, match=r"needs flash_attn .*: pip install '\.\[flash\]' --no-build-isolation, or use"):
        load_base(StageRun(tmp_path, loaded, "sft").base, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__name": "/nowhere/model"}, "cannot load the base model /nowhere/model: "),
        ({"tokenizer__name": "/nowhere/tokenizer"}, "cannot load the tokenizer /nowhere/tokenizer: "),
    ],
)
def test_a_checkpoint_that_is_not_there_is_one_line(trained, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
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
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        run_stages(pretrained(trained, tmp_path, model__name=str(target)), tmp_path, "sft")


def changed_checkpoint(trained: Path, folder: Path, change) -> str:
    """The pretrained model with other tensors: `change` gets them by name."""
    source = trained / "cpu-tiny/v1/pretrain/model"
    target = folder / "model"
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return str(target)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model lacks model\.layers\.1\.mlp\.up_proj\.weight: "),
        (
            lambda t: [t.pop(key) for key in list(t) if "layers.0.mlp" in key],
            r"model lacks .*\.0\.mlp\.down_proj\.weight, .*\.gate_proj\.weight, .*\.up_proj\.weight: ",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(5)}),
            r"model has another shape of model\.norm\.weight: ",
        ),
    ],
)
@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_a_checkpoint_without_all_its_weights_is_refused(trained, tmp_path, change, said, stage):
    """transformers would draw them at random and only warn."""
    broken = changed_checkpoint(trained, tmp_path, change)
    loaded = pretrained(trained, tmp_path, model__name=broken)
    heads: dict[str, ModelHead] = {"sft": "lm", "rm": "score"}
    with pytest.raises(UserError, match=said):
        load_base(StageRun(tmp_path, loaded, stage).base, torch.device("cpu"), head=heads[stage])


def test_a_tokenizer_with_more_entries_than_the_model_has_rows_is_refused(trained, tmp_path):
    architecture = small().recipe.model.architecture
    assert architecture
    shape = architecture.model_dump() | {"vocab_size": 300}
    loaded = pretrained(trained, tmp_path, model__architecture=shape)
    with pytest.raises(UserError, match=r"has 400 entries, model\.architecture\.vocab_size is only 300"):
        load_tokenizer(StageRun(tmp_path, loaded, "sft").base)


# -- merging -----------------------------------------------------------------------------------------------------------


def scaled_adapter(folder: Path, stage: str, factor: float) -> None:
    """Multiply one half of an adapter that a stage has written, as if it had learned less, or more."""
    file = folder / "cpu-tiny/v1" / stage / "adapter/adapter_model.safetensors"
    tensors = {key: value * (factor if "lora_B" in key else 1) for key, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    summary = file.parents[1] / "summary.json"
    content = json.loads(summary.read_text())
    content["result_sha256"]["adapter/adapter_model.safetensors"] = sha256(file)
    summary.write_text(json.dumps(content))


@pytest.mark.parametrize("factor", [1e-3, 1.0, 30.0])
def test_an_adapter_of_any_size_is_merged_in_bfloat16(trained, tmp_path, factor):
    """One that is smaller than the rounding of the weights is no error."""
    loaded = pretrained(trained, tmp_path, model__dtype="bfloat16", merge__stage="sft")
    run_stages(loaded, tmp_path, "sft")
    scaled_adapter(tmp_path, "sft", factor)
    summary = run_stages(loaded, tmp_path, "merge")
    found = summary["metrics"]
    assert 0 <= found["kl_of_merging"] <= max(0.1 * found["adapter_effect"], 1e-2)
    assert found["top1_agreement"] > 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merge_that_loses_the_adapter_is_refused(trained, tmp_path, monkeypatch, dtype):
    loaded = pretrained(trained, tmp_path, model__dtype=dtype, merge__stage="sft")
    run_stages(loaded, tmp_path, "sft")
    scaled_adapter(tmp_path, "sft", 30.0)
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda model: model.unload(), raising=False)
    with pytest.raises(UserError, match="merging lost the adapter"):
        run_stages(loaded, tmp_path, "merge")
    assert not (tmp_path / "cpu-tiny/v1/merge/summary.json").exists()


def test_a_four_bit_base_is_merged_as_published(trained, tmp_path):
    pytest.importorskip("bitsandbytes")
    tokenizer = AutoTokenizer.from_pretrained(trained / "cpu-tiny/v1/pretrain/model")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    name = "model.layers.0.self_attn.q_proj"
    changes = {"model__name": str(tmp_path / "base"), "model__quantization": "nf4"}
    loaded = pretrained(trained, tmp_path, **changes, merge__stage="sft")
    run_stages(loaded, tmp_path, "sft", "merge")
    merged = load_file(tmp_path / "cpu-tiny/v1/merge/model/model.safetensors")
    adapter, lora = weights(tmp_path, "sft"), loaded.recipe.lora
    down, up = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    expected = model.state_dict()[f"{name}.weight"] + lora.lora_alpha / lora.r * up @ down
    torch.testing.assert_close(merged[f"{name}.weight"], expected)
    for kept in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(merged[kept], model.state_dict()[kept])


def with_end_ids(trained: Path, folder: Path, ids: str) -> Path:
    """A copy of the small base whose generation_config.json says that it ends texts with these ids."""
    shutil.copytree(trained / "cpu-tiny/v1/pretrain/model", folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}, "do_sample": true, "temperature": 0.6}}')
    return folder


def test_another_end_token_of_the_checkpoint_is_counted(trained, tmp_path):
    others = range(10, 300)  # many, so that so small a model samples some of them
    base = with_end_ids(trained, tmp_path / "base", json.dumps([2, *others, 10**6]))
    loaded = pretrained(trained, tmp_path, model__name=str(base), tokenizer__name=str(base), ppo__steps=2)
    run_stages(loaded, tmp_path, "sft", "rm", "ppo")
    root = tmp_path / "cpu-tiny/v1/ppo"
    rows = [json.loads(line) for line in (root / "metrics.jsonl").open()]
    assert all(0 < row["response/other_eos_rate"] <= 1 for row in rows)
    assert 0 < content_of(root / "summary.json")["metrics"]["other_eos_rate"] <= 1


@pytest.mark.parametrize(
    "ids", ["NaN", "[2, NaN]", "[2, 1e400]", "[2, 5.5]", '[2, "5"]', "[2, true]", '{"a": 2}', "[[2]]"]
)
def test_an_end_token_that_is_no_id_is_refused(trained, tmp_path, ids):
    base = with_end_ids(trained, tmp_path / "base", ids)
    run = StageRun(tmp_path, pretrained(trained, tmp_path, model__name=str(base)), "sft")
    with pytest.raises(UserError, match=r"base: eos_token_id in generation_config\.json is .*: correct it or leave it"):
        load_base(run.base, torch.device("cpu"))


@pytest.mark.parametrize(("ids", "found"), [("[2, 5, -1, 1000000]", {2, 5}), ("null", set()), ("2", {2})])
def test_end_tokens_that_cannot_be_sampled_are_ignored(trained, tmp_path, ids, found):
    base = with_end_ids(trained, tmp_path / "base", ids)
    run = StageRun(tmp_path, pretrained(trained, tmp_path, model__name=str(base)), "sft")
    assert end_ids(load_base(run.base, torch.device("cpu")), "base") == found


def test_with_several_visible_cards_a_stage_uses_one(trained, tmp_path, monkeypatch):
    """Trainer counts every visible card, and TRL refuses more than one where nothing says that one is used."""

    class TwoCards(functools.cached_property[Any]):
        """The device of the arguments, as a machine with two cards would leave them."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            found = super().__get__(instance, owner)
            if instance is not None and not vars(instance).get("_counted"):
                instance._n_gpu, instance._counted = 2, True
            return found

    original = TrainingArguments.__dict__["_setup_devices"]
    patched = TwoCards(getattr(original, "func", None) or original.fget)
    patched.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", patched)
    counts: list[int] = []
    begin = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self, **how: noted(counts, self.args.n_gpu, begin(self, **how)))
    assert SFTConfig(output_dir=str(tmp_path), use_cpu=True).n_gpu == 2, "the pretence"
    run_stages(pretrained(trained, tmp_path), tmp_path, "sft", "rm", "dpo")
    run_stages(small(), tmp_path / "drawn", "pretrain")
    assert counts == [1] * 4


@pytest.mark.parametrize("head", ["lm", "reward"])
def test_a_loaded_checkpoint_says_on_which_device_it_is(trained, tmp_path, head):
    """Trainer reads it; without an index, which Trainer would take for its own first card."""
    base = load_base(StageRun(tmp_path, pretrained(trained, tmp_path), "sft").base, torch.device("cpu"), head)
    assert base.hf_device_map == {"": torch.device("cpu")}
