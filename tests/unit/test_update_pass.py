"""Operations of a layer in the passes of an update, which a card's host must launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.memory import budgets
from rlhf import recipe
from rlhf.data.batch import collate
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.plan.rehearsal import decoding_step
from rlhf.plan.rehearsal.device import META, arguments
from rlhf.plan.rehearsal.short_runs import rehearsal_changes
from rlhf.plan.rehearsal.update_pass import update_passes
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun
from rlhf.stages.online import captured
from rlhf.stages.online.role_passes import ScoreNorm
from rlhf.stages.ppo import Batch, Learner

RECIPES = Path(__file__).parents[2] / "recipes"
BF16, NF4 = (recipe.load(RECIPES / name / "v2") for name in ("h100-mistral-7b", "4090-llama2-7b"))
LEAN = recipe.load(RECIPES / "h100-mistral-7b" / "v4")

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("as_in_a_worker")]


@pytest.mark.parametrize("loaded", [BF16, NF4], ids=["bf16", "nf4"])
def test_a_layer_launches_what_is_pinned(loaded):
    if loaded.recipe.model.quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    now = update_passes(loaded)
    assert now and list(budgets.changed_passes(budgets.pinned_passes(loaded.directory), now)) == []
    assert list(budgets.changed_passes({}, now)), "what is not pinned is named"


def test_a_lean_layer_in_bfloat16_by_hand():
    """With adapters in all seven linear layers, which read four different inputs; the gradients are there already."""
    counted = update_passes(BF16)["lean"]
    norms, rotary, attention, swiglu, residuals = 2, 3, 1, 2, 2
    assert counted["forward"] == 7 + 7 + 4 + norms + rotary + attention + swiglu + residuals  # W, B; A of each input
    inputs = 7 + 7 + 4  # of W, and of B and A
    weights = 4 + 4 + 7  # A z^T, dA, dB
    sums = residuals + 14 + 1  # of two paths, with earlier gradients, and of q, k and v one row
    again = norms + swiglu
    copied_for_rotary = 1
    assert counted["backward"] == inputs + weights + sums + again + norms + 3 + rotary + copied_for_rotary + attention
    assert sum(counted.values()) <= 110
    first = update_passes(BF16, 1)["lean"]
    assert first == counted | {"backward": counted["backward"] - 14}, "nothing is cast, copied or summed in a layer"
    assert sum(first.values()) <= 80


def test_adapters_that_are_cast_at_each_use_are_seen(monkeypatch):
    before = update_passes(BF16)["lean"]
    linears_of = LeanTrunk._linears_of
    monkeypatch.setattr(LeanTrunk, "_linears_of", lambda self, *args: (linears_of(self, *args)[0], None))
    after = update_passes(BF16)["lean"]
    inputs = 4  # the adapters of layers with the same input are cast and stacked together
    assert {name: after[name] - before[name] for name in before} == dict.fromkeys(before, inputs)


def test_a_captured_pass_holds_nothing_that_a_capture_refuses(tmp_path, monkeypatch):
    """The host reads no number of the device and copies none to it, and no shape depends on one.

    So it is for the shapes of the largest micro-batch and for those of a smaller one.
    """
    changed = LEAN.with_changes(rehearsal_changes(LEAN.recipe, 2))
    options = changed.recipe.options(Ppo)
    recorder = decoding_step._Recorder(**arguments(changed.recipe))
    made: list[list[decoding_step.Operation]] = []
    with recorder:
        shared = decoding_step.rehearsed_roles(StageRun(tmp_path, changed, "ppo"), options, lean=True)
        head = shared.add_value_head()
        rollout = collate([[5] * n for n in (300, 200, 384, 120)], [[7] * n for n in (128, 100, 128, 90)], 0, 2, META)
        of_slots, of_rows = torch.zeros(4, 128, device=META), torch.zeros(4, device=META)
        tensors: dict[str, Any] = {field.name: of_slots for field in fields(Batch) if field.name != "rollout"}
        tensors |= {
            "sampling_weights": None,
            "over_cap": None,
            "judged": None,
            "scores": of_rows,
            "shaped_scores": of_rows,
        }
        batch = Batch(rollout=rollout, **tensors)
        learner = Learner(shared, options, ScoreNorm(), [*head.parameters()])

        @contextmanager
        def recording(*_: Any, **__: Any) -> Iterator[None]:
            with recorder.recording(shared.base.get_decoder()) as operations:
                yield
            made.append(operations)

        monkeypatch.setattr(captured, "capturing", recording)
        learner.state.capture_passes(True)
        count = torch.tensor(400, device=META)
        with shared.role("policy"):
            for rows in ([2, 0], [3, 1], [3, 1]):
                learner.state.add_gradient(learner._add_policy_gradient, batch.rows(torch.tensor(rows)), count, True)
            learner.state.add_gradient(learner._add_critic_gradient, batch.rows(torch.tensor([2, 0])), count)
    assert len(made) == 3 and min(map(len, made)) > 100 and not [op for each in made for op in each if op.unsafe]
    assert learner.state.captured and learner.state.captured.given_up is None
