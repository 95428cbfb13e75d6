"""Adapters in the upper layers only: what is below is computed once, and changes no number."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.memory.measure import measure
from rlhf.data.batch import collate, joined
from rlhf.errors import UserError
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.models.weights import adapter_weights
from rlhf.plan.rehearsal.meta_runs import Rehearsals
from rlhf.plan.rehearsal.seams import with_seams
from rlhf.process import distributed
from rlhf.process.libraries import quiet_libraries
from rlhf.run.directory import StageRun
from rlhf.stages.groups import ScoredRollout
from rlhf.stages.groups import make_batch as collect_groups
from rlhf.stages.online import role_passes
from tests.helpers import beside, grouped, not_none, run_stages, small
from tests.invariants.group_learner import REWARDS, assert_same
from tests.invariants.group_learner import new_learner as new_group_learner
from tests.invariants.ppo_learner import PROMPTS, assert_close, new_learner, updated
from tests.invariants.tiny import tiny
from tests.rollouts import LENGTHS

TWO_STEPS: dict[str, Any] = {f"{stage}__{key}": 2 for stage in ("sft", "rm") for key in ("max_steps", "save_steps")}


ROOT = Path("cpu-tiny/v1")


@pytest.fixture(scope="module")
def upper(trained, tmp_path_factory) -> Path:
    """SFT and a reward model whose adapters are in the upper one of two layers, by `lora.layers`."""
    out: Path = tmp_path_factory.mktemp("upper")
    beside(trained, out, "pretrain")
    run_stages(small(lora__layers="upper_half", **TWO_STEPS), out, "sft", "rm")
    return out


@pytest.fixture(scope="module")
def run(upper) -> StageRun:
    return StageRun(upper, small(lora__layers="upper_half", **TWO_STEPS), "ppo")


@pytest.fixture(scope="module")
def rollout():
    responses = [torch.randint(10, 300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
    return collate(PROMPTS, responses, 0, 1)


@pytest.fixture
def counted(monkeypatch) -> Counter[int]:
    """How often each layer of the lean trunk runs."""
    calls: Counter[int] = Counter()
    layer = LeanTrunk._layer

    def counting(self: Any, number: int, *arguments: Any) -> Any:
        calls[number] += 1
        return layer(self, number, *arguments)

    monkeypatch.setattr(LeanTrunk, "_layer", counting)
    return calls


def test_adapters_are_in_these_layers_alone_and_in_peft_s_format(upper):
    for stage in ("sft", "rm"):
        folder = upper / ROOT / stage
        names = [name for name in adapter_weights(folder) if "lora_" in name]
        assert len(names) == 2 * 7 and all(".layers.1." in name for name in names)
        config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert config["layers_to_transform"] == [1] and "q_proj" in config["target_modules"]


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_the_lower_layers_run_once_for_all_roles_and_passes(run, rollout, counted, kind):
    """And neither values nor the weights after four optimizer steps change by more than rounding."""
    passes: dict[str, Any] = {"num_ppo_epochs": 2, "num_mini_batches": 2}
    a, stats, batch = updated(run, rollout, kind, **passes)
    assert not counted and batch.rollout.lower_states is None
    b, shared_stats, shared_batch = updated(run, rollout, kind, lean=True, **passes)
    of_roles = 2 * (3 if kind == "head" else 4)  # two micro-batches for each role's scores
    assert counted == {0: 2, 1: of_roles + 4 * (1 if kind == "head" else 2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(role_passes, "with_lower_states", lambda shared, rollout, size: rollout)
        c, _, _ = updated(run, rollout, kind, lean=True, **passes)
    assert counted[0] == 2 + of_roles + 4 * (1 if kind == "head" else 2)
    for name in ("old_logp", "ref_logp", "values", "scores"):
        assert_close(getattr(batch, name), getattr(shared_batch, name), largest=2e-5, mean=2e-6)
    assert_close(a, b, largest=5e-5, mean=1e-6)
    assert_close(b, c, largest=5e-5, mean=1e-6)
    for name, value in stats.items():
        assert shared_stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_groups_share_the_lower_layers_too(upper, rollout, counted, stage):
    run = StageRun(upper, grouped(stage, lora__layers="upper_half", **TWO_STEPS), stage)
    numbers = torch.tensor(REWARDS)
    weights = []
    for lean in (False, True):
        made = new_group_learner(run, stage, lean=lean)
        batch = collect_groups(
            made,
            ScoredRollout(
                rollout=rollout,
                by_name={"model": numbers},
                scores=numbers,
                shaped_scores=numbers,
                judged=torch.ones(len(numbers), dtype=torch.bool),
            ),
        )
        torch.manual_seed(1)
        made.update(batch)
        weights.append(torch.cat([p.detach().flatten() for p in made.state.parameters("policy")]))
    assert_same(*weights)
    assert counted[0] == 2 < counted[1]


def test_rows_of_a_rollout_keep_their_lower_states(run, rollout):
    shared = new_learner(run, lean=True).shared
    whole = role_passes.with_lower_states(shared, rollout, 3)
    assert whole.lower_states is not None and whole.lower_states.shape == (*rollout.ids.shape, 32)
    assert role_passes.with_lower_states(shared, whole, 3) is whole
    index = torch.tensor([5, 0])
    part = whole.rows(index)
    assert part.lower_states is not None and part.lower_states.shape[:2] == part.ids.shape
    assert torch.equal(part.lower_states, whole.lower_states[index, : part.ids.shape[1]])
    assert joined(whole, whole).lower_states is None
    assert role_passes.with_lower_states(new_learner(run).shared, rollout, 3) is rollout, (
        "the library's trunk has no lower part"
    )


def test_each_process_computes_its_share(run, rollout, monkeypatch):
    shared = new_learner(run, lean=True).shared
    whole = not_none(role_passes.with_lower_states(shared, rollout, 3).lower_states)
    parts = []
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "all_sum", lambda *tensors: None)
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        parts.append(not_none(role_passes.with_lower_states(shared, rollout, 3).lower_states))
    real = torch.arange(rollout.ids.shape[1]) <= rollout.last[:, None]
    assert all((part[real] == 0).all(-1).any() for part in parts)
    assert torch.allclose((parts[0] + parts[1])[real], whole[real], atol=1e-5)


def test_a_chain_learns_with_them(upper, tmp_path):
    """The stage itself, from rollouts to the saved adapter."""
    beside(upper, tmp_path, "pretrain", "sft", "rm")
    run_stages(small(lora__layers="upper_half", hardware__trunk="lean", ppo__steps=1, **TWO_STEPS), tmp_path, "ppo")
    names = [name for name in adapter_weights(tmp_path / ROOT / "ppo") if "lora_" in name]
    assert len(names) == 2 * 7 and all(".layers.1." in name for name in names)
    moved = [(tmp_path / ROOT / s / "adapter" / "adapter_model.safetensors").read_bytes() for s in ("sft", "ppo")]
    assert moved[0] != moved[1]


def test_the_plan_knows_what_the_trunk_holds():
    """Predicted bytes at the peak of an update: those of real tensors, less with the lean trunk, least with a half."""
    update = {}
    with quiet_libraries(), with_seams():
        for layers, trunk in (("all", "library"), ("all", "lean"), ("upper_half", "lean")):
            loaded = tiny(2, lora__layers=layers, hardware__trunk=trunk)
            peak = Rehearsals(2)(loaded, "ppo")["update"]
            update[layers, trunk] = max(sum(parts.values()) for parts in peak.by_operation.values())
        assert update["upper_half", "lean"] == pytest.approx(measure(loaded, ["ppo"])["ppo"]["update"], rel=0.01)
    assert update["upper_half", "lean"] < update["all", "lean"] < update["all", "library"]
    with pytest.raises(UserError, match="all and upper_half only"):
        Rehearsals(2)(tiny(4, lora__layers=[3, 4]), "ppo")
