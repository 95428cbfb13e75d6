"""Decoding with the lean trunk against decoding with transformers' layers, and the products that it rests on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.models import matmul as matrices
from rlhf.models.lean.layouts import DecodingLayout
from rlhf.models.lean.packed import GrowingRows
from rlhf.models.lean.trunk import LeanTrunk, RoleTrunk
from rlhf.models.matmul import matmul, round_to_few_sizes
from rlhf.recipe.stages import Role
from rlhf.rollout import decoding
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from tests import kernels
from tests.tape import Tape, capture_on_cpu
from tests.trunk_models import KINDS, distance, trunk_model

ROOM = 56
PROMPTS = [[5, 9, 3, 7], [11, 4], [8, 8, 21, 2, 30, 6, 17], [40]]


class Ids:
    """What sampling needs of a tokenizer."""

    pad_id = 0

    def __init__(self, eos_id: int = 1):
        self.eos_id = eos_id


def sampled(peft: Any, trunk: LeanTrunk | None, role: Role = "policy", **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "prompts": PROMPTS,
        "copies": 1,
        "batch_size": 32,
        "temperature": 1.0,
        "eos_id": 1,
    } | changes
    base = peft.get_base_model()
    if role == "base":
        peft.base_model.disable_adapter_layers()
    else:
        peft.base_model.enable_adapter_layers()
        peft.base_model.set_adapter(role, inference_mode=True)
    torch.manual_seed(3)
    sampling = Sampling(8, ROOM, settings["temperature"], settings["batch_size"], settings["copies"])
    tokenizer: Any = Ids(settings["eos_id"])
    draw = partial(sample, base, settings["prompts"], tokenizer, sampling)
    if trunk is None:
        return draw()
    with trunk.merging(role):
        return draw(trunk=RoleTrunk(trunk, role))


@pytest.mark.parametrize("role", ["policy", "base"])
@pytest.mark.parametrize("copies", [1, 5])
@pytest.mark.parametrize("way", ["cpu", "card"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_are_those_of_the_library(kind, way, copies, role, monkeypatch):
    """Prompts of several lengths, key-value heads that are shared, biases, rows that end and are dropped.

    A card joins the prompts, reads own tokens, and replays steps: the operations of one, with its Python numbers.
    """
    kept: list[int] = []
    for layout in (DecodingLayout, GrowingRows):

        def counted(self: Any, rows: Tensor, keep: Callable[..., None] = layout.keep) -> None:
            kept.append(len(rows))
            keep(self, rows)

        monkeypatch.setattr(layout, "keep", counted)
    peft = trunk_model(kind)
    first = sampled(peft, None, role, copies=5)
    often = int(first.tokens[first.mask].mode().values)
    expected = sampled(peft, None, role, copies=copies, eos_id=often)
    tapes: list[Tape] = []
    if way != "cpu":
        kernels.decode_as_a_card(monkeypatch)
        tapes = capture_on_cpu(monkeypatch)
        monkeypatch.setattr(decoding, "WORTH_DROPPING", 0)
    trunk = LeanTrunk(peft.get_base_model(), joins=way == "card")
    actual = sampled(peft, trunk, role, copies=copies, eos_id=often)
    assert kept, "no row was dropped, so that this does not test it"
    assert way == "cpu" or 2 <= len(tapes) <= 1 + len(kept), "captured again after rows were dropped"
    assert expected.ended.any() and len(expected.ids) == len(PROMPTS) * copies
    assert torch.equal(actual.ids, expected.ids) and torch.equal(actual.ended, expected.ended)
    mask = expected.mask
    torch.testing.assert_close(actual.logprobs[mask], expected.logprobs[mask], rtol=1e-4, atol=1e-5)


def test_a_step_that_cannot_be_captured_is_launched(monkeypatch, capsys):
    """Its host reads a number. It is said once, and no other batch tries again."""
    peft, draw = trunk_model(), decoding.draw_tokens
    expected = sampled(peft, None)
    kernels.decode_as_a_card(monkeypatch)
    tapes = capture_on_cpu(monkeypatch)
    monkeypatch.setattr(decoding, "draw_tokens", lambda logits, *args: (logits[0, 0].item(), draw(logits, *args))[1])
    actual = sampled(peft, LeanTrunk(peft.get_base_model()), batch_size=2)
    said = capsys.readouterr().err
    assert len(tapes) == said.count("decoding launches each kernel") == 1 and "cannot hold" in said
    assert torch.equal(actual.ids, expected.ids)


def test_a_graph_has_done_its_replays_before_its_memory_goes(monkeypatch):
    finished: list[int] = []
    peft, item = trunk_model(), Tensor.item
    kernels.decode_as_a_card(monkeypatch)
    tapes = capture_on_cpu(monkeypatch)

    def waiting(x: Tensor) -> Any:
        finished.extend(tape.replays for tape in tapes[-1:])
        return item(x)

    monkeypatch.setattr(Tensor, "item", waiting)
    sampled(peft, LeanTrunk(peft.get_base_model()), eos_id=-1)
    assert finished == [ROOM - 2], "after the prefill and one step"


def test_responses_do_not_depend_on_what_is_decoded_beside_them():
    peft = trunk_model()
    trunk = LeanTrunk(peft.get_base_model())
    at_once, apart = (sampled(peft, trunk, batch_size=size, copies=2) for size in (8, 2))
    assert torch.equal(at_once.ids, apart.ids)


# -- products ----------------------------------------------------------------------------------------------------------

X, Y = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), torch.randn(5, 9)
WIDE = torch.randn(7, 20)


@pytest.mark.parametrize("x", [X, X.t().contiguous().t(), WIDE[:, 3:8], X[:1], X[:0]], ids=range(5))
@pytest.mark.parametrize("y", [Y, Y.t().contiguous().t(), torch.randn(5, 20)[:, :9]], ids=range(3))
def test_products_are_those_of_torch(x, y):
    expected = x.double() @ y.double()
    assert matmul(x, y).shape == expected.shape
    torch.testing.assert_close(matmul(x, y).double(), expected, rtol=1e-5, atol=1e-5)
    out = torch.full((len(x), 12), torch.nan)
    matmul(x, y, out=out[:, 2:11])
    torch.testing.assert_close(out[:, 2:11].double(), expected, rtol=1e-5, atol=1e-5)
    assert out[:, :2].isnan().all() and out[:, 11:].isnan().all()


@pytest.mark.parametrize("onednn", [matrices.ONEDNN, False])
def test_a_product_that_needs_a_gradient_is_refused(monkeypatch, onednn):
    monkeypatch.setattr(matrices, "ONEDNN", onednn)
    for x, y in ((X.clone().requires_grad_(), Y), (X, Y.clone().requires_grad_())):
        with pytest.raises(ValueError, match="matmul has no gradient"):
            matmul(x, y)
        with torch.no_grad():
            assert not matmul(x, y).requires_grad


def test_without_onednn_the_trunk_computes_the_same(monkeypatch):
    peft = trunk_model()
    trunk = LeanTrunk(peft.get_base_model())
    ids = torch.tensor(PROMPTS[2])[None]
    with torch.no_grad(), trunk.merging("policy"):
        states = trunk.hidden("policy", ids)
        monkeypatch.setattr(matrices, "ONEDNN", False)
        assert distance(trunk.hidden("policy", ids), states) < 1e-6


def test_lengths_become_few_by_a_little_padding():
    sizes = [round_to_few_sizes(n) for n in range(1, 2049)]
    assert all(0 <= size - n < max(4, n / 16) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 110
    assert all(round_to_few_sizes(size) == size for size in sizes)
