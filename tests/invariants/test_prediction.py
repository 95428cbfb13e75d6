"""Predicted memory against real tensors, against torch's own record of allocations, and against arithmetic.

The CPU recipe with random weights at small sizes. On a CPU every phase can be checked: the tracker counts the same
stages on real tensors, and the profiler every allocation that torch's CPU allocator makes.
"""

import collections
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from trl.trainer import dpo_trainer, kto_trainer, reward_trainer, sft_trainer

from bench.peaks import RealRuns, measure
from peakmem import cards
from peakmem.allocator import LARGE_SEGMENT
from peakmem.device import KNOWN
from peakmem.replaying import replay
from rlhf import recipe
from rlhf.data.batch import Rollout
from rlhf.evaluation import policies as evaluation
from rlhf.plan import predict as predicting
from rlhf.plan.lines import at_depth
from rlhf.plan.phases import (
    STAGE_ANSWER,
    WHOLE,
    Parts,
    Peak,
    PredictedPhase,
    PredictedStage,
    PredictionError,
    RehearsedStage,
    Reserved,
    Work,
)
from rlhf.plan.predict import Predictor
from rlhf.plan.rehearsal import short_runs
from rlhf.plan.rehearsal.device import stand_in_of
from rlhf.plan.rehearsal.meta_runs import Rehearsals, RehearsalsAtDepths
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.small import random_weights_changes
from rlhf.recipe.stages import stage_name
from rlhf.rollout import engine
from rlhf.rollout.engine import sample
from rlhf.rollout.library_decoding import LibraryDecoding
from rlhf.stages import ppo
from rlhf.stages.online import session
from tests.helpers import RECIPE, not_none
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


def test_the_phases_are_those_of_the_stages(six):
    phases = {stage: set(predicted.phases) for stage, predicted in six[0].items()}
    decoding = {"evaluate", "evaluate/prefill", "evaluate/decode"}
    assert phases["sft"] == {"load", "train"} | decoding
    assert phases["rm"] == {"load", "train", "evaluate"}
    rollouts = {"rollout", "rollout/prefill", "rollout/decode"}
    assert phases["ppo"] == {"load", "score", "update"} | decoding | rollouts
    assert phases["dpo"] == {"load", "train"} | decoding
    assert phases["merge"] == {"merge"}


def test_components_add_up_and_none_is_below_zero(six):
    predicted, _ = six
    for stage in predicted:
        for phase, peak in with_whole(predicted[stage]).items():
            assert sum(peak.components.values()) == peak.peak_bytes, f"{stage}/{phase}"
            if phase != "load":
                assert min(peak.components.values()) > 0, f"{stage}/{phase}"


# -- against the profiler ----------------------------------------------------------------------------------------------


def profiled(stage: StageName, loaded: PinnedRecipe) -> int:
    """Most bytes that torch's CPU allocator had given out at once while a stage ran."""
    most = 0

    def plain(changed, run_stage) -> dict[str, Any]:
        run_stage(torch.device("cpu"))
        return {}

    def watched(changed, run_stage) -> dict[str, Any]:
        nonlocal most
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            run_stage(torch.device("cpu"))
        assert recording.profiler and recording.profiler.kineto_results
        events, left = [], list(recording.profiler.kineto_results.experimental_event_tree())
        while left:
            event = left.pop()
            left += event.children
            if str(event.tag).endswith("Allocation"):
                events.append((event.start_time_ns, event.extra_fields.alloc_size))
        held = 0
        for _, size in sorted(events):
            held += size
            most = max(most, held)
        return {}

    rehearse = RealRuns(plain)
    for parent in recipe.parents(loaded.recipe, stage_name(stage)):
        rehearse(loaded, parent)
    rehearse.count_peaks = watched
    rehearse(loaded, stage)
    return most


def peak_at(stage: StageName, loaded: PinnedRecipe) -> tuple[int, str, set[str]]:
    """Bytes at a stage's peak, its innermost phase, and the operations that reach 99 % of it there."""
    phases = Rehearsals(None)(loaded, stage)
    sizes = {
        (phase, operation): total(parts)
        for phase, peak in phases.items()
        for operation, parts in peak.by_operation.items()
    }
    most = max(sizes.values())
    phase = max((phase for (phase, _), size in sizes.items() if size == most), key=len)
    near = [operation for (p, operation), size in sizes.items() if p == phase and size >= 0.99 * most]
    return most, phase, {operation.partition(",")[0] for operation in near}


def test_a_peak_in_the_loss(predictor):
    """A vocabulary of 6,000, 4 x 64 tokens: the loss holds several tensors of the logits' size."""
    loaded = tiny(4, vocab=6000, sft__gradient_checkpointing=True)
    most, phase, operations = peak_at("sft", loaded)
    predicted = predictor.predict(loaded, "sft")
    assert phase == "train"
    assert operations & {"aten.sub.Tensor", "aten.mul.Tensor"}
    assert predicted.phases["train"].components["logits"] > 0.9 * most
    assert predicted.whole.peak_bytes == most, "four layers are one of the depths that are rehearsed"
    assert most == pytest.approx(profiled("sft", loaded), rel=0.01)


def test_a_peak_inside_a_layer_s_backward_pass(predictor):
    """No logits, checkpointing: what one layer holds when it is recomputed, as the profiler measures it.

    On a CPU the next batch's ids and mask stand beside, which belong to the host on any other device.
    """
    rows, length = 16, 64
    loaded = tiny(4, vocab=200, rm__gradient_checkpointing=True, rm__per_device_train_batch_size=rows)
    most, phase, operations = peak_at("rm", loaded)
    predicted = predictor.predict(loaded, "rm")
    assert phase == "train"
    assert operations & {"aten.add.Tensor", "aten.mul.Tensor", "aten.mm.default"}
    tokens = 2 * rows * length
    parts = predicted.phases["train"].components
    assert parts["temporaries"] > 5 * 4 * tokens * INTERMEDIATE, "of one layer; made and freed in the backward pass"
    assert 3 <= parts["activations"] / (4 * tokens * HIDDEN) < 4.5, "one state for each layer that is still to come"
    assert predicted.whole.peak_bytes == most
    real = profiled("rm", loaded)
    assert real - 2 * 8 * tokens <= most <= 1.01 * real


def test_a_peak_in_the_rollout():
    """64 prompts decoded together and minibatches of 4: the prompts go in at once, all caches exist."""
    changes = {"ppo__batch_size": 64, "ppo__rollout_batch_size": 64, "ppo__num_mini_batches": 16}
    loaded = tiny(2, vocab=200, ppo__gradient_checkpointing=True, ppo__normalize_scores=False, **changes)
    most, phase, operations = peak_at("ppo", loaded)
    assert phase == "rollout/prefill"
    assert operations & {"aten.mul.Tensor", "aten.add.Tensor"}
    assert most == pytest.approx(profiled("ppo", loaded), rel=0.01)


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


def test_nothing_changes_without_a_planted_defect(two):
    loaded, rehearse, before = two
    assert risen(before, peaks(rehearse(loaded, "ppo"))) == {}


def test_hidden_states_that_are_kept_while_scoring_raise_that_phase(two, monkeypatch):
    """(8, 48, 64) float32 numbers for every one of four roles' passes; here one more tensor of that size."""
    loaded, rehearse, before = two
    collect = ppo.make_batch

    def keeping(trained, rollout, *more) -> ppo.Batch:
        kept = torch.zeros(*rollout.ids.shape, HIDDEN, device=rollout.ids.device)
        batch = collect(trained, rollout, *more)
        del kept
        return batch

    monkeypatch.setattr(ppo, "make_batch", keeping)
    assert risen(before, peaks(rehearse(loaded, "ppo"))) == {"score": 8 * (PROMPT + RESPONSE) * HIDDEN * 4}


def test_what_scoring_leaves_behind_raises_the_update_too(two, monkeypatch):
    loaded, rehearse, before = two
    collect = ppo.make_batch

    def leaving(trained, rollout, *more) -> ppo.Batch:
        batch = collect(trained, rollout, *more)
        trained.left = torch.zeros(*rollout.ids.shape, HIDDEN, device=rollout.ids.device)
        return batch

    monkeypatch.setattr(ppo, "make_batch", leaving)
    size = 8 * (PROMPT + RESPONSE) * HIDDEN * 4
    rise = risen(before, peaks(rehearse(loaded, "ppo")))
    assert rise["update"] == rise["evaluate"] == rise["rollout"] == rise["score"] == size, "of the step before"


CACHE = 2 * 2 * KV_HEADS * SIZE * 4 * 4 * (PROMPT + RESPONSE)  # keys and values, 2 layers, float32, 4 rows


def test_two_caches_at_once_raise_the_rollout(two, monkeypatch):
    """The cache of one batch of prompts is still there when the next one is made."""
    loaded, rehearse, before = two
    kept: collections.deque[Any] = collections.deque(maxlen=1)
    run = LibraryDecoding.run

    def keeping(self, done) -> list[torch.Tensor]:
        tokens = run(self, done)
        kept.append([(layer.keys, layer.values) for layer in self.layers])
        return tokens

    def sampled(*what, **options) -> Rollout:
        try:
            return sample(*what, **options)
        finally:
            kept.clear()

    monkeypatch.setattr(LibraryDecoding, "run", keeping)
    for place in (session, evaluation):
        monkeypatch.setattr(place, "sample", sampled)
    after = peaks(rehearse(loaded, "ppo"))
    rise = risen(before, after)
    assert set(rise) == {"rollout", "rollout/prefill", "rollout/decode"}, "held-out prompts fit into one batch"
    assert after["rollout/decode"]["kv_cache"] == 2 * before["rollout/decode"]["kv_cache"] == 2 * CACHE
    assert rise["rollout"] == CACHE


def test_gradients_that_are_not_let_go_raise_every_phase_but_the_update(two, monkeypatch):
    """Set to zero and kept: two roles' adapters and the critic's head, at the next step's rollout."""
    loaded, rehearse, before = two
    zero_grad = torch.optim.Optimizer.zero_grad
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: zero_grad(self, False))
    after = peaks(rehearse(loaded, "ppo"))
    rise = risen(before, after)
    assert {"rollout", "score", "evaluate"} <= set(rise)
    assert "load" not in rise
    assert after["rollout"]["gradients"] == rise["rollout"] == 2 * lora_bytes(2) + 2 * 512


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


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo", "dpo"])
def test_peaks_grow_linearly_with_depth(predictor, eight, stage, monkeypatch):
    """In four bits, eight layers from two and four; what cuBLAS takes is added later and would outweigh them here."""
    monkeypatch.setattr(cards, "workspace", lambda card: 0)
    loaded, rehearse = eight
    predicted, rehearsed = with_whole(predictor.predict(loaded, stage)), rehearse(loaded, stage)
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


def test_sizes_of_the_other_stages(six):
    predicted, _ = six
    tensors = 2 * 6 * len(WIDTHS)
    for stage, phase, roles, learning in (
        ("sft", "train", 1, 1),
        ("dpo", "train", 2, 1),
        ("evaluate", "evaluate", 4, 0),
    ):
        parts = predicted[stage].phases[phase].components
        assert parts["base"] == base_bytes(6), stage
        assert parts["adapters"] == roles * lora_bytes(6), stage
        assert parts.get("optimizer", 0) == learning * (2 * lora_bytes(6) + 512 * tensors), stage
    assert predicted["rm"].phases["train"].components["base"] == base_bytes(6)


def test_dpo_evaluates_with_two_adapters_and_no_gradients(six):
    parts = six[0]["dpo"].phases["evaluate"].components
    assert parts["adapters"] == 2 * lora_bytes(6)
    assert "gradients" not in parts and "optimizer" not in parts


def test_a_stored_adapter_is_on_the_device_once_while_it_is_loaded():
    """What it is checked against takes none of the device's memory."""
    parts = peaks(Rehearsals(2)(tiny(2, lora__r=64), "dpo"))["load"]
    assert parts["adapters"] > 0
    assert parts.get("temporaries", 0) < parts["adapters"] / 2


def test_a_rehearsal_that_fails_leaves_nothing_that_others_build_on(monkeypatch):
    """It had replaced the adapter that the stages after it load."""
    rehearse, loaded = Rehearsals(2), tiny(2)
    before = peaks(rehearse(loaded, "ppo"))
    with monkeypatch.context() as patch:
        patch.setattr(short_runs, "import_stage", lambda stage: lambda run, device: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rehearse(loaded, "sft")
    assert peaks(rehearse(loaded, "ppo")) == before


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


def test_all_of_the_work_lies_on_the_line_through_two_depths():
    shallow, deeper = Peak(work=Work(10, 2, 30, 4)), Peak(work=Work(20, 2, 50, 5))
    assert at_depth(shallow, deeper, 8, 0).work == Work(flops=40, recomputed=2, moved=90, launched=7)


def test_no_component_of_a_peak_is_negative():
    """The line of the kernels falls to -8 at eight layers; both others give what is lacking."""
    shallow = rehearsed(step={"base": 5, "activations": 5, "kernels": 7})
    deeper = rehearsed(step={"base": 5, "activations": 5, "kernels": 2})
    phase = at_depth(shallow, deeper, 8, 0)
    assert phase.components == {"activations": 2} and phase.peak_bytes == 2


def test_what_was_rehearsed_is_predicted():
    """Also where an operation with the highest peak is only there with more layers, or only with fewer."""
    shallow, deeper = rehearsed(a={"base": 10}, b={"base": 30}), rehearsed(a={"base": 12}, c={"base": 40})
    assert at_depth(shallow, deeper, 2, 0).peak_bytes == 30
    assert at_depth(shallow, deeper, 4, 0).peak_bytes == 40


def test_where_the_events_of_two_depths_cannot_be_aligned_15_percent_are_added(monkeypatch):
    """15 % of the predicted peak, for what is reserved and what is needed."""
    stage = {WHOLE: rehearsed(), "train": rehearsed(step={"base": 10**9})}
    monkeypatch.setattr(Predictor, "_rehearsed", lambda *_: RehearsedStage([stage, stage], None))
    with Predictor() as predictor:
        phase = predictor.predict(tiny(4), "sft").phases["train"]
    assert phase.reserved_bytes == phase.needed_bytes == round(1.15 * phase.peak_bytes)
    assert phase.peak_bytes >= 10**9


@pytest.mark.parametrize("aligned", [True, False])
def test_a_phase_needs_what_the_phases_inside_it_need(monkeypatch, aligned):
    """With more layers the inner phase makes a peak that the outer one did not have at both depths."""
    shallow = {name: rehearsed(a={"base": 10**8}) for name in (WHOLE, "rollout")} | {
        "rollout/decode": rehearsed(b={"kv_cache": 10**6})
    }
    deeper = shallow | {"rollout/decode": rehearsed(b={"kv_cache": 10**8})}
    replayed = {name: Reserved(1, 1, 1) for name in shallow} if aligned else None
    answer = RehearsedStage([shallow, deeper], replayed)
    monkeypatch.setattr(Predictor, "_rehearsed", lambda *_: answer)
    with Predictor() as predictor:
        predicted = with_whole(predictor.predict(tiny(10), "ppo"))
    peak = predicted["rollout/decode"].peak_bytes
    assert peak > 3 * 10**8
    for phase in predicted.values():
        assert phase.peak_bytes == peak
        assert phase.needed_bytes is not None and phase.needed_bytes >= peak
        assert phase.reserved_bytes is not None and phase.reserved_bytes >= phase.needed_bytes


WIDE = {"model.architecture.hidden_size": 1024, "model.architecture.intermediate_size": 2816}  # blocks above 1 MiB


@pytest.fixture(scope="module")
def wide() -> Callable[[StageName, str], tuple[PinnedRecipe, RehearsalsAtDepths, Rehearsals, dict[str, Peak]]]:
    """A recipe of ten layers on a card, a rehearsal at two and four of them, one of all ten, and its peaks."""
    pytest.importorskip("bitsandbytes")
    changes: dict[str, Any] = {key.replace(".", "__"): value for key, value in NF4.items()}

    @functools.cache
    def rehearsed_at_each_depth(
        stage: StageName, trunk: str
    ) -> tuple[PinnedRecipe, RehearsalsAtDepths, Rehearsals, dict[str, Peak]]:
        loaded = recipe.load(RECIPE, tiny(10, **changes).overrides | WIDE | {"hardware.trunk": trunk})
        whole = Rehearsals(None)
        return loaded, RehearsalsAtDepths(), whole, whole(loaded, stage)

    return rehearsed_at_each_depth


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize(("stage", "trunk"), [("sft", "library"), ("ppo", "library"), ("ppo", "lean")])
def test_what_a_deep_model_reserves_is_found_from_two_shallow_ones(wide, stage, trunk, expandable):
    """Layers 2 and 4, whose events are repeated, beside all 10 of them. The lean trunk joins rows without padding.

    What is allocated agrees to the byte, each of its components within 2 % of it, and what is reserved and needed
    within 0.2 % or a page.
    """
    loaded, at_depths, all_layers, peaks = wide(stage, trunk)
    found = at_depths(loaded, stage, expandable)
    replayed = found.reserved
    whole = replay(all_layers.events, expandable, cards.workspace(loaded.recipe.hardware.name))
    assert replayed is not None and replayed.keys() == whole.keys() >= {"load", "evaluate"}
    assert found.highest.keys() == peaks.keys()
    for phase, peak in peaks.items():
        parts, close = found.highest[phase], 0.02 * peak.bytes
        assert total(parts) == peak.bytes and parts == pytest.approx(peak.highest, rel=0, abs=close), phase
    for phase, real in whole.items():
        assert replayed[phase].allocated == real.allocated, phase
        for got, wanted in ((replayed[phase].reserved, real.reserved), (replayed[phase].needed, real.needed)):
            assert abs(got - wanted) <= max(0.002 * wanted, LARGE_SEGMENT), phase


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
    assert counted.recomputed == labels * 2 * 200 * HIDDEN, "the logits"


@pytest.fixture(scope="module")
def on_cuda() -> Rehearsals:
    """At two layers; stages that others build on are rehearsed once."""
    return Rehearsals(2)


@pytest.mark.parametrize(("stage", "phase"), [("sft", "train"), ("ppo", "update")])
def test_the_model_s_operations_do_not_depend_on_checkpointing(on_cuda, stage, phase):
    """But for one product: peft asks for the gradient of what enters the first layer, so that there is one to trace."""
    changes = {"hardware__device": "cuda", "model__dtype": "bfloat16"}
    plain, again = (
        on_cuda(tiny(2, vocab=200, **changes, **{f"{stage}__gradient_checkpointing": on}), stage)[phase].work
        for on in (False, True)
    )
    more = again.flops - again.recomputed - (plain.flops - plain.recomputed)
    assert 0 <= more < 0.04 * plain.flops
    if stage == "sft":
        assert more == 2 * 4 * 64 * sum(width * out + RANK * width for width, out in WIDTHS[:3])  # of one step
    repeated = again.recomputed - plain.recomputed
    assert 0.25 * plain.flops < repeated < 0.5 * plain.flops, "about a forward pass of a forward and a backward"


def test_every_batch_has_a_row_that_needs_padding():
    """As in a worker: the collators of all trainers, given rows that are all alike."""
    pairs = [{"chosen_ids": [1] * 6, "rejected_ids": [2] * 6}] * 3
    preferences = [{"prompt_ids": [1] * 4, "chosen_ids": [2] * 2, "rejected_ids": [3] * 2}] * 3
    dialogues = [{"input_ids": [1] * 6, "labels": [-100] * 4 + [1, 1]}] * 3
    judged = [{"prompt_ids": [1] * 4, "completion_ids": [2] * 2, "KL_completion_ids": [3] * 2, "label": True}] * 3
    for collator, rows in (
        (sft_trainer.DataCollatorForLanguageModeling(0), dialogues),
        (reward_trainer.DataCollatorForPreference(0), pairs),
        (dpo_trainer.DataCollatorForPreference(0), preferences),
        (kto_trainer.DataCollatorForUnpairedPreference(0), judged),
    ):
        lengths = collator(rows)["attention_mask"].sum(1).tolist()
        assert sorted(lengths) == [5, *[6] * (len(lengths) - 1)]
    alone = sft_trainer.DataCollatorForLanguageModeling(0)(dialogues[:1])
    assert alone["attention_mask"].all(), "one row is not padded"


def test_responses_of_unknown_tokens_are_the_longest_that_a_stage_admits():
    """The numbers of many tokens are not computed; a row of none would end a rehearsal."""
    with stand_in_of(tiny(2).recipe):
        for rows, width in ((4, 8), (2, KNOWN)):
            lengths = engine.response_lengths(torch.zeros(rows, width, dtype=torch.int64, device="meta"), eos_id=2)
            assert lengths.tolist() == [width] * rows and int(lengths.max()) == width


def test_a_shorter_prompt_is_decoded_with_the_others(two, monkeypatch):
    loaded, rehearse, _ = two
    seen = []
    prefill = LibraryDecoding._prefill

    def note(self, ids) -> None:
        seen.append(self.real[:, : self.width].sum(1).tolist())
        prefill(self, ids)

    monkeypatch.setattr(LibraryDecoding, "_prefill", note)
    rehearse(loaded, "ppo")
    assert seen and all(sorted(lengths) == [PROMPT - 1, *[PROMPT] * (len(lengths) - 1)] for lengths in seen)


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
        for changes in ({"lora__r": 4}, {"hardware__trunk": "lean"}, {"hardware__deterministic": True}):
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


def test_a_peak_may_move_from_one_moment_to_another(predictor):
    """Loading: random weights in the making, or all adapters. Evaluation: 8 prompts before, 4 beside the optimizer."""
    loaded = tiny(6, vocab=1000, lora__r=8)
    predicted = with_whole(predictor.predict(loaded, "ppo"))
    rehearsed = peaks(Rehearsals(None)(loaded, "ppo"))
    low = {
        phase: total(parts) for phase, parts in rehearsed.items() if predicted[phase].peak_bytes < 0.995 * total(parts)
    }
    assert not low
    assert min(min(peak.components.values()) for peak in predicted.values()) >= 0


def test_operations_of_a_decoding_step_are_those_of_every_layer(predictor, monkeypatch):
    """Counted once, in a worker, for the recipe's number of layers; on a CPU nothing is captured."""
    assert predictor.decoding_step(tiny(4)) is None
    changes: dict[str, Any] = {"hardware__device": "cuda", "model__dtype": "bfloat16"}
    roles = predictor.decoding_step(tiny(4, **changes))
    assert set(roles) == {"policy", "reference", "base"}
    assert not any(step.unsafe for step in roles.values())
    for step in roles.values():
        assert step.total == step.outside + 4 * step.per_layer
    monkeypatch.setattr(Predictor, "_rehearse", lambda self, loaded, stage: 1 / 0)
    deeper = tiny(4, **changes)
    assert predictor.decoding_step(deeper) == roles, "read again"


def test_a_rehearsal_that_fails_leaves_no_answer_behind(predictor):
    """The other depth's answer would be taken for that of the next request."""
    with pytest.raises(PredictionError, match="memory of sft cannot be predicted"):
        predictor.predict(tiny(4, sft__per_device_train_batch_size=8192), "sft")  # more rows than are made
    predicted = predictor.predict(tiny(4, vocab=300), "merge")
    assert "merge" in predicted.phases


def test_a_worker_that_was_killed_is_started_again(tmp_path, monkeypatch):
    """Processes that answer every question alike stand in for workers, which take seconds to start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peaks = {WHOLE: rehearsed(), "train": rehearsed(step={"base": 1})}
    answer = json.dumps({"result": STAGE_ANSWER.dump_python(RehearsedStage([peaks, peaks], None), mode="json")})
    command = [sys.executable, "-c", f"import sys\nfor line in sys.stdin: print({answer!r}, flush=True)"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    monkeypatch.setattr(predicting, "_start_worker", lambda: subprocess.Popen(command, **pipes))
    predictor = Predictor()
    predictor.predict(tiny(2), "merge")
    not_none(predictor._worker).kill()
    with pytest.raises(PredictionError, match=r"its process was killed by SIGKILL .* when memory is short"):
        predictor.predict(tiny(2), "sft")
    assert predictor.predict(tiny(2), "sft").whole.peak_bytes == 1
    not_none(predictor._worker).communicate()
