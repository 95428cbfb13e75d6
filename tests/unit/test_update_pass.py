"""Operations of a layer in the passes of an update, which a card's host must launch."""

from pathlib import Path

import pytest

from bench.memory import budgets
from rlhf import recipe
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.plan.rehearsal.update_pass import update_passes

RECIPES = Path(__file__).parents[2] / "recipes"
BF16, NF4 = (recipe.load(RECIPES / name / "v2") for name in ("h100-mistral-7b", "4090-llama2-7b"))

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
