"""Predicted memory against real tensors and against arithmetic.

The CPU recipe with random weights at small sizes. On a CPU every phase can be checked: the tracker counts the same
stages on real tensors.
"""

import math
from typing import Any

import pytest

from bench.peaks import measure
from peakmem import cards
from peakmem.events import WHOLE, Parts
from rlhf import recipe
from rlhf.plan.phases import Peak, PredictedPhase, PredictedStage
from rlhf.plan.predict import Predictor
from rlhf.plan.rehearsal.lines import at_depth
from rlhf.plan.rehearsal.meta_runs import Rehearsals, RehearsalsAtDepths
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.rehearsal import random_weights_changes
from tests.helpers import RECIPE
from tests.invariants.tiny import HIDDEN, INTERMEDIATE, KV_HEADS, PROMPT, RANK, RESPONSE, SIZE, TINY, VOCAB, tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("as_in_a_worker"),
]

STAGES: tuple[StageName, ...] = ("sft", "rm", "ppo", "dpo", "evaluate", "merge")  # of the tiny recipe

NF4 = {
    "hardware.device": "cuda",
    "model.dtype": "bfloat16",
    "model.quantization": "nf4",
    **{f"{stage}.optim": "paged_adamw_8bit" for stage in ("sft", "rm", "ppo", "dpo")},
    **{f"{stage}.gradient_checkpointing": True for stage in ("sft", "rm", "ppo", "dpo")},
}


def peaks(phases: dict[str, Peak]) -> dict[str, Parts]:
    """Components at the peak of each phase of a rehearsal."""
    return {name: peak.highest for name, peak in phases.items() if peak.by_operation}


def with_whole(predicted: PredictedStage) -> dict[str, PredictedPhase]:
    """The whole stage and its phases, by the names that a rehearsal and a measurement have for them."""
    return {WHOLE: predicted.whole, **predicted.phases}


def total(parts: Parts) -> int:
    return sum(parts.values())


# -- against the tracker on real tensors -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def six(predictor) -> tuple[dict[StageName, PredictedStage], dict[str, dict[str, int]]]:
    """Every stage at six layers: predicted from two and four, and counted on real tensors."""
    loaded = tiny(6)
    predicted = {stage: predictor.predict(loaded, stage) for stage in STAGES}
    return predicted, measure(loaded, STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_prediction_is_what_real_tensors_take(six, stage):
    """Every phase within 1 %; `load` and `merge` within 5 %.

    Those two read adapters into the CPU's memory before they go to the device, which here is the same memory.
    """
    predicted, measured = with_whole(six[0][stage]), six[1][stage]
    assert predicted.keys() == measured.keys()
    for phase, peak in predicted.items():
        through_cpu = phase in ("load", "merge") or (stage == "merge" and phase == WHOLE)
        assert peak.peak_bytes == pytest.approx(measured[phase], rel=0.05 if through_cpu else 0.01), phase


def test_the_lean_trunk_takes_what_is_predicted(predictor):
    """With prompts that several rows share, DPO's pairs and GRPO's groups, and with activations that are recomputed."""
    changes: dict[str, Any] = {key: value for key, value in TINY.items() if not key.startswith("ppo.")}
    changes |= {f"grpo.{key.removeprefix('ppo.')}": value for key, value in TINY.items() if key.startswith("ppo.")}
    changes |= {"grpo.max_completion_length": changes.pop("grpo.response_length"), "hardware.trunk": "lean"}
    changes["grpo.gradient_checkpointing"] = True
    groups = RECIPE.parents[1] / "cpu-tiny-groups" / "v1"
    base = recipe.load(groups, {"model.architecture.vocab_size": VOCAB}).recipe
    loaded = recipe.load(groups, random_weights_changes(base, 50, "longest") | changes)
    measured = measure(loaded, ["sft", "dpo", "grpo"])
    phases: list[tuple[StageName, str]] = [("sft", "train"), ("dpo", "train"), ("grpo", "update"), ("grpo", "score")]
    for stage, phase in phases:
        peak = predictor.predict(loaded, stage).phases[phase]
        assert peak.peak_bytes == pytest.approx(measured[stage][phase], rel=0.01), (stage, phase)


def test_components_add_up_and_none_is_below_zero(six):
    predicted, _ = six
    for stage in predicted:
        for phase, peak in with_whole(predicted[stage]).items():
            assert sum(peak.components.values()) == peak.peak_bytes, f"{stage}/{phase}"
            if phase != "load":
                assert min(peak.components.values()) > 0, f"{stage}/{phase}"


# -- planted defects ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> tuple[PinnedRecipe, Rehearsals, dict[str, Parts]]:
    """PPO at two layers, its prompts decoded in two batches; as it is."""
    loaded = tiny(2, ppo__rollout_batch_size=4)
    rehearse = Rehearsals(2)
    return loaded, rehearse, peaks(rehearse(loaded, "ppo"))


def risen(before: dict[str, Parts], after: dict[str, Parts]) -> dict[str, int]:
    """Phases whose peak changed, and by how much."""
    assert before.keys() == after.keys()
    changes = {phase: total(after[phase]) - total(before[phase]) for phase in before}
    return {phase: change for phase, change in changes.items() if change and phase}


CACHE = 2 * 2 * KV_HEADS * SIZE * 4 * 4 * (PROMPT + RESPONSE)  # keys and values, 2 layers, float32, 4 rows


def test_a_larger_micro_batch_raises_the_update_and_the_score_alone(two):
    loaded, rehearse, before = two
    more = recipe.load(RECIPE, loaded.overrides | {"ppo.per_device_train_batch_size": 8, "ppo.num_mini_batches": 1})
    rise = risen(before, peaks(rehearse(more, "ppo")))
    assert set(rise) == {"score", "update"}


# -- depth -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eight() -> tuple[PinnedRecipe, Rehearsals]:
    """NF4 and bfloat16 on a GPU's stand-in, rehearsed at the recipe's eight layers."""
    pytest.importorskip("bitsandbytes")
    changes: dict[str, Any] = {key.replace(".", "__"): value for key, value in NF4.items()}
    return tiny(8, **changes, ppo__max_eval_samples=8), Rehearsals(None)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rm", "ppo", "dpo"])
def test_peaks_grow_linearly_with_depth(eight, stage, monkeypatch):
    """In four bits, eight layers from two and four; what cuBLAS takes is added later and would outweigh them here."""
    monkeypatch.setattr(cards, "workspace", lambda card: 0)
    loaded, rehearse = eight
    predicted = with_whole(RehearsalsAtDepths()(loaded, stage, expandable=True))
    rehearsed = rehearse(loaded, stage)
    for phase, parts in peaks(rehearsed).items():
        assert predicted[phase].peak_bytes == pytest.approx(total(parts), rel=0.005), phase
        assert predicted[phase].work.flops == pytest.approx(rehearsed[phase].work.flops, rel=0.005), phase
        assert predicted[phase].paged_bytes == rehearsed[phase].paged, phase
    assert predicted["update" if stage == "ppo" else "train"].components["quantization"] > 0


# -- by hand -----------------------------------------------------------------------------------------------------------


def blocks(*shape: int, size: int = 4) -> int:
    return -(-math.prod(shape) * size // 512) * 512


WIDTHS = [  # (in, out) of a layer's seven matrices
    *((HIDDEN, width) for width in (HIDDEN, KV_HEADS * SIZE, KV_HEADS * SIZE, HIDDEN, INTERMEDIATE, INTERMEDIATE)),
    (INTERMEDIATE, HIDDEN),
]


def base_bytes(layers: int, vocab: int = VOCAB) -> int:
    """Tied embedding, layers with two norms each, last norm, and the rotary frequencies, kept twice."""
    layer = sum(blocks(width, out) for width, out in WIDTHS) + 2 * blocks(HIDDEN)
    return blocks(vocab, HIDDEN) + layers * layer + blocks(HIDDEN) + 2 * blocks(SIZE // 2)


def lora_bytes(layers: int) -> int:
    """A: rank x in, B: out x rank, for every matrix of every layer."""
    return layers * sum(blocks(RANK, width) + blocks(out, RANK) for width, out in WIDTHS)


def test_sizes_that_arithmetic_gives(six):
    """Six layers. Four roles have an adapter each, two of them learn, and so does the critic's head (64 + 1 numbers).

    Fused AdamW keeps two moments of each tensor's size and a counter in a block of its own.
    """
    predicted, _ = six
    parts = predicted["ppo"].phases["rollout"].components
    rows, tokens = 8, PROMPT + RESPONSE
    assert parts["kv_cache"] == 2 * 6 * KV_HEADS * SIZE * 4 * rows * tokens == 589_824
    assert parts["base"] == base_bytes(6)
    assert parts["adapters"] == 4 * lora_bytes(6)
    tensors = 2 * 6 * len(WIDTHS)
    assert parts["optimizer"] == 2 * (2 * lora_bytes(6) + 512 * tensors) + 2 * (2 * 512 + 512)


def test_a_stored_adapter_is_on_the_device_once_while_it_is_loaded():
    """What it is checked against takes none of the device's memory."""
    parts = peaks(Rehearsals(2)(tiny(2, lora__r=64), "dpo"))["load"]
    assert parts["adapters"] > 0
    assert parts.get("temporaries", 0) < parts["adapters"] / 2


def test_a_cache_grows_with_rows_and_tokens(two):
    loaded, rehearse, before = two
    assert before["rollout"]["kv_cache"] == CACHE
    for changes, factor in (
        ({"ppo.rollout_batch_size": 2}, 1 / 2),
        ({"ppo.response_length": 2 * RESPONSE + PROMPT}, 2),
        ({"ppo.max_prompt_length": PROMPT - 4, "ppo.response_length": RESPONSE + 4}, 1),
    ):
        other = recipe.load(RECIPE, loaded.overrides | changes)
        assert peaks(rehearse(other, "ppo"))["rollout"]["kv_cache"] == factor * CACHE


def rehearsed(**operations: Parts) -> Peak:
    return Peak(by_operation=operations)


def test_the_line_through_two_depths_by_hand():
    """10 + 5 a layer, or 2 + 8 a layer: the second one is higher from three layers on."""
    shallow = rehearsed(a={"base": 10, "activations": 10}, b={"base": 2, "activations": 16})
    deeper = rehearsed(a={"base": 10, "activations": 20}, b={"base": 2, "activations": 32})
    expected = {1: 15, 2: 20, 4: 34, 8: 66, 32: 258}
    assert {layers: at_depth(shallow, deeper, layers, 0).peak_bytes for layers in expected} == expected
    phase = at_depth(shallow, deeper, 8, 100)
    assert (phase.peak_bytes, phase.components) == (166, {"base": 2, "activations": 64, "workspace": 100})


def test_what_was_rehearsed_is_predicted():
    """Also where an operation with the highest peak is only there with more layers, or only with fewer."""
    shallow, deeper = rehearsed(a={"base": 10}, b={"base": 30}), rehearsed(a={"base": 12}, c={"base": 40})
    assert at_depth(shallow, deeper, 2, 0).peak_bytes == 30
    assert at_depth(shallow, deeper, 4, 0).peak_bytes == 40


def test_operations_of_a_training_step():
    """SFT on a GPU's stand-in: a step of 4 rows of 64 tokens, 24 of them with a label, over two layers.

    One row is one token shorter: its place is computed all the same, and it has one label less.

    For each token, a product with a frozen matrix costs 2 operations a weight forward and 2 for its input's gradient;
    an adapter's 6. Attention costs 4 x 64 x hidden forward, masked or not, and 2.5 times that backward. The output
    layer sees labels only, a second time in the backward pass. What enters the first layer needs no gradient.
    """
    loaded = tiny(2, vocab=200, hardware__device="cuda", model__dtype="bfloat16")
    counted = Rehearsals(None)(loaded, "sft")["train"].work
    tokens, labels = 4 * 64, 4 * 24 - 1
    matrices = 2 * sum(width * out for width, out in WIDTHS)
    adapters = 2 * RANK * sum(width + out for width, out in WIDTHS)
    attention = 2 * 3.5 * 4 * 64 * HIDDEN
    spared = 2 * sum(width * out + RANK * width for width, out in WIDTHS[:3])
    by_hand = tokens * (4 * matrices + 6 * adapters + attention - spared) + labels * 6 * 200 * HIDDEN
    assert counted.flops == by_hand


@pytest.fixture(scope="module")
def on_cuda() -> Rehearsals:
    """At two layers; stages that others build on are rehearsed once."""
    return Rehearsals(2)


@pytest.mark.parametrize(("stage", "phase"), [("sft", "train"), ("ppo", "update")])
def test_checkpointing_computes_a_forward_pass_again(on_cuda, stage, phase):
    """And one product: peft asks for the gradient of what enters the first layer, so that there is one to trace."""
    changes = {"hardware__device": "cuda", "model__dtype": "bfloat16"}
    plain, again = (
        on_cuda(tiny(2, vocab=200, **changes, **{f"{stage}__gradient_checkpointing": on}), stage)[phase].work
        for on in (False, True)
    )
    assert 1.25 < again.flops / plain.flops < 1.54, "about a forward pass of a forward and a backward"


def test_a_shorter_row_never_needs_less_memory(on_cuda, monkeypatch):
    """So that a rehearsal with one in every batch covers batches without. Labels and logits are one token less."""
    loaded = tiny(2, vocab=200, hardware__device="cuda", model__dtype="bfloat16")
    padded = peaks(on_cuda(loaded, "sft"))["train"]
    monkeypatch.setattr("rlhf.plan.rehearsal.seams._one_shorter", lambda rows: rows)
    full = peaks(on_cuda(loaded, "sft"))["train"]
    assert total(padded) >= 0.99 * total(full)


# -- one prediction and the next ---------------------------------------------------------------------------------------


def test_what_was_predicted_before_is_read_again(predictor, tmp_path, monkeypatch):
    """And another setting, or other code, is predicted anew."""
    loaded = tiny(4)
    first = predictor.predict(loaded, "merge")
    asked: list[str] = []

    def rehearse(self, loaded, stage):
        asked.append(stage)
        raise ZeroDivisionError

    monkeypatch.setattr(Predictor, "_rehearse", rehearse)
    with Predictor() as other:
        assert other.predict(loaded, "merge") == first
        assert not asked
        assert other.predict(tiny(4), "merge") == first
        for changes in ({"lora__r": 4}, {"hardware__trunk": "lean"}):
            with pytest.raises(ZeroDivisionError):
                other.predict(tiny(4, **changes), "merge")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(ZeroDivisionError):
            other.predict(loaded, "merge")


def test_a_prediction_does_not_depend_on_those_before():
    loaded = tiny(2)
    alone = peaks(Rehearsals(2)(loaded, "evaluate"))
    rehearse = Rehearsals(2)
    for stage in ("ppo", "dpo"):
        rehearse(loaded, stage)
    assert peaks(rehearse(loaded, "evaluate")) == alone
