"""Roles over one base: what a switch costs, where gradients go, and that shortcuts change no number."""

import pytest
import torch
from torch import Tensor

from rlhf.models.adapters import adapter_weights
from rlhf.models.loading import load_base
from rlhf.models.shared_base import SharedBase
from rlhf.recipe.stages import Role, SharedRole
from rlhf.run.directory import StageRun
from tests.helpers import gradient, small

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 7, 8, 9, 12], [1, 30, 31, 4, 4]])
ROLES: tuple[SharedRole, ...] = ("policy", "value", "reference", "reward")


def roles(trained, dtype: str = "float32", trainable: tuple[Role, ...] = ("policy",)) -> SharedBase:
    """Policy, reference, reward and value; the policy differs from the reference."""
    run = StageRun(trained, small(model__dtype=dtype), "ppo")
    sft, rm = run.run_directory / "sft/adapter", run.run_directory / "rm/adapter"
    torch.manual_seed(0)
    shared = SharedBase(load_base(run.base, CPU), {"policy": sft, "reference": sft}, trainable=trainable)
    shared.add_reward(rm)
    shared.add_value_adapter(rm, 0.0, 1.0)
    with torch.no_grad():
        for parameter in shared.roles.parameters("policy"):
            parameter.add_(0.02 * torch.randn_like(parameter))
    return shared


@pytest.fixture
def shared(trained) -> SharedBase:
    return roles(trained)


def test_a_role_computes_what_peft_makes_of_its_adapter(shared):
    """`set_adapter` and `disable_adapter` of peft, bit for bit, whatever was active before."""
    with torch.no_grad():
        ours: dict[str, Tensor] = {}
        for role in ("base", *ROLES, "base", *reversed(ROLES)):
            shared.roles.activate(role)
            states = shared.hidden(IDS)
            assert torch.equal(ours.setdefault(role, states), states), role
        assert len({states.sum().item() for states in ours.values()}) >= 4  # reward and value start alike
        shared.peft.base_model.enable_adapter_layers()
        decoder = shared.base.get_decoder()
        for role in ROLES:
            shared.peft.set_adapter(role)
            assert torch.equal(decoder(input_ids=IDS, use_cache=False).last_hidden_state, ours[role]), role
        with shared.peft.disable_adapter():
            assert torch.equal(decoder(input_ids=IDS, use_cache=False).last_hidden_state, ours["base"])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("role", ["policy", "value"])
def test_gradients_reach_the_active_role_alone(shared, role, checkpointing):
    if checkpointing:
        shared.base.activation_checkpointing_enable()
        shared.base.enable_input_require_grads()
        shared.base.train()
    wanted = {id(p) for p in shared.roles.parameters(role)}
    for other in (*ROLES, "base"):  # what was active before leaves nothing behind
        shared.roles.activate(other)
    shared.roles.activate(role)
    shared.hidden(IDS).square().sum().backward()
    assert {id(p) for p in shared.peft.parameters() if p.grad is not None} == wanted
    assert all(p.grad.abs().sum() > 0 for p in shared.roles.parameters(role) if p.ndim)


def test_only_trainable_roles_ask_for_gradients(shared):
    for role in (*ROLES, "base"):
        shared.roles.activate(role)
        asking = {id(p) for p in shared.peft.parameters() if p.requires_grad}
        assert asking == {id(p) for name in ("policy", "value") for p in shared.roles.parameters(name)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_backward_pass_under_another_role_is_refused(shared, checkpointing):
    """With checkpointing it would take the other adapter for the recomputation, without a word."""
    if checkpointing:
        shared.base.activation_checkpointing_enable()
        shared.base.enable_input_require_grads()
        shared.base.train()
    shared.roles.activate("policy")
    loss = shared.hidden(IDS).square().sum()
    shared.roles.activate("value")
    with pytest.raises(RuntimeError, match="backward pass of policy while value is active: activate policy first"):
        loss.backward()
    assert all(p.grad is None for p in shared.peft.parameters())
    shared.roles.activate("policy")
    shared.hidden(IDS).square().sum().backward()


def test_after_a_block_the_role_before_it_is_active_again(shared):
    shared.roles.activate("reference")
    with shared.role("policy"):
        with shared.role("value"):
            assert shared.roles.active == "value"
        assert shared.roles.active == "policy"
    assert shared.roles.active == "reference"
    with pytest.raises(KeyError), shared.role("policy"):
        raise KeyError
    assert shared.roles.active == "reference"


def test_after_the_outermost_block_a_pass_is_refused(shared):
    """And not run with the adapter of that block."""
    with shared.role("policy"):
        expected = shared.hidden(IDS)
    with pytest.raises(RuntimeError, match="no role is active"):
        shared.hidden(IDS)
    with shared.role("policy"):
        assert torch.equal(shared.hidden(IDS), expected)


def test_scoring_leaves_the_active_role_as_it_was(shared):
    for role in ("policy", "reward", "base"):
        shared.roles.activate(role)
        shared.scores_at(IDS, torch.tensor([4, 2]))
        assert shared.roles.active == role


def outcome(shared: SharedBase, role: SharedRole) -> tuple[Tensor, list[Tensor]]:
    """Hidden states of a role, and the gradients of its adapter."""
    shared.roles.activate(role)
    states = shared.hidden(IDS)
    states.float().square().sum().backward()
    gradients = [gradient(p).clone() for p in shared.roles.parameters(role)]
    shared.peft.zero_grad()
    return states.detach(), gradients


@pytest.mark.parametrize("checkpointing", [False, True])
def test_inputs_that_are_not_cast_change_no_bit(trained, checkpointing):
    """A bfloat16 base under autocast, against peft's own way, which casts each input to float32 first."""
    shared = roles(trained, "bfloat16")
    if checkpointing:
        shared.base.activation_checkpointing_enable()
        shared.base.enable_input_require_grads()
        shared.base.train()
    for role in ("policy", "value"):
        states, gradients = outcome(shared, role)
        assert states.dtype == torch.bfloat16 and {g.dtype for g in gradients} == {torch.float32}
        for layer in shared.roles._layers:
            assert layer.cast_input_dtype_enabled is False
            layer.cast_input_dtype_enabled = True
        by_peft, wanted = outcome(shared, role)
        for layer in shared.roles._layers:
            layer.cast_input_dtype_enabled = False
        assert torch.equal(states, by_peft)
        assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("role", ["reference", "reward"])
def test_a_frozen_role_in_bfloat16_computes_the_same_bits(trained, role):
    shared = roles(trained, "bfloat16")
    types = {name: {p.dtype for p in shared.roles.parameters(name)} for name in ROLES}
    assert types == {
        "policy": {torch.float32},
        "value": {torch.float32},
        "reference": {torch.bfloat16},
        "reward": {torch.bfloat16},
    }
    stage = {"reference": "sft", "reward": "rm"}[role]
    whole = adapter_weights(trained / "cpu-tiny" / "v1" / stage / "adapter")
    shared.roles.activate(role)
    with torch.no_grad():
        states = shared.hidden(IDS)
        for name, parameter in shared.peft.named_parameters():
            if f".{role}." in name:
                saved = whole[name.replace(f".{role}.", ".")]
                assert saved.dtype == torch.float32 and not torch.equal(saved, saved.bfloat16().float())
                parameter.data = saved.clone()
        assert torch.equal(shared.hidden(IDS), states)
