"""The bytes of a decoding step, on which projected hours, MBU and the roofline rest: by hand and as published."""

from typing import Any

import pytest

from bench import derived
from bench.kinds import Spread
from bench.paths import ROOT
from peakmem import cards
from peakmem.cards import Rates
from rlhf import recipe
from rlhf.plan import padding, projection, weights
from rlhf.plan.phases import PredictedPhase, PredictedStage, PredictionError, Work
from rlhf.plan.weights import NF4_BYTES, bytes_of_product
from rlhf.recipe.schema_online import Ppo

RECIPES = ROOT / "recipes"
SECOND: Spread = {"median": 1.0, "low": 1.0, "high": 1.0, "n": 4}


def predicted(**phases: Work) -> PredictedStage:
    """A prediction of these phases, whose names have "_" for "/"."""
    known = {name.replace("_", "/"): PredictedPhase(1, {}, 0, work) for name, work in phases.items()}
    return PredictedStage(PredictedPhase(1, {"base": 1}, 0, Work()), known)


def changed(loaded: recipe.Recipe, keys: dict[str, str]) -> recipe.Recipe:
    """A recipe with other values, unchecked."""
    for key, value in keys.items():
        section, name = key.split(".")
        part = getattr(loaded, section).model_copy(update={name: value})
        loaded = loaded.model_copy(update={section: part})
    return loaded


@pytest.mark.parametrize(("rows", "each"), [(4, NF4_BYTES), (10, NF4_BYTES + 2 + 2)])
def test_a_packed_weight_by_hand(monkeypatch, rows: int, each: float):
    """Packed weights are unpacked above 4 rows here."""
    monkeypatch.setattr(weights, "_unpacked", lambda card, rows, out, inner: rows > 4)
    card = cards.gpu_of("h100")
    assert bytes_of_product(8, 4, rows, 2, True, card) == pytest.approx(32 * each)
    assert bytes_of_product(8, 4, rows, 2, False, card) == 32 * 2


def test_decoding_reads_the_published_weights_of_mistral_7b():
    """7,241,732,096 parameters, embeddings and norms left out; 131,072 bytes of keys and values for a token."""
    loaded = recipe.load(RECIPES / "h100-mistral-7b/v2").recipe
    read = 2 * (7_241_732_096 - 32_000 * 4096 - 65 * 4096)
    adapters = 4 * 41_943_040
    keys = 16 * 131_072 * (200 + 128)  # the window of 256 slots is wider than all responses
    assert projection.decoding_step_bytes(loaded, "ppo", 200) == pytest.approx(read + adapters + keys, rel=1e-9)


@pytest.mark.parametrize(
    ("folder", "stage"),
    [("h100-mistral-7b/v2", "ppo"), ("h100-llama31-8b-gsm8k/v1", "rloo"), ("4090-llama2-7b/v2", "ppo")],
)
def test_hours_mbu_and_roofline_count_the_same_bytes_of_a_decoding_step(monkeypatch, folder, stage):
    loaded = recipe.load(RECIPES / folder)
    options = getattr(loaded.recipe, stage)
    batches, steps = options.batch_size // options.rollout_batch_size, options.response_length - 1
    expected = projection.decoding_step_bytes(loaded.recipe, stage, options.max_prompt_length)
    found = predicted(rollout_prefill=Work(), rollout_decode=Work(), score=Work(), update=Work(flops=1))
    monkeypatch.setattr(projection, "mean_prompt", lambda recipe, most, rows: most)
    whole = projection.stage_work(loaded.recipe, stage, found)
    assert whole and whole.decoded_bytes / projection._decoding_steps(
        loaded.recipe, stage, None, evaluated=True
    ) == pytest.approx(expected)
    row: Any = {"phase_seconds": dict.fromkeys(("rollout/prefill", "rollout/decode", "score", "update"), SECOND)}
    row |= {"tokens_per_step": 1.0, "tokens_per_second": 1.0}
    figures = derived.derived_figures(loaded, stage, row, found, {"flops": 1.0, "bandwidth": 1.0}, "longest")
    assert figures["mbu"] == pytest.approx(batches * steps * expected)
    least = projection.step_limits(loaded.recipe, stage, found, Rates(1.0, 10.0, "made up"), longest=True)
    assert least["rollout/decode"] == pytest.approx(batches * steps * expected / 10)


def test_the_least_seconds_of_a_step_are_those_of_its_products_and_of_what_decoding_reads():
    loaded = recipe.load(RECIPES / "h100-mistral-7b/v2").recipe
    found = predicted(
        rollout_prefill=Work(flops=100), rollout_decode=Work(flops=9), score=Work(flops=300), update=Work(flops=800)
    )
    card = Rates(10.0, 1e12, "made up")
    least = projection.step_limits(loaded, "ppo", found, card, longest=True)
    assert (least["rollout/prefill"], least["score"]) == (10.0, 30.0)
    assert least["update"] == projection.step_flops(loaded, "ppo", found)["update"] / 10
    assert least["rollout"] == least["rollout/prefill"] + least["rollout/decode"]
    usual = projection.step_limits(loaded, "ppo", found, card)
    assert all(usual[phase] < least[phase] for phase in least), "rows of the data are shorter than the longest"


@pytest.mark.parametrize(
    ("folder", "own", "window"),
    [("4090-llama2-7b/v2", 2_040_948_326, 5_368_709_120), ("h100-mistral-7b/v2", 408_189_665, 1_073_741_824)],
)
def test_bytes_of_keys_and_values_in_a_step(folder, own, window):
    """Of a mean step on rows as long as HH-RLHF's; the window of 512 slots is what a mask would have it read."""
    loaded = recipe.load(RECIPES / folder).recipe
    options = loaded.options(Ppo)
    assert loaded.model.architecture
    size = 2 * loaded.model.architecture.cached_per_token * options.rollout_batch_size
    prompt = padding.mean_prompt(loaded, options.max_prompt_length, None)
    assert round(size * projection.cached_slots(loaded, prompt, options.response_length)) == own
    assert size * 512 == window


def test_a_step_of_layers_that_are_not_known_reads_what_a_rehearsal_found():
    loaded = recipe.load(RECIPES / "h100-mistral-7b/v2", {"model.architecture.model_type": "phi3"}).recipe
    with pytest.raises(PredictionError, match="the linear layers of phi3 models are not known"):
        projection.decoding_step_bytes(loaded, "ppo", 200)
    table = 2 * 32_000 * 4096
    found = PredictedPhase(1, {"base": table + 500, "adapters": 7, "kv_cache": 9}, 0, Work())
    predicted = PredictedStage(found, {"rollout": found})
    assert projection.decoding_step_bytes(loaded, "ppo", 200, predicted) == 500 + 16 * 131_072 * (200 + 64)
