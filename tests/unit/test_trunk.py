"""The lean trunk against the layers of peft and transformers: values and gradients, in every form, for every role."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
)

from rlhf.data.batch import collate
from rlhf.errors import UserError
from rlhf.models.lean import fused_linear
from rlhf.models.lean.trunk import LeanTrunk, check_supported
from rlhf.models.matmul import round_to_few_sizes
from rlhf.recipe.model_types import LEAN_TYPES
from tests.decoding_models import SIZES, hidden
from tests.helpers import not_none
from tests.trunk_models import ALL, KINDS, distance, trunk_model

IDS = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(1))
AT = torch.tensor([[2, 3, 4, 5], [0, 1, 2, 2], [5, 6, 7, 8]])  # the places of responses differ


def by_peft(peft: Any, role: str, at: Tensor | None) -> Tensor:
    states = hidden(peft, role, IDS)
    return states if at is None else states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))


def gradients(peft: Any, states: Tensor) -> dict[str, Tensor]:
    """Gradients of the policy's weights for a loss in which every number has a weight of its own."""
    peft.zero_grad()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    (states.float() * weights).sum().backward()
    return {name: p.grad.clone() for name, p in peft.named_parameters() if p.grad is not None}


def merged_weights(lean: LeanTrunk) -> list[Tensor]:
    """The weights that an open block keeps merged."""
    return [x.merged for kept in lean._kept.values() for x in kept.values() if x.merged is not None]


@pytest.mark.parametrize("targets", [ALL, ["q_proj", "v_proj"]], ids=["all", "two"])
@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("at", [None, AT], ids=["whole", "places"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_values_and_gradients_are_those_of_peft_but_for_the_order_of_sums(kind, at, merged, targets):
    peft = trunk_model(kind, target_modules=targets)
    lean = LeanTrunk(peft.get_base_model())
    for role in ("policy", "reference", "base"):
        expected = by_peft(peft, role, at)
        wanted = gradients(peft, expected) if role == "policy" else {}
        with lean.merging(role) if merged else nullcontext():
            states = lean.hidden(role, IDS, at)
            assert distance(states, expected) < 3e-6
            actual = gradients(peft, states) if role == "policy" else {}
            assert bool(merged_weights(lean)) == (merged and role != "base")
        assert actual.keys() == wanted.keys() and len(wanted) == (2 * 2 * len(targets) if role == "policy" else 0)
        for name, gradient in wanted.items():
            assert distance(actual[name], gradient) < 1e-5, name
            assert actual[name].dtype == torch.float32
    assert not merged_weights(lean)
    roles = [by_peft(peft, role, at) for role in ("policy", "reference", "base")]
    assert distance(roles[0], roles[1]) > 0.05 < distance(roles[0], roles[2]), "roles must differ for this test"


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("before", "heads_normed"), [("nothing", False), ("norm", False), ("gate", False), ("norm", True)]
)
def test_the_backward_pass_of_a_product_is_the_derivative_of_its_forward_pass(before, heads_normed, merged):
    """In float64, against differences. Two layers, one of them without an adapter; biases; rotary; a residual."""
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    width, heads, size = 6, 2, 4
    weights, bias = [random(2 * size, width), random(size, width)], random(2 * size)
    layers = [nn.utils.skip_init(nn.Linear, *w.shape[::-1], bias=False) for w in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(weight, requires_grad=False)
    layers[0].bias = nn.Parameter(bias, requires_grad=False)
    a, b = random(3, width).requires_grad_(), random(2 * size, 3).requires_grad_()
    angles = random(1, 5, size // 2)
    tables = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    rotary = fused_linear.Rotary(*tables, heads)
    head_norm = fused_linear.Norm(random(heads, size), 1e-3)
    after = fused_linear.HeadNorm(head_norm, rotary) if heads_normed else rotary
    input_ops = {"nothing": fused_linear.InputOp(), "norm": fused_linear.Norm(random(width), 1e-3)}
    op = input_ops.get(before, fused_linear.SwiGLU())
    x = random(2, 5, 2 * width if before == "gate" else width).requires_grad_()
    residual = random(2, 5, 3 * size).requires_grad_()

    def node(x: Tensor, residual: Tensor, a: Tensor, b: Tensor) -> Tensor:
        parts = [fused_linear.AdaptedLinear(layers[0], (a, b), 1.5), fused_linear.AdaptedLinear(layers[1])]
        whole = torch.cat([weights[0] + 1.5 * b @ a, weights[1]]).detach() if merged else None
        group = fused_linear.LinearGroup(parts, fused_linear.LowRank.of(parts, x.dtype), whole, op, after)
        y: Tensor = fused_linear.FusedLinear.apply(x, group, residual, a, b)
        return y

    torch.autograd.gradcheck(node, (x, residual, a, b))
    z = op.forward(x.flatten(0, 1))[0]
    plain = torch.cat([z @ (weights[0] + 1.5 * b @ a).t() + bias, z @ weights[1].t()], 1).view(2, 5, -1)
    if heads_normed:
        normed, rest = plain.split([heads * size, size], -1)
        by_head = head_norm.forward(normed.unflatten(-1, (heads, size)))[0]
        plain = torch.cat([by_head.flatten(-2), rest], -1)
    assert torch.allclose(rotary.rotate_((node(x, residual, a, b) - residual).detach(), back=True), plain)


@pytest.mark.parametrize("at", [None, AT], ids=["whole", "places"])
def test_bfloat16_is_no_further_from_the_truth_than_peft(at):
    """The truth: the same weights in float32. Errors are relative; here 0.81 to 0.88 of peft's."""
    half = trunk_model(dtype=torch.bfloat16)
    exact = trunk_model()
    for a, b in zip(exact.parameters(), half.parameters(), strict=True):
        a.data.copy_(b)
    truth = by_peft(exact, "policy", at)
    truths = gradients(exact, truth)
    usual = by_peft(half, "policy", at)
    usuals = gradients(half, usual)
    lean = LeanTrunk(half.get_base_model())
    with lean.merging("policy"):
        states = lean.hidden("policy", IDS, at)
        assert not merged_weights(lean), "a change of a weight must not be rounded away"
        actual = gradients(half, states)
    assert states.dtype == torch.bfloat16
    assert 0 < distance(states, truth) < 1.1 * distance(usual, truth) < 0.03
    errors, usual_errors = ([distance(x[n], truths[n]) for n in truths] for x in (actual, usuals))
    assert sum(errors) < 1.1 * sum(usual_errors)
    assert max(errors) < 0.05


@pytest.mark.parametrize("role", ["policy", "reference", "base"])
def test_weights_of_four_bits_are_unpacked_for_each_product_and_never_merged(role):
    """In float32 as the library with them, and kept packed: nothing of a weight's size outlives its product."""
    peft = trunk_model(nf4=True)
    lean = LeanTrunk(peft.get_base_model())
    assert not lean.merges
    expected = by_peft(peft, role, AT)
    wanted = gradients(peft, expected) if role == "policy" else {}
    with lean.merging(role):
        states = lean.hidden(role, IDS, AT)
        assert distance(states, expected) < 3e-6 and not merged_weights(lean)
        actual = gradients(peft, states) if role == "policy" else {}
    assert distance(by_peft(trunk_model(), role, AT), expected) > 1e-3, "rounding to 4 bits must show in this test"
    assert actual.keys() == wanted.keys() and len(wanted) == (28 if role == "policy" else 0)
    assert all(distance(actual[name], wanted[name]) < 1e-5 for name in wanted)


@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("nf4", [False, True], ids=["float32", "nf4"])
def test_recomputed_activations_change_nothing_and_are_not_kept(monkeypatch, nf4, merged):
    peft = trunk_model(nf4=nf4)
    lean = LeanTrunk(peft.get_base_model())
    ids = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(4))
    results = {}
    for recomputed in (False, True):
        if recomputed:
            peft.get_base_model().activation_checkpointing_enable()
            peft.train()
            monkeypatch.delattr(torch, "get_rng_state")  # no state of a generator is kept for a layer
        with lean.merging("policy") if merged else nullcontext():
            states, kept = watched(peft, lambda: lean.hidden("policy", ids))
        results[recomputed] = states.detach(), gradients(peft, states), kept
    (states, wanted, most), (again, actual, fewer) = results.values()
    assert torch.equal(states, again)
    assert all(distance(actual[name], wanted[name]) < 1e-5 for name in wanted) and len(actual) == len(wanted) == 28
    assert fewer < 0.3 * most
    peft.eval()  # as in the library's layers, nothing is recomputed then
    with lean.merging("policy") if merged else nullcontext():
        assert watched(peft, lambda: lean.hidden("policy", ids))[1] == most


def watched(peft: Any, forward: Any) -> tuple[Tensor, int]:
    """Return the result of a forward pass and the bytes that it keeps for the backward pass, without weights."""
    own = {p.untyped_storage().data_ptr() for p in peft.parameters()}
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if (at := x.untyped_storage().data_ptr()) not in own:
            storages[at] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        states: Tensor = forward()
    return states, sum(storages.values())


def test_fewer_numbers_are_kept_for_the_backward_pass():
    """Even with the merged weights, for 16 rows: peft keeps the inputs and results of norms, and silu(gate) * up."""
    peft = trunk_model()
    ids = torch.randint(64, (16, 32))

    by_peft(peft, "policy", None)
    decoder = peft.get_base_model().model
    _, usual = watched(peft, lambda: decoder(input_ids=ids, use_cache=False).last_hidden_state)
    lean = LeanTrunk(peft.get_base_model())
    with lean.merging("policy"):
        _, less = watched(peft, lambda: lean.hidden("policy", ids))
        copies = sum(x.nbytes for x in merged_weights(lean))
    assert less < 0.65 * usual
    assert copies == sum(p.nbytes for n, p in peft.named_parameters() if "base_layer.weight" in n)


def test_every_supported_type_is_computed_here():
    assert {*KINDS} == {*LEAN_TYPES}


def test_models_that_it_does_not_support_are_refused_in_one_line():
    sizes: dict[str, Any] = SIZES
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for config, said in (
        (GemmaConfig(**sizes, head_dim=32), "a gemma model, only llama, "),
        (LlamaConfig(**sizes, hidden_act="gelu"), "the activation function gelu: use"),
        (LlamaConfig(**sizes, rope_parameters=dynamic), "a rope of type dynamic"),
        (MistralConfig(**sizes, sliding_window=8), "9 tokens, which exceed the model's sliding window of 8"),
    ):
        with pytest.raises(UserError, match=said):
            check_supported(config, 9)
    check_supported(MistralConfig(**sizes, sliding_window=8), 8)


@pytest.mark.parametrize("longest", [1, 6])
def test_a_prompt_with_several_responses_is_computed_once(longest):
    """Values and gradients at real tokens are those of rows of their own; three prompts with four, two and one row."""
    peft = trunk_model()
    lean = LeanTrunk(peft.get_base_model())
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(64, (count,), generator=generator).tolist()

    prompts = [tokens(n) for n in (7, 2, 4)]
    numbers = [0, 0, 0, 0, 1, 1, 2]
    lengths = [min(n, longest) for n in (6, 1, 3, 5, 2, 6, 4)]
    rollout = collate([prompts[i] for i in numbers], [tokens(n) for n in lengths], 0, 1)
    together = replace(rollout, prompt_numbers=torch.tensor(numbers))
    order = torch.cat(together.by_length(3))
    assert not_none(together.prompt_numbers)[order].tolist() == numbers, (
        "rows of one prompt side by side, short ones first"
    )
    inputs: list[int] = []
    forward = fused_linear.LinearGroup.forward

    def noting(self: Any, z: Tensor) -> Tensor:
        inputs.append(len(z))
        return forward(self, z)

    results = []
    for rows in (rollout, together):
        inputs.clear()
        with pytest.MonkeyPatch.context() as patch, lean.merging("policy"):
            patch.setattr(fused_linear.LinearGroup, "forward", noting)
            states = lean.response_hidden("policy", rows)
        assert states.shape[:2] == rows.mask.shape
        results.append((states[rows.mask], gradients(peft, states[rows.mask]), inputs[0]))
    (alone, wanted, most), (states, actual, fewer) = results
    assert distance(states, alone) < 3e-6
    assert actual.keys() == wanted.keys() and all(distance(actual[name], wanted[name]) < 1e-5 for name in wanted)
    assert most == 7 * round_to_few_sizes(rollout.ids.shape[1])
    assert fewer == round_to_few_sizes(3 * 7 + 7 * max(longest - 1, 1))
    single = replace(rollout, prompt_numbers=torch.arange(7))
    assert torch.equal(lean.response_hidden("policy", single), lean.response_hidden("policy", rollout))
