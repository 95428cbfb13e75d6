"""A learner of RLOO or GRPO with small settings, and the rewards that it learns from."""

from typing import Any

import torch
from torch import Tensor

from rlhf.models.loading import load_base
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import StageName
from rlhf.recipe.schema_online import GroupOptions
from rlhf.recipe.stages import stage_name
from rlhf.run.directory import StageRun
from rlhf.stages.groups import Learner
from rlhf.stages.online.scores import ScoreNorm
from tests.helpers import grouped

CPU = torch.device("cpu")
# None is the mean of its group: that one's advantage would be 0 but for rounding, and its clipping a matter of chance.
REWARDS = [0.4, -1.2, 2.0, 0.1, 0.5, 0.5, -0.4, 1.1]


def options(stage: str, **changes) -> GroupOptions:
    section = grouped(stage, changes).recipe.section(stage_name(stage))
    assert isinstance(section, GroupOptions)
    return section


def new_learner(run: StageRun, stage: StageName, lean: bool = False, **changes: Any) -> Learner:
    """A policy that has moved away from its reference."""
    torch.manual_seed(0)
    sft = run.require("sft") / "adapter"
    shared = SharedBase(load_base(run.base, CPU), {"policy": sft, "reference": sft}, trainable=("policy",), lean=lean)
    learner = Learner(stage, shared, options(stage, **changes), ScoreNorm(0.1, 0.7))
    with torch.no_grad():
        for weight in learner.by_role["policy"]:
            weight.add_(0.05 * torch.randn(weight.shape))
    return learner


def assert_same(a: Tensor, b: Tensor) -> None:
    difference = (a - b).abs()
    assert difference.max() <= 5e-5 and difference.mean() <= 5e-7
