"""A learner of PPO for steps that are written down again: its policy has moved, and its critic says something."""

from pathlib import Path

import torch

from rlhf.models.loading import load_base
from rlhf.models.shared_base import SharedBase
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun
from rlhf.stages.online.scores import ScoreNorm
from rlhf.stages.ppo import Learner, new_critic
from tests.helpers import not_none, small

NORM = ScoreNorm(0.05, 0.4)


def new_learner(root: Path, settings: Ppo, moved: bool = True) -> Learner:
    """A learner without a reward model where functions alone reward; `moved`: away from the reference."""
    run = StageRun(root, small(), "ppo")
    sft, rm = run.require("sft") / "adapter", run.require("rm")
    torch.manual_seed(0)
    shared = SharedBase(
        load_base(run.base, torch.device("cpu")), {"policy": sft, "reference": sft}, trainable=("policy",)
    )
    if settings.model_scores:
        shared.add_reward(rm / "adapter")
    learner = Learner(shared, settings, NORM, new_critic(shared, rm, settings, NORM))
    if moved:
        for weight in (*shared.roles.parameters("policy"), not_none(shared.value_head).weight):
            weight.data += 0.05 * torch.randn(weight.shape)
    return learner
