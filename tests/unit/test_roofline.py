"""The roofline: counts by hand, beside torch's own counter, and beside what is published of a model."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from bench import derived
from bench.kinds import Spread
from bench.paths import ROOT
from bench.roofline import __main__ as roofline
from bench.roofline import times
from bench.roofline.counts import Decoder, LayerPasses, LeastWork, RowSizes, phases
from peakmem import cards
from peakmem.cards import Rates
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.models import matmul
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.plan import padding, projection, weights
from rlhf.plan.phases import PredictedPhase, PredictedStage, PredictionError, Work
from rlhf.plan.weights import NF4_BYTES
from rlhf.recipe import Ppo
from rlhf.rollout.library_decoding import WINDOW_BY_DEVICE

RECIPES = ROOT / "recipes"
CARD = cards.gpu_of("h100")
# q 4x4, k and v 4x2, o 4x4, gate and up 4x8, down 8x4: 144 weights
HAND = Decoder(hidden=4, intermediate=8, layers=2, heads=2, kv_heads=1, head_dim=2, vocab=10)
BATCH, TOKENS, LAYERS = 2, 16, 4
TINY = Decoder(32, 48, LAYERS, 4, 2, 8, 64, rank=3, targets=frozenset(HAND.linear), adapted=range(LAYERS), size=4)
SQUARE = RowSizes(BATCH * TOKENS, BATCH * TOKENS**2, BATCH * 3, BATCH * 3 * TOKENS)  # torch counts masked pairs as well


def test_the_operations_of_a_layer_are_those_by_hand():
    rows = RowSizes(tokens=3, pairs=6, wanted=1, wanted_pairs=3)
    assert HAND.forward_flops(0, rows) == 2 * 3 * 144 + 2 * (2 * 6 * 4)
    assert HAND.forward_flops(1, rows, narrow=True) == 2 * 3 * 16 + 2 * 1 * 128 + 2 * (2 * 3 * 4)
    adapted = replace(HAND, rank=5, targets=frozenset({"down_proj"}), adapted=range(1, 2))
    assert adapted.forward_flops(0, rows) == HAND.forward_flops(0, rows)
    assert adapted.forward_flops(1, rows) - HAND.forward_flops(1, rows) == 2 * 3 * 5 * (8 + 4)
    assert adapted.adapter_weights(1) == 5 * (8 + 4)
    # Gradients of scores, probabilities, values, queries and keys: four products; q, k and v pass none further down.
    assert adapted.backward_flops(1, rows) == 2 * 3 * (112 + 2 * 5 * (8 + 4)) + 4 * (2 * 6 * 4)
    # hidden, queries, keys, values, mixed, hidden, gate and up: 4 + 4 + 2 + 2 + 4 + 4 + 16 numbers of a token
    assert HAND.between_products(rows) == 2 * 2 * 3 * 36
    assert HAND.between_products(rows, narrow=True) == 2 * 2 * (3 * 8 + 1 * 28)
    assert HAND.head(7, passes=2) == LeastWork(2 * 7 * 40, 2 * (2 * 40 + 7 * 4))


def test_rows_count_tokens_and_pairs_of_query_and_key():
    """Prompts of 3 tokens with responses of 2: queries at 0 to 4 see 1 to 5 keys, and those at 2 and 3 predict."""
    assert RowSizes.of(1, 3, 2) == RowSizes(5, 1 + 2 + 3 + 4 + 5, 2, 3 + 4)
    assert RowSizes.of(1, 3, 2, last_only=True) == RowSizes(5, 15, 1, 5)
    assert RowSizes.of(2, 3, 2, copies=2) == RowSizes(3 + 2 + 2, (1 + 2 + 3) + 2 * (4 + 5), 4, 2 * (3 + 4))


@pytest.mark.parametrize("start", [0, 2])
def test_passes_have_the_operations_that_torch_counts(start):
    model, decoder = llama(start)
    ids = torch.randint(0, TINY.vocab, (BATCH, TOKENS))
    passes = LayerPasses(decoder, CARD, lean=False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        hidden = model.get_base_model().model(input_ids=ids).last_hidden_state
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        hidden.sum().backward()
    assert forward.get_total_flops() == passes.forward(SQUARE, 1, range(LAYERS)).flops
    assert backward.get_total_flops() == passes.backward(SQUARE, 1, range(start, LAYERS)).flops
    with FlopCounterMode(display=False) as head:
        model.get_base_model().lm_head(hidden)
    assert head.get_total_flops() == decoder.head(BATCH * TOKENS, 1).flops


def test_the_lean_trunk_has_the_operations_that_torch_counts(monkeypatch):
    """Lower layers once, then upper layers, the last one at three positions.

    Without adapters, which are added in place, where torch does not count.
    """
    monkeypatch.setattr(matmul, "ONEDNN", False)  # whose products torch does not count
    monkeypatch.setattr(LeanTrunk, "_round_up", lambda self, count: count)
    model, decoder = llama(2)
    trunk = LeanTrunk(model.get_base_model())
    ids, positions = torch.randint(0, TINY.vocab, (BATCH, TOKENS)), torch.arange(3).expand(BATCH, 3)
    passes = LayerPasses(decoder, CARD, lean=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as below:
        lower = trunk.lower_states(ids)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as above, torch.no_grad():
        trunk.hidden("base", ids, positions, lower)
    assert below.get_total_flops() == passes.forward(SQUARE, 1, range(2)).flops
    assert above.get_total_flops() == passes.forward(SQUARE, 1, range(2, LAYERS), adapter=False).flops


def test_weights_by_hand(monkeypatch):
    """Packed weights are unpacked above 4 rows here; 10 rows are 3 groups."""
    monkeypatch.setattr(weights, "_unpacked", lambda card, rows, out, inner: rows > 4)
    packed = replace(HAND, packed=True)
    assert HAND.weight_bytes(0, 10, CARD, "library") == 144 * 2
    assert packed.weight_bytes(0, 4, CARD, "library") == pytest.approx(144 * NF4_BYTES)
    assert packed.weight_bytes(0, 10, CARD, "library") == pytest.approx(144 * (NF4_BYTES + 2 + 2))
    assert packed.weight_bytes(0, 10, CARD, "row_groups") == pytest.approx(144 * 3 * NF4_BYTES)
    assert packed.weight_bytes(0, 10, CARD, "copy") == 144 * 2
    adapted = replace(HAND, rank=5, targets=frozenset({"down_proj"}), adapted=range(1, 2))
    assert adapted.weight_bytes(1, 10, CARD, "library") == 144 * 2 + 60 * 4
    assert adapted.weight_bytes(1, 10, CARD, "library", merged=True) == 144 * 2
    packed = replace(adapted, packed=True)
    merged = 32 * 2 + 112 * NF4_BYTES
    assert packed.weight_bytes(1, 4, CARD, "library", merged=True) == pytest.approx(merged), "a copy of what is merged"


def test_decoding_reads_the_published_weights_of_mistral_7b():
    """7,241,732,096 parameters, embeddings and norms left out; 131,072 bytes of keys and values for a token."""
    loaded = recipe.load(RECIPES / "h100-mistral-7b/v2")
    weights = 2 * (7_241_732_096 - 32_000 * 4096 - 65 * 4096)
    adapters = 4 * 41_943_040
    keys = 16 * 131_072 * (200 + 64)  # 127 steps read 201 to 327 of them
    step = phases(loaded.recipe, "ppo", 200)["rollout/decode"].moved / 127
    between = 32 * BETWEEN * 16
    assert step == pytest.approx(weights + adapters + keys + between + 2 * 16 * 4096, rel=1e-9)


BETWEEN = 2 * 2 * (4096 + 4096 + 2 * 1024 + 4096 + 4096 + 2 * 14336)  # bytes between the products of a layer


@pytest.mark.parametrize(
    ("folder", "stage", "keys"),
    [
        ("h100-mistral-7b/v2", "ppo", {}),
        ("h100-mistral-7b/v2", "ppo", {"ppo.rollout_weights": "merged"}),
        ("h100-llama31-8b-gsm8k/v1", "rloo", {}),
        ("4090-llama2-7b/v2", "ppo", {}),
        ("4090-llama2-7b/v2", "ppo", {"ppo.rollout_4bit": "row_groups"}),
        ("4090-llama2-7b/v2", "ppo", {"ppo.rollout_4bit": "unpacked"}),
        ("4090-mistral-7b/v1", "ppo", {"ppo.rollout_weights": "merged"}),
    ],
)
def test_hours_mbu_and_roofline_count_the_same_bytes_of_a_decoding_step(monkeypatch, folder, stage, keys):
    """The roofline adds the tensors between products; the weights are counted here as those of its passes."""
    loaded = recipe.load(RECIPES / folder)
    loaded = loaded._replace(recipe=roofline.changed(loaded.recipe, keys))
    options, decoder = getattr(loaded.recipe, stage), Decoder.of(loaded.recipe)
    rows, steps, longest = options.rollout_batch_size, options.response_length - 1, options.max_prompt_length
    batches = options.batch_size // rows
    assert options.batch_size == batches * rows
    form: weights.Form = "copy" if options.rollout_4bit == "unpacked" else options.rollout_4bit
    merged, gpu = options.rollout_weights == "merged", cards.gpu_of(loaded.recipe.hardware.name)
    layers = sum([decoder.weight_bytes(number, rows, gpu, form, merged) for number in range(decoder.layers)])
    slots = rows * (longest + options.response_length / 2)
    cached = 2 * decoder.layers * decoder.kv_heads * decoder.head_dim * 2 * slots
    expected = layers + 2 * decoder.vocab * decoder.hidden + cached

    between = decoder.layers * decoder.between_products(RowSizes(rows, 0, 0, 0)._replace(wanted=rows))
    least = phases(loaded.recipe, stage, longest)["rollout/decode"].moved / steps / batches
    assert least - between - 2 * rows * decoder.hidden == pytest.approx(expected, rel=1e-12)

    predicted = PredictedStage(
        PredictedPhase(1, {"base": 1}, 0, Work()), {"rollout/decode": PredictedPhase(1, {}, 0, Work())}
    )
    monkeypatch.setattr(projection, "mean_prompt", lambda recipe, most, rows: most)
    whole = projection.stage_work(loaded.recipe, stage, predicted)
    assert whole and whole.decoded_bytes / projection._decoding_steps(loaded.recipe, stage, None) == pytest.approx(
        expected
    )

    second: Spread = {"median": 1.0, "low": 1.0, "high": 1.0, "n": 4}
    row: Any = {"phase_seconds": dict.fromkeys(("rollout/decode", "update"), second)}
    row |= {"tokens_per_step": 1.0, "tokens_per_second": 1.0}
    monkeypatch.setattr(projection, "step_flops", lambda *_: {"update": 1.0})
    figures = derived.derived_figures(loaded, stage, row, predicted, {"flops": 1.0, "bandwidth": 1.0}, "longest")
    assert figures["mbu"] == pytest.approx(batches * steps * expected)


def test_slots_that_a_row_reads_in_a_step():
    """Its own tokens, where the card's kernel can; else a window, which for up to 256 tokens is the whole response."""
    bf16 = recipe.load(RECIPES / "h100-mistral-7b/v2").recipe
    assert projection.cached_slots(bf16, 200, 128) == 200 + 64
    for changes in ({"hardware.name": "t4"}, {"model.attention": "eager"}, {"model.dtype": "float32"}):
        assert projection.cached_slots(roofline.changed(bf16, changes), 200, 128) == 200 + 128
    other = recipe.load(RECIPES / "h100-mistral-7b/v2", {"model.architecture.model_type": "cohere"}).recipe
    assert projection.cached_slots(other, 200, 384) == 200 + (256 * 256 + 128 * 384) / 384
    assert projection.cached_slots(recipe.load(RECIPES / "cpu-tiny/v2").recipe, 24, 40) == 24 + 20
    assert WINDOW_BY_DEVICE["cuda"].ahead + 1 == projection.WINDOW


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


def test_changes_remove_what_they_are_about():
    plain = recipe.load(RECIPES / "h100-mistral-7b/v2").recipe
    work = phases(plain, "ppo", 200)
    assert set(work) - set(phases(roofline.changed(plain, {"ppo.old_logprobs": "rollout"}), "ppo", 200)) == {
        "score/policy"
    }
    lean = phases(roofline.changed(plain, {"hardware.trunk": "lean"}), "ppo", 200)
    half = phases(roofline.changed(plain, {"hardware.trunk": "lean", "lora.layers": "upper_half"}), "ppo", 200)
    assert lean["update/value forward"].flops < work["update/value forward"].flops
    assert half["update/value backward"].flops < 0.51 * lean["update/value backward"].flops
    assert half["score/shared layers"].flops == pytest.approx(0.5 * work["score/value"].flops, rel=0.01)
    assert half["update/optimizer"].moved == lean["update/optimizer"].moved / 2
    packed = recipe.load(RECIPES / "4090-llama2-7b/v2").recipe
    grouped = phases(roofline.changed(packed, {"ppo.rollout_4bit": "row_groups"}), "ppo", 200)
    assert grouped["rollout/prefill"] == phases(packed, "ppo", 200)["rollout/prefill"], "groups are of decoding steps"
    assert grouped["rollout/decode"].moved < phases(packed, "ppo", 200)["rollout/decode"].moved
    unpacked = phases(roofline.changed(packed, {"ppo.update_4bit": "unpacked"}), "ppo", 200)
    for name in ("value forward", "value recomputed", "value backward"):  # 2 epochs of 4 minibatches of one micro-batch
        saved = phases(packed, "ppo", 200)[f"update/{name}"].moved - unpacked[f"update/{name}"].moved
        assert saved == pytest.approx(8 * unpacked["update/copy"].moved)
    merged = phases(roofline.changed(plain, {"ppo.rollout_weights": "merged"}), "ppo", 200)
    assert merged["rollout/copy"].moved == 2 * 2 * (7_241_732_096 - 2 * 32_000 * 4096 - 65 * 4096)
    assert merged["rollout/decode"].moved == work["rollout/decode"].moved - 127 * 4 * 41_943_040
    checkpointed = phases(roofline.changed(plain, {"ppo.gradient_checkpointing": True}), "ppo", 200)
    assert checkpointed["update/value recomputed"] == work["update/value forward"]


def test_moments_of_eight_bits_move_less_by_hand():
    """Per weight and step: 4 bytes each to read it, write it and read its gradient; two moments read and written."""
    plain = recipe.load(RECIPES / "h100-mistral-7b/v2").recipe
    ppo = plain.options(recipe.Ppo)
    steps = ppo.num_ppo_epochs * ppo.num_mini_batches
    for optim, moments in (("adamw_torch_fused", 4 * 4), ("adamw_8bit", 4 * 1), ("paged_adamw_8bit", 4 * 1)):
        work = phases(roofline.changed(plain, {"ppo.optim": optim}), "ppo", 200)
        assert work["update/optimizer"].moved == 2 * 41_943_040 * steps * (12 + moments)


def test_the_lean_trunk_computes_a_prompt_once_for_the_responses_in_a_micro_batch():
    plain = roofline.changed(recipe.load(RECIPES / "h100-llama31-8b-gsm8k/v1").recipe, {"hardware.trunk": "lean"})
    apart, shared = (phases(plain, "rloo", 150, once)["update/policy forward"].flops for once in (False, True))
    assert 1 < apart / shared < 470 / 320
    single = roofline.changed(plain, {"rloo.per_device_train_batch_size": 1})
    assert phases(single, "rloo", 150)["update/policy forward"].flops == pytest.approx(apart)


def test_a_bound_is_the_larger_quotient():
    card = Rates(flops=10.0, bandwidth=2.0, source="made up")
    assert (LeastWork(100, 2).seconds(card), times.bound(LeastWork(100, 2), card)) == (10, "compute")
    assert (LeastWork(100, 40).seconds(card), times.bound(LeastWork(100, 40), card)) == (20, "memory")


def test_the_command_prints_json_of_every_recipe_of_one_card(capsys, monkeypatch):
    for name in ("4090-llama2-7b/v2", "h100-mistral-7b/v2"):
        roofline.main([str(RECIPES / name), "--json"], standalone_mode=False)
        row = json.loads(capsys.readouterr().out)
        assert row["seconds"] == pytest.approx(sum(part["seconds"] for part in row["phases"].values()))
        packed = name.startswith("4090")
        assert ("4-bit products in row groups" in row["changes"]) == packed
    roofline.main([str(RECIPES / "4090-mistral-7b/v1")], standalone_mode=False)
    assert "predicted roofline seconds" in capsys.readouterr().out


def test_the_page_shows_the_tables_of_the_command():
    folders = ("4090-llama2-7b/v2", "4090-mistral-7b/v1", "h100-mistral-7b/v2")
    tables = roofline.markdown([roofline.predict(recipe.load(RECIPES / folder), "ppo") for folder in folders])
    assert tables in (ROOT / "docs/internals.md").read_text(), "out of date: bench.roofline --markdown"


@pytest.mark.parametrize(
    ("folder", "stage", "message"),
    [("12gb-qwen3-4b/v1", "ppo", "recipes for one card"), ("h100-mistral-7b/v2", "rloo", "no section rloo")],
)
def test_what_has_no_roofline_is_refused(folder, stage, message):
    with pytest.raises(UserError, match=message):
        roofline.predict(recipe.load(RECIPES / folder), stage)


def llama(start: int):
    """Return a tiny Llama with adapters from layer `start` on, and its sizes."""
    config = LlamaConfig(
        vocab_size=TINY.vocab,
        hidden_size=TINY.hidden,
        intermediate_size=TINY.intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads,
    )
    adapters = LoraConfig(
        r=TINY.rank, target_modules=sorted(TINY.targets), layers_to_transform=list(range(start, LAYERS))
    )
    return get_peft_model(LlamaForCausalLM(config), adapters), replace(TINY, adapted=range(start, LAYERS))
