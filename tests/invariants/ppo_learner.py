"""A learner of PPO with small settings, and one update of it."""

from collections.abc import Callable

import torch

from rlhf.data.batch import Rollout
from rlhf.models.loading import load_base
from rlhf.models.shared_base import SharedBase
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun
from rlhf.stages.online.scores import ScoreNorm
from rlhf.stages.ppo import Learner, make_batch, new_critic
from tests.helpers import small

NORM = ScoreNorm(0.1, 0.7)
CPU = torch.device("cpu")
PROMPTS = [
    [1, 7, 8, 9],
    [1, 30, 31],
    [1, 40, 41, 42, 43, 44],
    [1, 5],
    [1, 6, 7, 8, 8],
    [1, 60],
    [1, 61, 62],
    [1, 9, 9, 9],
]


def options(**changes) -> Ppo:
    changes = {"value_model": "head", "vf_coef": 0.1} | changes
    return small(**{f"ppo__{key}": value for key, value in changes.items()}).recipe.options(Ppo)


def roles(run: StageRun, lean: bool = False) -> SharedBase:
    torch.manual_seed(0)
    sft = run.require("sft") / "adapter"
    shared = SharedBase(load_base(run.base, CPU), {"policy": sft, "reference": sft}, trainable=("policy",), lean=lean)
    shared.add_reward(run.require("rm") / "adapter")
    return shared


def new_learner(run: StageRun, kind: str = "head", lean: bool = False, **changes) -> Learner:
    shared = roles(run, lean)
    settings = options(value_model=kind, **changes)
    critic = new_critic(shared, run.require("rm"), settings, NORM)
    learner = Learner(shared, settings, NORM, critic)
    if kind == "head":  # a critic that says 0 everywhere would hide mistakes
        assert shared.value_head
        torch.nn.init.normal_(shared.value_head.weight, std=0.1)
    return learner


def updated(
    run: StageRun,
    rollout: Rollout,
    kind: str = "head",
    change: Callable[[SharedBase], None] = lambda shared: None,
    **changes,
):
    """Trainable weights after one step on the same rollouts, and the step's statistics."""
    learner = new_learner(run, kind, **changes)
    change(learner.shared)
    batch = make_batch(learner, rollout)
    torch.manual_seed(1)
    stats = learner.update(batch)
    return (
        torch.cat([p.detach().flatten() for p in (*learner.by_role["policy"], *learner.by_role["value"])]),
        stats,
        batch,
    )


def assert_close(a: torch.Tensor, b: torch.Tensor, largest: float, mean: float) -> None:
    difference = (a - b).abs()
    assert difference.max() <= largest
    assert difference.mean() <= mean
