"""Recipes that start from a pretrained checkpoint, in float32, bfloat16 and NF4; policies that start at the base."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf import recipe
from rlhf.cli.chain import stages_before
from rlhf.errors import UserError
from rlhf.evaluation import compare
from rlhf.files import sha256
from rlhf.models.loading import load_base
from rlhf.rating.pairs import pair_answers
from rlhf.recipe import PinnedRecipe
from rlhf.run.directory import StageRun
from tests.helpers import GROUP, RECIPE, SMALL, TWO_STEPS, beside, content_of, run_stages, small
from tests.lines import read_intact_lines
from tests.models import checkpoint, pretrained, recipe_for

ROOT = Path("cpu-tiny/v1")
ADAPTER = "adapter/adapter_model.safetensors"


def weights(root: Path, stage: str) -> dict[str, torch.Tensor]:
    return load_file(root / ROOT / stage / ADAPTER)


def loaded_base(out: Path, loaded: PinnedRecipe, stage: recipe.StageName = "sft") -> Any:
    return load_base(StageRun(out, loaded, stage).base, torch.device("cpu"))


def test_the_chain_starts_from_a_local_checkpoint(trained, tmp_path, monkeypatch):
    """Its folder is named from where the run is started. Its dropout acts nowhere.

    DPO starts at its reference, and PPO's first ratio is 1, also where it recomputes.
    """
    base = tmp_path / "base"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / ROOT / "pretrain/model", base)
    (base / "config.json").write_text(json.dumps(content_of(base / "config.json") | {"attention_dropout": 0.3}))
    one_step = {"ppo__gradient_checkpointing": True, "ppo__num_mini_batches": 1, "ppo__num_ppo_epochs": 1}
    changes = {"model__name": "base", "merge__stage": "dpo", "dpo__logging_steps": 1}
    loaded = pretrained(trained, tmp_path, **changes, **one_step)
    run_stages(loaded, tmp_path, "sft", "rm", "ppo", "dpo", "evaluate", "merge")
    first = {stage: read_intact_lines(tmp_path / ROOT / stage / "metrics.jsonl")[0] for stage in ("ppo", "dpo")}
    assert first["ppo"]["val/ratio"] == pytest.approx(1, abs=1e-6) and first["ppo"]["policy/approxkl_avg"] < 1e-9
    assert first["dpo"]["loss"] == pytest.approx(math.log(2)) and first["dpo"]["rewards/chosen"] == 0
    config = content_of(tmp_path / ROOT / "ppo/adapter/adapter_config.json")
    assert config["base_model_name_or_path"] == str(base)
    assert content_of(tmp_path / ROOT / "merge/summary.json")["metrics"]["adapter_effect"] > 0


def test_in_bfloat16_the_adapters_and_the_head_are_trained_in_float32(trained, tmp_path):
    """A head in bfloat16 would be too coarse for steps of 1e-5 and would never move."""
    loaded = pretrained(trained, tmp_path, model__dtype="bfloat16", rm__learning_rate=1e-5, rm__max_steps=4)
    run_stages(loaded, tmp_path, "sft", "rm", "ppo", "dpo")
    kinds = {tensor.dtype for stage in ("sft", "rm", "ppo", "dpo") for tensor in weights(tmp_path, stage).values()}
    assert kinds == {torch.float32}
    longer = pretrained(trained, tmp_path, model__dtype="bfloat16", rm__learning_rate=1e-5, rm__max_steps=8)
    run_stages(longer, tmp_path / "longer", "sft", "rm")
    heads = [weights(root, "rm")["base_model.model.score.weight"] for root in (tmp_path, tmp_path / "longer")]
    assert (heads[0] != heads[1]).float().mean() > 0.9


def test_a_quantised_base_trains_exact_adapters(trained, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes comes with the gpu extra")
    wide = {"hidden_size": 64, "intermediate_size": 128}  # blocks of 64 weights share a scale
    run_stages(small(**{f"model__architecture__{k}": v for k, v in wide.items()}), tmp_path / "wide", "pretrain")
    changes = {"model__quantization": "nf4", "model__dtype": "bfloat16"}
    run_stages(pretrained(tmp_path / "wide", tmp_path, **changes), tmp_path, "sft", "rm", "ppo", "dpo", "merge")
    for stage in ("sft", "rm", "ppo", "dpo"):
        assert {tensor.dtype for tensor in weights(tmp_path, stage).values()} == {torch.float32}
    first = read_intact_lines(tmp_path / ROOT / "dpo/metrics.jsonl")[0]
    assert abs(first["loss"] - math.log(2)) < 0.02, "policy and reference begin equal"
    run_stages(pretrained(tmp_path / "wide", tmp_path, hardware__trunk="lean", **changes), tmp_path / "lean", "sft")
    norms = [
        [row.get("grad_norm") for row in read_intact_lines(root / ROOT / "sft/metrics.jsonl")]
        for root in (tmp_path, tmp_path / "lean")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=0.05), "gradients reach all layers, after an evaluation too"


# -- checkpoints that cannot be used -----------------------------------------------------------------------------------


def changed_checkpoint(trained: Path, folder: Path, change) -> str:
    """The pretrained model with other tensors: `change` gets them by name."""
    target = shutil.copytree(trained / ROOT / "pretrain/model", folder / "model")
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return str(target)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(UP), UP),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}), "model.norm.weight"),
    ],
)
def test_a_checkpoint_without_all_its_weights_is_refused(trained, tmp_path, change, named):
    """transformers would draw them at random and only warn."""
    name = changed_checkpoint(trained, tmp_path, change)
    with pytest.raises(UserError, match=named):
        run_stages(pretrained(trained, tmp_path, model__name=name), tmp_path, "sft")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__name": "/nowhere/model"}, "/nowhere/model"),
        ({"tokenizer__name": "/nowhere/tokenizer"}, "/nowhere/tokenizer"),
        ({"model__architecture": {"vocab_size": 300}}, "vocab_size"),
    ],
)
def test_a_checkpoint_or_tokenizer_that_does_not_fit_is_one_line(trained, tmp_path, changes, named):
    if "model__architecture" in changes:
        shape = small().recipe.model_dump()["model"]["architecture"]
        changes = {"model__architecture": shape | changes["model__architecture"]}
    with pytest.raises(UserError, match=named) as caught:
        run_stages(pretrained(trained, tmp_path, **changes), tmp_path, "sft")
    assert "\n" not in str(caught.value)


def test_another_model_type_and_a_missing_padding_token_are_named(trained, tmp_path):
    folder = checkpoint(tmp_path / "model", "qwen3")
    tokenizer = {"source": "local", "name": folder, "template": "chat"}
    with pytest.raises(UserError, match=r"tokenizer\.pad_token.*<\|fim_pad\|>"):
        run_stages(recipe_for(folder, trained, tokenizer=tokenizer), tmp_path / "runs", "sft")
    architecture = recipe.load(RECIPE).recipe.model_dump()["model"]["architecture"]
    with pytest.raises(UserError, match=r"qwen3.*model\.architecture"):
        loaded_base(tmp_path / "other", recipe_for(folder, trained, model__architecture=architecture))


# -- end tokens and merging --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_an_adapter_of_any_size_is_merged_in_bfloat16_and_one_that_is_lost_is_refused(
    trained, tmp_path, monkeypatch, factor
):
    """One that is smaller than the rounding of the weights is no error."""
    loaded = pretrained(trained, tmp_path, model__dtype="bfloat16", merge__stage="sft")
    run_stages(loaded, tmp_path, "sft")
    file, summary = tmp_path / ROOT / "sft" / ADAPTER, tmp_path / ROOT / "sft/summary.json"
    save_file({key: x * (factor if "lora_B" in key else 1) for key, x in load_file(file).items()}, file)
    content = content_of(summary)
    content["result_sha256"][ADAPTER] = sha256(file)
    summary.write_text(json.dumps(content))
    if factor > 1:
        with monkeypatch.context() as during:
            during.setattr(PeftModel, "merge_and_unload", lambda model: model.unload(), raising=False)
            with pytest.raises(UserError, match="merg"):
                run_stages(loaded, tmp_path, "merge")
        assert not (tmp_path / ROOT / "merge/summary.json").exists()
    found = run_stages(loaded, tmp_path, "merge")["metrics"]
    assert 0 <= found["kl_of_merging"] <= max(0.1 * found["adapter_effect"], 1e-2)


def test_a_four_bit_base_is_merged_as_published(trained, tmp_path):
    pytest.importorskip("bitsandbytes")
    tokenizer = AutoTokenizer.from_pretrained(trained / ROOT / "pretrain/model")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    changes = {"model__name": str(tmp_path / "base"), "model__quantization": "nf4"}
    loaded = pretrained(trained, tmp_path, **changes, merge__stage="sft")
    run_stages(loaded, tmp_path, "sft", "merge")
    name = "model.layers.0.self_attn.q_proj"
    merged = load_file(tmp_path / ROOT / "merge/model/model.safetensors")
    adapter, lora = weights(tmp_path, "sft"), loaded.recipe.lora
    down, up = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    expected = model.state_dict()[f"{name}.weight"] + lora.lora_alpha / lora.r * up @ down
    torch.testing.assert_close(merged[f"{name}.weight"], expected)


# -- without SFT -------------------------------------------------------------------------------------------------------

CHECKED: dict[str, Any] = {"reward_funcs": ["length(most=3)"], "normalize_scores": False}


def from_base(**changes: Any) -> PinnedRecipe:
    """The CPU recipe at test size without SFT, with PPO and GRPO on a function alone."""
    on_function = {f"ppo__{key}": value for key, value in CHECKED.items()}
    return small(**TWO_STEPS | {"sft": None, "grpo": GROUP | CHECKED} | on_function | changes)


def test_policies_that_start_at_the_base_are_compared_with_it(trained, tmp_path):
    out = beside(trained, tmp_path, "pretrain")
    run_stages(from_base(rm=None, merge__stage="grpo"), out, "ppo", "grpo", "dpo", "evaluate", "merge")
    metrics = content_of(out / ROOT / "evaluate/summary.json")["metrics"]
    for policy in ("ppo", "grpo", "dpo"):
        assert f"{policy}/true_reward_gain_sd" in metrics and metrics[f"{policy}/kl_per_token"] > 0
    for policy in ("ppo", "grpo"):
        gain = metrics[f"{policy}/reward_length"] - metrics["base/reward_length"]
        assert metrics[f"{policy}/reward_length_gain"] == pytest.approx(gain)
        own = content_of(out / ROOT / policy / "summary.json")["metrics"]
        assert {"win_rate_vs_base", "score_base", "reward_length_base"} <= own.keys()
        first = read_intact_lines(out / ROOT / policy / "metrics.jsonl")[0]
        assert first["objective/kl_per_token"] == pytest.approx(0, abs=1e-6), "it starts as its reference"
    assert not [name for name in metrics if "sft" in name]
    compared = compare.compare_runs(*(compare.Side(compare.load(out / ROOT, name)) for name in ("base", "grpo")))
    (of_length,) = (row for row in compared.rows if row.name == "reward_length")
    assert of_length.difference == pytest.approx(metrics["grpo/reward_length_gain"])
    assert (pair_answers(out / ROOT).a, pair_answers(out / ROOT).b) == ("base", "ppo")
    merged = content_of(out / ROOT / "merge/summary.json")["metrics"]
    assert merged["adapter_effect"] > 0 and merged["kl_of_merging"] < 1e-6


def test_stages_before_are_those_that_are_there(tmp_path):
    loaded = from_base().recipe
    assert all(recipe.parents(loaded, stage) == ["pretrain"] for stage in ("ppo", "dpo", "grpo", "rm"))
    assert stages_before(StageRun(tmp_path, from_base(), "evaluate")) == ["pretrain", "rm", "ppo"]
    assert (loaded.start, small().recipe.start) == ("base", "sft")
    with pytest.raises(UserError, match="sft"):
        recipe.load(RECIPE, SMALL | dict.fromkeys(("sft", "rm", "ppo", "dpo", "merge")))
