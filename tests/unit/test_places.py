"""Every tensor of a checkpoint has a place in the model, and every parameter a source; otherwise it is refused."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GPTNeoXForCausalLM

from rlhf.errors import UserError
from rlhf.models import loading
from rlhf.models.loading import check_weights, load_base
from rlhf.new.model import describe, read_model
from rlhf.run.directory import StageRun
from tests import models

Tensors = dict[str, Tensor]
HEADS = ("lm", "score")
LAST = "model.layers.3."


# Every type is loaded with both heads by tests/e2e/test_chain_of_types.py; experts and fused matrices are converted.
@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "gemma3_text", "phi3"])
def whole(request, tmp_path_factory) -> Path:
    """The folder of a checkpoint, whose tensors are copied for each change."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    models.checkpoint(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    models.checkpoint(folder, "llama")
    return folder


def changed(folder: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of a checkpoint with other tensors: `change` gets them by name."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def without(name: str, tensors: Tensors) -> None:
    del tensors[name]


def with_others(others: Tensors, tensors: Tensors) -> None:
    tensors.update(others)


def load(folder: Path, head: str = "lm") -> object:
    loaded = models.recipe_of(str(folder), data__source="files", data__files=["none.jsonl"])
    return load_base(StageRun(folder, loaded, "sft").base, torch.device("cpu"), head=head)  # type: ignore[arg-type]


def neox(folder: Path) -> None:
    """Write a checkpoint of GPT-NeoX."""
    config: Any = AutoConfig.for_model(
        "gpt_neox",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)


def scored(folder: Path) -> object:
    """A checkpoint of any type with a scalar head; `model.architecture` describes few types."""
    return loading._from_pretrained(AutoModelForSequenceClassification, str(folder), torch.device("cpu"), nullcontext)


def test_every_tensor_is_needed(whole, tmp_path):
    """One tensor after the other is taken away: of the last layer, and outside of the layers."""
    names = [name for name in load_file(whole / "model.safetensors") if ".layers." not in name or LAST in name]
    assert len(names) > 8
    for name in names:
        odd = changed(whole, tmp_path / "model", partial(without, name))
        with pytest.raises(UserError, match=r" (lacks|has another shape of) ") as caught:
            check_weights(odd)
        assert name in str(caught.value) or ("expert" in name and "experts" in str(caught.value)), str(caught.value)


def test_every_tensor_has_a_place(whole, tmp_path):
    """What nobody announced: a fifth layer, biases, another tower, layers that predict further tokens."""
    fifth = [name.replace(LAST, "model.layers.4.") for name in load_file(whole / "model.safetensors") if LAST in name]
    biases = [f"{LAST}self_attn.o_proj.bias", f"{LAST}mlp.down_proj.bias"]
    for added in (fifth, biases, ["model.vision_tower.patch.weight"], ["mtp.layers.0.norm.weight"]):
        new = {name: torch.ones(2) for name in added}
        odd = changed(whole, tmp_path / "model", partial(with_others, new))
        for attempt in (check_weights, load, partial(load, head="score")):
            with pytest.raises(UserError, match=r"config\.json has no place") as caught:
                attempt(odd)
            assert sorted(added)[0] in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_of_fewer_layers_is_named_by_new_too(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"has model\.layers\.3\.\S+, .* and 6 more weights, but its config"):
        describe(read_model(str(tmp_path / "model"), None), None)


def test_tied_weights_and_computed_buffers_are_the_exceptions(llama, tmp_path):
    def old(tensors: Tensors) -> None:
        for layer in range(4):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    for head in HEADS:
        load(changed(llama, tmp_path / "old", old), head)
    models.checkpoint(tmp_path / "tied", "qwen2")
    assert "lm_head.weight" not in load_file(tmp_path / "tied/model.safetensors")
    copy = changed(
        tmp_path / "tied",
        tmp_path / "both",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    for head in HEADS:
        load(copy, head)
    with pytest.raises(UserError, match=r"lacks lm_head\.weight, model\.embed_tokens\.weight"):
        check_weights(changed(tmp_path / "tied", tmp_path / "none", partial(without, "model.embed_tokens.weight")))


def test_masks_of_old_checkpoints_are_computed_and_what_a_class_ignores_is_not(tmp_path):
    """GPT-NeoX ignores `attention.bias` by a pattern, whose point is any character: `attention_bias` is a weight."""
    neox(tmp_path / "neox")
    layer = "gpt_neox.layers.0."
    masks = {f"{layer}attention.bias": torch.ones(1, 1, 8, 8), f"{layer}attention.masked_bias": torch.tensor(-1e9)}
    check_weights(changed(tmp_path / "neox", tmp_path / "old", partial(with_others, masks)))
    odd = {f"{layer}attention_bias": torch.ones(8)}
    with pytest.raises(UserError, match=r"has gpt_neox\.layers\.0\.attention_bias, but its config"):
        check_weights(changed(tmp_path / "neox", tmp_path / "odd", partial(with_others, odd)))


def test_a_score_head_leaves_out_the_output_matrix_whatever_its_name(tmp_path):
    """A checkpoint of GPT-NeoX has `embed_out.weight`, and its model in transformers `lm_head.weight`."""
    neox(tmp_path / "neox")
    assert "embed_out.weight" in load_file(tmp_path / "neox/model.safetensors")
    scored(tmp_path / "neox")
    odd = changed(tmp_path / "neox", tmp_path / "odd", partial(with_others, {"embed_in_2.weight": torch.ones(2)}))
    with pytest.raises(UserError, match=r"has embed_in_2\.weight, but its config"):
        scored(odd)


def test_a_score_head_of_the_checkpoint_is_not_ours(llama, tmp_path):
    tensors = {"score.weight": torch.ones(1, 32)}
    odd = changed(llama, tmp_path / "model", partial(with_others, tensors))
    for head in HEADS:
        with pytest.raises(UserError, match=r"has score\.weight, but its config"):
            load(odd, head)


def test_files_of_two_saves_are_refused(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    with pytest.raises(
        UserError, match=r"model\.safetensors belongs to other weights than model\.safetensors\.index\.json"
    ):
        check_weights(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    check_weights(tmp_path / "model")


def test_an_adapter_beside_the_weights_is_refused(llama, tmp_path):
    """transformers would put it on the base without a line."""
    shutil.copytree(llama, tmp_path / "model")
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(llama), lora).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"has an adapter beside its weights: .* take adapter_config\.json away"):
        check_weights(tmp_path / "model")
