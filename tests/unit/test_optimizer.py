"""Paged optimizer states after a resume, with a stand-in for bitsandbytes' paged memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.models.optimizer import new_optimizer, page_states
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe.choices import Optimizer
from rlhf.recipe.schema_online import Ppo
from rlhf.stages.online.scores import ScoreNorm
from rlhf.stages.online.train_state import TrainedParameters, TrainState, read_state
from rlhf.stages.supervised.training import _RunCallback
from tests.helpers import noted, small

bnb = pytest.importorskip("bitsandbytes.optim.optimizer")
SIZES = {"large": 100_352, "small": 65_536}  # numbers in a parameter; bitsandbytes pages states from 100,000 on


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size // 256, 256, generator=generator)) for size in SIZES.values()]


def stepped(name: Optimizer) -> torch.optim.Optimizer:
    optimizer = new_optimizer(name, [{"params": parameters()}], lr=1e-3)
    step(optimizer)
    return optimizer


def step(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    (group,) = optimizer.param_groups
    for parameter in group["params"]:
        parameter.grad = parameter.detach().sin()
    optimizer.step()
    return [p.detach().clone() for p in group["params"]]


@pytest.fixture
def paged(monkeypatch) -> list[Tensor]:
    """The buffers that were asked for. bitsandbytes' rule, without its condition that there is a GPU."""
    asked: list[Tensor] = []

    def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.zeros_like(p, dtype=dtype)
        if self.is_paged and p.numel() >= 1e5:
            vars(out)["is_paged"] = True
            asked.append(out)
        return out

    monkeypatch.setattr(bnb.Optimizer8bit, "get_state_buffer", get_state_buffer)
    monkeypatch.setattr(bnb.Optimizer8bit, "prefetch_state", lambda self, p: None)
    return asked


@pytest.mark.parametrize("name", ["paged_adamw_8bit", "paged_adamw_32bit"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_large_states_are_paged_again_and_go_on_as_before(paged, name, wrapped):
    saved = stepped(name)
    paged.clear()
    loaded = new_optimizer(
        name, [{"params": [nn.Parameter(p.detach().clone()) for p in saved.param_groups[0]["params"]]}]
    )
    loaded.load_state_dict(saved.state_dict())
    for state in loaded.state.values():  # a copy to another device leaves the attribute behind
        state |= {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    page_states(SimpleNamespace(optimizer=loaded) if wrapped else loaded)
    large, small = loaded.state.values()
    assert [large["state1"], large["state2"]] == paged and len(paged) == 2
    assert not hasattr(small["state1"], "is_paged") and not hasattr(large.get("absmax1"), "is_paged")
    page_states(loaded)  # a second time changes nothing
    assert len(paged) == 2
    for one, other in zip(saved.state.values(), loaded.state.values(), strict=True):
        assert all(torch.equal(one[k], other[k]) for k in ("state1", "state2"))
    assert all(torch.equal(a, b) for a, b in zip(step(saved), step(loaded), strict=True))


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_8bit"])
def test_other_optimizers_are_left_alone(paged, name):
    optimizer = stepped(name)
    before = [{k: id(v) for k, v in state.items()} for state in optimizer.state.values()]
    page_states(optimizer)
    page_states(None)
    assert [{k: id(v) for k, v in state.items()} for state in optimizer.state.values()] == before
    assert not paged


def test_both_kinds_of_stages_page_what_they_load(monkeypatch, tmp_path):
    """transformers' Trainer calls back after it has loaded its checkpoint, PPO loads its own."""
    asked: list[object] = []
    monkeypatch.setattr("rlhf.stages.supervised.training.page_states", asked.append)
    unused: Any = None
    base = SimpleNamespace(model=SimpleNamespace(revision=None))
    run: Any = SimpleNamespace(resumed_from=None, is_main=False, base=base)
    callback = _RunCallback(run, unused, Telemetry(torch.device("cpu")))
    callback.on_train_begin(None, SimpleNamespace(num_input_tokens_seen=0, max_steps=1), None, optimizer="theirs")
    assert asked == ["theirs"]

    shared: Any = SimpleNamespace(peft=None)
    state = TrainState(
        "ppo", shared, small().recipe.options(Ppo), ScoreNorm(), {"policy": TrainedParameters(parameters(), 1e-4)}
    )
    monkeypatch.setattr("rlhf.stages.online.train_state.save_adapter", lambda *_, **__: None)
    state.save(run.base, tmp_path)
    load = state.optimizer.load_state_dict
    monkeypatch.setattr(state.optimizer, "load_state_dict", lambda saved: noted(asked, "loaded", load(saved)))
    monkeypatch.setattr("rlhf.stages.online.train_state.page_states", asked.append)
    state.restore(read_state(tmp_path))
    assert asked[1:] == ["loaded", state.optimizer]
