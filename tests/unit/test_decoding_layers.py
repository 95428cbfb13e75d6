"""Lean forward passes against those of peft, transformers and bitsandbytes, for every role and every kind of weight."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.models import decoding_layers
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.models.nf4 import COPY, kept_unpacked, unpacked
from tests.decoding_models import ROLES, activated, adapted, hidden, states
from tests.helpers import noted

IDS = torch.randint(64, (5, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("ids", [IDS, IDS[:, :1], IDS[:1, :1]], ids=["prompts", "step", "one"])
def test_float32_is_the_same_but_for_the_order_of_sums(kind, role, ids):
    model = adapted(torch.float32, kind)
    expected = states(model, role, ids)
    base = activated(model, role)
    with decoding_layers.fused_adapters(base), decoding_layers.fused_norms(base):
        states(model, role, 63 - ids)  # nothing of another input is kept
        lean = states(model, role, ids)
    assert (lean - expected).abs().max() < 5e-6 * expected.abs().max()
    others = [states(model, other, ids) for other in ROLES if other != role]
    assert all((expected - other).abs().max() > 0.01 for other in others), "roles must differ for this test"


@pytest.mark.parametrize("nf4", [False, True], ids=["bf16", "nf4"])
@pytest.mark.parametrize("role", ROLES)
def test_bfloat16_is_no_further_from_the_truth_than_peft(role, nf4):
    """The truth: the same weights in float32. Mean error over 40 prompts; here 8 to 10 % below peft's."""
    model = adapted(torch.bfloat16, nf4=nf4)
    ids = torch.randint(64, (40, 8), generator=torch.Generator().manual_seed(2))
    usual = states(model, role, ids)
    base = activated(model, role)
    with decoding_layers.fused_adapters(base), decoding_layers.fused_norms(base):
        lean = states(model, role, ids)
    exact = adapted(torch.float32)
    for a, b in zip(exact.get_base_model().modules(), base.modules(), strict=True):
        for name, parameter in a.named_parameters(recurse=False):
            parameter.data.copy_(unpacked(b) if name == "weight" else getattr(b, name))
    truth = states(exact, role, ids)
    error, usually = ((x - truth).abs().mean() for x in (lean, usual))
    assert 0 < error < usually < 0.03 * truth.abs().mean()
    assert (lean - usual).abs().max() < 0.15 * truth.abs().max()


def test_adapters_of_one_input_share_a_product():
    """In each layer 7 products of the base, 4 with A (one for q, k, v and one for gate, up) and 7 with B."""
    model = adapted(torch.float32)
    base = activated(model, "policy")
    counted: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    with decoding_layers.fused_adapters(base), Count():
        states(model, "policy", IDS)
    assert (counted["aten::mm"], counted["aten::addmm_"]) == (2 * (7 + 4), 2 * 7)


def test_a_shared_product_belongs_to_its_input():
    down = decoding_layers._DownProjection([torch.eye(3), 2 * torch.eye(3)])
    a, b = torch.randn(2, 1, 3), torch.randn(2, 1, 3)
    for x in (a, b, a.clone(), a):
        assert torch.equal(down(x), torch.cat([x, 2 * x], -1).flatten(0, 1))
    del a, x
    for _ in range(20):  # tensors that take the place of one that is gone
        x = torch.randn(2, 1, 3)
        assert torch.equal(down(x), torch.cat([x, 2 * x], -1).flatten(0, 1))


def test_everything_is_as_before_afterwards():
    model = adapted(torch.float32)
    base = activated(model, "policy")
    expected = states(model, "policy", IDS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        pytest.raises(ZeroDivisionError),
        decoding_layers.fused_adapters(base),
        decoding_layers.fused_norms(base),
        decoding_layers.merged_adapters(base),
    ):
        raise ZeroDivisionError
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(states(model, "policy", IDS), expected)


def test_weights_are_those_of_the_moment():
    """An update between two rollouts shows in the second."""
    model = adapted(torch.float32)
    base = activated(model, "policy")
    for scale in (1.0, 3.0):
        for name, parameter in model.named_parameters():
            if "lora_B.policy" in name:
                parameter.data *= scale
        expected = states(model, "policy", IDS)
        for manager in (decoding_layers.fused_adapters, decoding_layers.merged_adapters):
            with manager(base):
                assert (states(model, "policy", IDS) - expected).abs().max() < 2e-5


@pytest.mark.parametrize("what", ["dora", "two adapters", "some layers", "a bias", "merged"])
def test_adapters_of_other_kinds(what):
    """What is more, or less, than B A x is left to peft."""
    changes: dict[str, dict[str, Any]] = {
        "dora": {"use_dora": True},
        "some layers": {"target_modules": ["q_proj"]},
        "a bias": {"lora_bias": True},
    }
    model = adapted(torch.float32, **changes.get(what, {}))
    base = activated(model, "policy")
    if what == "two adapters":
        model.base_model.set_adapter(["policy", "reference"])
    if what == "merged":
        model.merge_adapter(["policy"])

    def computed() -> Tensor:
        with torch.no_grad():
            hidden: Tensor = base.model(input_ids=IDS, use_cache=False).last_hidden_state
        return hidden

    expected = computed()
    with decoding_layers.fused_adapters(base):
        lean_layers = sum("forward" in m.__dict__ for m in model.modules() if isinstance(m, LoraLayer))
        assert lean_layers == (2 if what == "some layers" else 0)
        assert (computed() - expected).abs().max() < 1e-5


# -- merged ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nf4", [False, True], ids=["full", "nf4"])
@pytest.mark.parametrize("role", ROLES)
def test_merged_weights_compute_the_same(role, nf4):
    """Float32: but for the order of sums. bfloat16: the merged weight is rounded to 8 bits."""
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        model = adapted(dtype, nf4=nf4)
        expected = states(model, role, IDS)
        base = activated(model, role)
        with decoding_layers.merged_adapters(base):
            merged = states(model, role, IDS)
        assert (merged - expected).abs().max() < bound * expected.abs().max()


# -- 4-bit weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", ["library", "row_groups", "unpacked"])
@pytest.mark.parametrize("adapters", [decoding_layers.fused_adapters, None], ids=["lean", "peft"])
def test_4_bit_weights_are_the_same_however_they_are_multiplied_with(role, how, adapters):
    """In float32, where nothing but the order of sums may differ."""
    model = adapted(torch.float32, nf4=True)
    for ids in (IDS, IDS.repeat(2, 1)[:, :1]):
        expected = states(model, role, ids)
        base = activated(model, role)
        with decoding_layers.four_bit_weights(base, how), adapters(base) if adapters else torch.no_grad():
            multiplied = states(model, role, ids)
        assert (multiplied - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lean", [False, True], ids=["library", "lean"])
def test_an_update_with_weights_unpacked_once_has_the_same_bits(lean, dtype, monkeypatch):
    """Forward and backward passes; recomputation too, which asks for the weights again."""
    functional = pytest.importorskip("bitsandbytes.functional")
    model = adapted(dtype, nf4=True)
    base = activated(model, "policy")
    base.activation_checkpointing_enable()
    model.train()
    trunk = LeanTrunk(base) if lean else None
    dequantize = functional.dequantize_4bit
    unpacked_shapes: list[torch.Size] = []
    noting = lambda w, *more, **how: noted(unpacked_shapes, w.shape, dequantize(w, *more, **how))  # noqa: E731
    monkeypatch.setattr(functional, "dequantize_4bit", noting)

    def step() -> list[Tensor]:
        model.zero_grad()
        found = trunk.hidden("policy", IDS) if trunk else hidden(model, "policy", IDS)
        found.float().square().sum().backward()
        return [found, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = step()
    unpacked_shapes.clear()
    with kept_unpacked(base):
        assert len(unpacked_shapes) == 2 * 7, "each weight once"
        for _ in range(2):
            actual = step()
            assert len(actual) == len(expected) == 1 + 2 * 2 * 7
            assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
        assert len(unpacked_shapes) == 2 * 7
    assert not any(COPY in vars(module) or "forward" in vars(module) for module in base.modules())
    assert all(torch.equal(x, y) for x, y in zip(step(), expected, strict=True))


def test_rows_are_multiplied_in_groups_in_a_step_only(monkeypatch):
    pytest.importorskip("bitsandbytes")
    model = adapted(torch.float32, nf4=True)
    base = activated(model, "base")
    layer = base.model.layers[0].mlp.up_proj.get_base_layer()
    sizes: list[int] = []
    usual = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda self, x: noted(sizes, x.shape[0], usual(self, x)))
    with decoding_layers.four_bit_weights(base, "row_groups"):
        for rows, length, expected in ((4, 1, [4]), (5, 1, [3, 2]), (10, 1, [4, 4, 2]), (10, 3, [10])):
            sizes.clear()
            assert layer(torch.randn(rows, length, 128)).shape == (rows, length, 192)
            assert sizes == expected


@pytest.mark.parametrize(("card", "properties"), [("4090", (128, 8, 9)), ("h100", (132, 9, 0))])
def test_groups_are_what_the_library_would_not_unpack(monkeypatch, card, properties):
    """bitsandbytes' own heuristic with the properties of each card, for the shapes of Llama-2-7B and Mistral-7B."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)  # a torch for CPUs has none
    ops = pytest.importorskip("bitsandbytes.backends.cuda.ops")
    monkeypatch.setattr(ops, "_gpu_dispatch_props", lambda index: properties)
    ops._gemm_4bit_use_custom_cuda.cache_clear()
    x: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    shapes = {(4096, 4096), (1024, 4096), (11008, 4096), (4096, 11008), (14336, 4096), (4096, 14336)}
    for out_features, in_features in shapes:
        for rows in range(1, 65):
            most = decoding_layers.fused_rows(x, rows, out_features, in_features)
            fused = ops._gemm_4bit_use_custom_fn
            chosen = [fused(0, x.dtype, n, out_features, in_features) for n in range(1, rows + 1)]
            assert chosen[most - 1] and not any(chosen[most:])
    square, down = (decoding_layers.fused_rows(x, 20, 4096, n) for n in (4096, 11008))
    assert (square, down) == {"4090": (8, 20), "h100": (7, 5)}[card]
    ops._gemm_4bit_use_custom_cuda.cache_clear()


def test_a_4_bit_base_may_answer_in_float32():
    """bitsandbytes' layers answer in the type of their input, which norms in float32 decide."""
    model = adapted(torch.bfloat16, nf4=True)
    layer = next(m for m in activated(model, "policy").modules() if hasattr(m, "lora_A") and m.lora_A)
    x = torch.randn(2, 3, layer.in_features)
    with decoding_layers.fused_adapters(model):
        lean_result = layer(x)
    assert lean_result.dtype == torch.float32
    torch.testing.assert_close(lean_result, layer(x), rtol=0.03, atol=0.03)
