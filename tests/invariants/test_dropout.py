"""No dropout of a base acts in any stage: a pass in training has the bits of the one in evaluation."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from rlhf.models.adapters import new_adapter, reward_from_sft
from rlhf.models.architecture import architecture_of, without_dropout
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.models.loading import base_name, load_base, load_tokenizer, new_base
from rlhf.models.shared_base import SharedBase
from rlhf.recipe.model_types import LEAN_TYPES
from rlhf.recipe.schema_model import Architecture
from rlhf.run.directory import StageRun
from tests import models

CPU = torch.device("cpu")
IDS = torch.arange(6, 30).view(2, 12)


@pytest.fixture(scope="module", params=models.KINDS)
def run(request, tmp_path_factory) -> StageRun:
    """A run on a checkpoint whose config.json asks for dropout wherever its type has some."""
    folder = tmp_path_factory.mktemp(request.param)
    models.checkpoint(folder, request.param)
    keys = AutoConfig.for_model(request.param).to_dict()
    noise = {key: 0.3 for key in keys if "dropout" in key or key.endswith("_pdrop")}
    assert noise, f"{request.param} has no dropout to try"
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | noise))
    return StageRun(folder, models.recipe_of(str(folder), data__source="files", data__files=["none.jsonl"]), "sft")


def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


def sft(run: StageRun, **lora: Any) -> tuple[Any, Callable[[], Tensor]]:
    """The model of SFT, DPO and KTO, and its forward pass."""
    model = new_adapter(load_base(run.base, CPU), run.loaded.recipe.lora.model_copy(update=lora))
    return model, lambda: logits_of(model)


def rm(run: StageRun) -> tuple[Any, Callable[[], Tensor]]:
    base: Any = load_base(run.base, CPU, head="score")
    base.config.pad_token_id = 0
    model = reward_from_sft(base, run.loaded.recipe.lora, None)
    return model, lambda: logits_of(model)


def online(run: StageRun) -> tuple[Any, Callable[[], Tensor]]:
    """The roles of PPO, RLOO and GRPO: a policy whose adapter has dropout, as that of SFT may have."""
    adapter = sft(run, lora_dropout=0.3)[0].peft_config["default"]
    shared = SharedBase(load_base(run.base, CPU), {"policy": adapter}, trainable=("policy",))

    def hidden() -> Tensor:
        with shared.role("policy"):
            return shared.hidden(IDS)

    return shared.base, hidden


def lean(run: StageRun) -> tuple[Any, Callable[[], Tensor]]:
    """The lean trunk, in all stages but pretrain."""
    model, _ = sft(run)
    trunk = LeanTrunk(model.get_base_model())
    return model, lambda: trunk.hidden("default", IDS)


def pretrain(run: StageRun) -> tuple[Any, Callable[[], Tensor]]:
    """The model that is drawn for a recipe that asks for dropout itself, like the checkpoint."""
    tokenizer = load_tokenizer(run.base)
    config = AutoConfig.from_pretrained(base_name(run.base))
    noise = {key: value for key, value in config.to_dict().items() if value == 0.3}
    assert noise and not noise.keys() & architecture_of(config).keys()
    model = new_base(Architecture.model_validate(architecture_of(config) | noise), tokenizer, "float32")
    return model, lambda: logits_of(model)


@pytest.mark.parametrize("stage", [sft, rm, online, lean, pretrain])
def test_a_pass_in_training_is_the_one_in_evaluation(run, stage):
    architecture = run.loaded.recipe.model.architecture
    if stage is lean and architecture.model_type not in LEAN_TYPES:
        pytest.skip("the lean trunk does not run this type")
    model, forward = stage(run)
    expected = forward().detach()
    model.train()
    assert torch.equal(forward(), expected)
    model.activation_checkpointing_enable()
    assert torch.equal(forward(), expected)


def test_dropout_of_adapters_acts_in_sft_and_leaves_the_base_alone(run):
    model, forward = sft(run, lora_dropout=0.3)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    expected, base = forward().detach(), logits_of(model.get_base_model())
    model.train()
    assert not torch.equal(forward(), expected)
    with model.disable_adapter():
        assert not torch.equal(base, expected) and torch.equal(forward(), logits_of(model.eval()))


def test_names_of_noise_that_no_list_has():
    """Mixtral's noise of routers, layers that are left out, a section inside another; and no switch or text."""
    config: Any = AutoConfig.for_model("mixtral", router_jitter_noise=0.01)
    config.layerdrop, config.inner = 0.2, AutoConfig.for_model("gpt2", attn_pdrop=0.1)
    config.use_dropout_free_router, config.drop_policy, config.num_labels = True, "probs", 3
    without_dropout(config)
    assert (config.router_jitter_noise, config.layerdrop, config.inner.attn_pdrop) == (0, 0, 0)
    assert (config.use_dropout_free_router, config.drop_policy, config.num_labels) == (True, "probs", 3)
