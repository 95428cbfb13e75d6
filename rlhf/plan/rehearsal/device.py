"""The device that is stood in for where a recipe is rehearsed."""

from typing import Any

import torch

from peakmem import cards
from rlhf.plan.phases import PHASES
from rlhf.plan.rehearsal.paths import patches
from rlhf.plan.rehearsal.work import CountingStandIn
from rlhf.recipe import Recipe

META = torch.device("meta")  # of tensors on it


def stand_in_of(recipe: Recipe) -> CountingStandIn:
    """Return the device that is stood in for where this recipe, which has an architecture, is rehearsed."""
    return CountingStandIn(**arguments(recipe))


def arguments(recipe: Recipe) -> dict[str, Any]:
    """Return what a stand-in is made of."""
    architecture, hardware = recipe.model.architecture, recipe.hardware
    assert architecture and architecture.vocab_size
    return {
        "stands_for": hardware.device,
        "phases": PHASES,
        "vocab_size": architecture.vocab_size,
        "gpu": cards.gpu_of(hardware.name),
        "patches": patches,
    }
