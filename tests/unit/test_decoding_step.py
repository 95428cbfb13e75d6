"""Operations of one decoding step: every role of every GPU recipe, and faults that must not go unseen."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.memory import budgets
from rlhf import recipe
from rlhf.plan.predict import Predictor
from rlhf.plan.rehearsal import decoding_step
from rlhf.plan.rehearsal.decoding_step import DYNAMIC_SHAPE, HOST_READ, OTHER_DEVICE, ROLES, DecodingStep, Operation
from rlhf.recipe import PinnedRecipe
from rlhf.rollout.cache import CacheLayer
from rlhf.rollout.library_decoding import LibraryDecoding

RECIPES = Path(__file__).parents[2] / "recipes"
BF16, NF4 = RECIPES / "h100-mistral-7b" / "v2", RECIPES / "4090-llama2-7b" / "v2"
LEAN = RECIPES / "h100-mistral-7b" / "v4"
ON_A_GPU = [d for d in recipe.available(RECIPES) if recipe.load(d).recipe.hardware.device == "cuda"]

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("as_in_a_worker")]


def load(directory: Path, **changes) -> PinnedRecipe:
    return recipe.load(directory, {key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture(scope="module")
def bf16() -> dict[str, DecodingStep]:
    return decoding_step.decoding_steps(load(BF16))


@pytest.mark.parametrize("directory", ON_A_GPU, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_every_gpu_recipe_can_be_captured(directory):
    """No host read, no copy between devices, no shape that depends on values; not more operations than are pinned."""
    if recipe.load(directory).recipe.model.quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    found = decoding_step.decoding_steps(load(directory))
    assert set(found) == set(ROLES)
    assert {role: step.unsafe for role, step in found.items()} == dict.fromkeys(ROLES, ())
    now = {role: {"per_layer": len(s.per_layer), "outside": len(s.outside)} for role, s in found.items()}
    assert list(budgets.more_operations(budgets.pinned_step(directory), now)) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda x: x.max().item(), HOST_READ),
        (lambda x: bool((x > 0).any()), HOST_READ),
        (lambda x: torch.equal(x, x), HOST_READ),
        (lambda x: x.cpu(), OTHER_DEVICE),
        (lambda x: torch.tensor([1], device=x.device), OTHER_DEVICE),
        (lambda x: x.copy_(torch.zeros(x.shape, dtype=x.dtype)), OTHER_DEVICE),
        (lambda x: x.nonzero(), DYNAMIC_SHAPE),
        (lambda x: x[x > 0], DYNAMIC_SHAPE),
    ],
)
def test_planted_faults_are_found(monkeypatch, fault, reason):
    draw = LibraryDecoding._draw

    def faulty(self, hidden: Tensor) -> None:
        draw(self, hidden)
        fault(self.rows.tokens)

    monkeypatch.setattr(LibraryDecoding, "_draw", faulty)
    for step in decoding_step.decoding_steps(load(BF16)).values():
        assert [op.unsafe for op in step.unsafe] == [reason]
        assert [op.layer for op in step.unsafe] == [None]


def test_a_fault_inside_a_layer_is_found_there(monkeypatch):
    update = CacheLayer.update

    def faulty(self, keys: Tensor, values: Tensor, *args, **kwargs):
        if self.slot is not None:
            self.slot.item()
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(CacheLayer, "update", faulty)
    for step in decoding_step.decoding_steps(load(BF16)).values():
        assert [(op.layer, op.unsafe) for op in step.unsafe] == [(0, HOST_READ), (1, HOST_READ)]


def test_two_layers_tell_what_four_have(bf16):
    """Every layer is alike, so that a step of any depth can be counted from two of them."""
    deeper = decoding_step.decoding_steps(load(BF16), layers=4)
    with Predictor() as predictor:
        predicted = predictor.decoding_step(load(BF16, model__architecture__num_hidden_layers=4))
    assert predicted is not None
    for role in ROLES:
        assert len(deeper[role].operations) == predicted[role].total
        assert deeper[role].per_layer == bf16[role].per_layer


def test_views_and_allocations_are_no_kernels(monkeypatch, bf16):
    draw = LibraryDecoding._draw

    def more(self, hidden: Tensor) -> None:
        draw(self, hidden)
        torch.empty(3, device=hidden.device)
        hidden[0, :4].unsqueeze(0).expand(2, 4).transpose(0, 1)
        hidden.neg().abs_()

    monkeypatch.setattr(LibraryDecoding, "_draw", more)
    found = decoding_step.decoding_steps(load(BF16))["policy"]
    assert found.outside == (*bf16["policy"].outside, "aten::neg", "aten::abs_")


def test_a_layer_without_adapters_by_hand(bf16):
    """Products of a Mistral layer: queries, keys, values, output; gate, up, down."""
    names = bf16["base"].per_layer
    assert names.count("aten::mm") == 7
    assert names.count("aten::index_copy_") == 2  # keys, values
    assert names.count("aten::_flash_attention_forward") == 1


def test_float32_decodes_through_a_mask():
    for role, step in decoding_step.decoding_steps(load(BF16, model__dtype="float32")).items():
        assert step.per_layer.count("aten::_scaled_dot_product_efficient_attention") == 1, role
        assert "aten::_flash_attention_forward" not in step.per_layer


def test_layers_that_differ_are_refused():
    step = DecodingStep((Operation("aten::mm", 0), Operation("aten::add", 1), Operation("aten::mul", None)))
    with pytest.raises(ValueError, match="2 decoder layers of one kind have 2 different lists"):
        step.per_layer  # noqa: B018
    assert step.outside == ("aten::mul",)
    assert step.per_plain_layer is None
    upper = DecodingStep(step.operations, adapted=(1,))
    assert (upper.per_plain_layer, upper.per_layer) == (("aten::mm",), ("aten::add",))
