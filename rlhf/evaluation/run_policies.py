"""The policies of a run as roles on one base."""

from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf.evaluation.reward_model import add_reward_models
from rlhf.models.loading import load_base
from rlhf.models.roles import AdapterStart
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import Recipe
from rlhf.recipe.stages import SFT, PolicyLabel, PolicyName, Role
from rlhf.run.directory import StageRun


def load_roles(run: StageRun, device: torch.device, start: Path | None, trained: Sequence[PolicyName]) -> SharedBase:
    """Return the base with the `start` as `reference`, each trained policy under its stage's name, any reward model."""
    roles: dict[Role, AdapterStart] = {"reference": start, **{stage: run.parents.folder(stage) for stage in trained}}
    hardware = run.loaded.recipe.hardware
    shared = SharedBase(load_base(run.base, device), roles, lean=hardware.trunk == "lean", joins=hardware.joined_rows)
    add_reward_models(shared, run)
    return shared


def role_of(label: PolicyLabel, recipe: Recipe) -> Role:
    """Return the role under which `load_roles` has a policy; SFT, at which policies start, is the reference."""
    return "reference" if label == SFT or label == recipe.start else label
