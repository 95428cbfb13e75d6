"""One rank of several, against counts by hand, real models and what whole bases are predicted to need."""

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from peakmem.events import Reserved
from rlhf import recipe
from rlhf.cli.plan_tables import between_rows
from rlhf.plan import ranks, weights
from rlhf.plan.phases import (
    WHOLE,
    Parts,
    Peak,
    PredictedPhase,
    PredictedStage,
    PredictionError,
    RehearsedStage,
    Work,
)
from rlhf.plan.plan import RankTraffic, StageTime
from rlhf.plan.predict import Predictor
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.schema import Sft
from rlhf.recipe.schema_online import Ppo
from tests.helpers import FIXTURES, noted
from tests.unit.plans import planned, planned_stage

RECIPES = Path(__file__).parents[2] / "recipes"
TWO = "2x4090-llama2-13b/v1"


def load(name: str, **changes) -> PinnedRecipe:
    root = FIXTURES if name == TWO else RECIPES
    return recipe.load(root / name, {key.replace("__", "."): value for key, value in changes.items()})


def test_one_rank_takes_its_share_of_the_rows_and_all_of_the_steps():
    whole = load("8xh100-llama2-70b/v1")
    sft = ranks.recipe_of_one_rank(whole, "sft").recipe.options(Sft)
    assert sft.per_device_train_batch_size * sft.gradient_accumulation_steps * 8 == 8 * 8
    assert sft.max_samples == 2500 and ranks.recipe_of_one_rank(whole, "sft").recipe.hardware.count == 1
    ppo = ranks.recipe_of_one_rank(whole, "ppo").recipe.options(Ppo)
    assert (ppo.batch_size, ppo.rollout_batch_size, ppo.max_eval_samples, ppo.steps) == (16, 16, 16, 156)
    assert ppo.per_device_train_batch_size == 8 == 128 // 2 // 8
    assert ranks.recipe_of_one_rank(whole, "evaluate") is whole, "which one process does"
    one = load("4090-llama2-7b/v3")
    assert ranks.recipe_of_one_rank(one, "ppo") is one


def test_one_rank_is_rehearsed(monkeypatch):
    asked: list[PinnedRecipe] = []
    peaks = {WHOLE: Peak(), "update": Peak(by_operation={"step": {"base": 1}})}
    answer = RehearsedStage([peaks, peaks], None)
    monkeypatch.setattr(Predictor, "_rehearsed", lambda self, loaded, *_: noted(asked, loaded, answer))
    whole = load(TWO)
    Predictor().predict(whole, "ppo")
    assert asked == [ranks.recipe_of_one_rank(whole, "ppo")] and asked != [whole]


def test_a_stage_needs_what_its_neediest_phase_does(monkeypatch):
    """So that the plan and the tables made of predicted.json, which has the phases, say the same."""
    peaks = {WHOLE: Peak(), "update": Peak(by_operation={"step": {"base": 1}}), "score": Peak()}
    held = {
        name: Reserved(0, 10**11, size) for name, size in ((WHOLE, 42 * 10**9), ("update", 41 * 10**9), ("score", 1))
    }
    answer = RehearsedStage([peaks, peaks], held)
    monkeypatch.setattr(Predictor, "_rehearsed", lambda *_: answer)
    predicted = Predictor().predict(load("h100-llama2-13b/v1"), "ppo")
    assert predicted.whole.needed_bytes == predicted.phases["update"].needed_bytes == 41 * 10**9


def test_adapters_are_counted_as_peft_makes_them():
    changed = load(
        "h100-mistral-7b/v6",
        model__architecture__hidden_size=64,
        model__architecture__intermediate_size=96,
        model__architecture__num_hidden_layers=3,
        model__architecture__num_attention_heads=4,
        model__architecture__num_key_value_heads=2,
    ).recipe
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, vocab_size=50)
    for targets in ("all-linear", ("q_proj", "v_proj")):
        lora = changed.lora.model_copy(update={"target_modules": targets})
        names = targets if isinstance(targets, str) else list(targets)
        model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=lora.r, target_modules=names))
        made = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
        assert weights.adapter_parameters(changed.model_copy(update={"lora": lora})) == made


@pytest.mark.parametrize("name", ["8xh100-llama2-70b/v1", "h100-mistral-7b/v1"])
def test_layers_have_the_bytes_that_are_predicted_for_a_loaded_base(name):
    """The base while it is loaded, less embeddings and output layer, which are not divided."""
    loaded = load(name)
    shape = loaded.recipe.model.architecture
    parts = json.loads((RECIPES / name / "predicted.json").read_text())["stages"]["ppo"]["load"]
    assert shape and shape.vocab_size
    outside = 2 * shape.vocab_size * shape.hidden_size * 2
    assert weights.layers_bytes(loaded.recipe) == pytest.approx(
        parts["base"] + parts.get("quantization", 0) - outside, rel=0.005
    )


def test_where_layers_are_divided_a_rank_has_its_part_and_two_layers():
    loaded = load("8xh100-llama2-70b/v1")
    layers = weights.layers_bytes(loaded.recipe)
    scales = layers // 10  # of the layers' 4-bit weights, which are a part of `layers`
    parts: Parts = {
        "base": layers - scales + 1_000_000_000,
        "quantization": scales,
        "activations": 5_000_000_000,
    }
    undivided = PredictedPhase(sum(parts.values()), parts, 0, Work())
    whole = undivided._replace(work=Work(flops=100), paged_bytes=9)
    predicted = PredictedStage(whole, dict.fromkeys(("load", "rollout", "update"), undivided))
    whole_stage, phases = ranks.divide(loaded.recipe, "ppo", predicted)
    assert phases["load"] == undivided
    for phase, more in (("rollout", layers / 8), ("update", layers / 8 + layers / 40 - layers)):
        for part in ("base", "quantization"):
            share = parts[part] / (layers + 1_000_000_000)
            assert phases[phase].components[part] == pytest.approx(parts[part] + share * more, abs=4), (phase, part)
        assert phases[phase].components["activations"] == parts["activations"]
        assert phases[phase].peak_bytes == pytest.approx(undivided.peak_bytes + more, abs=8)
    assert phases["update"].peak_bytes == sum(phases["update"].components.values())
    assert whole_stage == phases["rollout"]._replace(work=whole.work, paged_bytes=9)
    replicated = load("8xh100-llama2-70b/v1", hardware__engine="ddp").recipe
    assert ranks.divide(replicated, "ppo", predicted) is predicted


def test_what_ranks_tell_each_other_by_hand():
    """Two cards: a ring's all-reduce moves one times the gradients, a fetched layer half of itself."""
    ddp = load(TWO).recipe
    gradients = 4 * weights.adapter_parameters(ddp)
    assert ranks.traffic(ddp, "sft") == (gradients, 0)
    assert ranks.traffic(ddp, "ppo") == (2 * 4 * 2 * gradients, 0), "epochs, minibatches, policy and critic"
    fsdp = load(TWO, hardware__engine="fsdp").recipe
    accumulated = fsdp.options(Sft).per_device(2)[1]
    assert ranks.traffic(fsdp, "sft").weights == accumulated * weights.layers_bytes(fsdp)
    micro = 32 // 4 // 2 // fsdp.options(Ppo).per_device_train_batch_size
    passes = 2 * 2 * (2 * 4) * micro + 1
    assert ranks.traffic(fsdp, "ppo").weights == passes * weights.layers_bytes(fsdp) / 2


def test_layers_that_are_not_known_are_neither_divided_nor_counted():
    unknown = load(TWO, model__architecture__model_type="phi3", hardware__engine="fsdp").recipe
    stage = PredictedStage(PredictedPhase(1, {"base": 1}, 0, Work()), {})
    for refused in (lambda: ranks.divide(unknown, "sft", stage), lambda: ranks.traffic(unknown, "sft")):
        with pytest.raises(PredictionError, match="the linear layers of phi3 models are not known"):
            refused()


def test_scaling_is_between_no_overlap_and_all():
    assert ranks.scaling(3.0, 1.0) == (0.75, 1.0)
    assert ranks.scaling(1.0, 4.0) == (0.2, 0.25)


def test_the_table_is_for_several_cards_only():
    time = StageTime(1.0, 1.0, (1.0, 1.0), None, RankTraffic(10**9, 0, 1, 0.5, (0.5, 1.0)))
    plan = planned({"sft": planned_stage(time=time), "merge": planned_stage()})
    assert between_rows(plan) == [("sft", "1.000", "-", "0.500 s", "50% to 100%")]
