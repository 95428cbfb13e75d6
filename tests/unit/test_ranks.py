"""One rank of several, against counts by hand, real models and what whole bases are predicted to need."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from peakmem.events import WHOLE, Parts, Reserved
from rlhf import recipe
from rlhf.plan import ranks, weights
from rlhf.plan.phases import Peak, PredictedPhase, PredictedStage, Work
from rlhf.plan.predict import Predictor
from rlhf.plan.rehearsal.lines import stage_at_depth
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.schema import Sft
from rlhf.recipe.schema_online import Ppo
from tests.helpers import FIXTURES, noted
from tests.unit import plans

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
    answer = PredictedStage(plans.phase(0, base=1), {"update": plans.phase(0, base=1)})
    monkeypatch.setattr(Predictor, "_rehearsed", lambda self, loaded, *_: noted(asked, loaded, answer))
    whole = load(TWO)
    Predictor().predict(whole, "ppo")
    assert asked == [ranks.recipe_of_one_rank(whole, "ppo")] and asked != [whole]


def test_a_stage_needs_what_its_neediest_phase_does():
    """So that the plan and the tables made of predicted.json, which has the phases, say the same."""
    peaks = {WHOLE: Peak(), "update": Peak(by_operation={"step": {"base": 1}}), "score": Peak()}
    held = {
        name: Reserved(0, 10**11, size) for name, size in ((WHOLE, 42 * 10**9), ("update", 41 * 10**9), ("score", 1))
    }
    predicted = stage_at_depth(peaks, peaks, 40, lambda phase: 0, held, {})
    assert predicted.whole.needed_bytes == predicted.phases["update"].needed_bytes == 41 * 10**9


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
    whole = replace(undivided, work=Work(flops=100), paged_bytes=9)
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
    assert whole_stage == replace(phases["rollout"], work=whole.work, paged_bytes=9)
    replicated = load("8xh100-llama2-70b/v1", hardware__engine="ddp").recipe
    assert ranks.divide(replicated, "ppo", predicted) is predicted
