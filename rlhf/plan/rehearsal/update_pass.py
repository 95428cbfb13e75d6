"""The operations of a decoder layer in a forward and a backward pass of the policy, read off the stand-in device.

An update of PPO has many micro-batches of a few thousand tokens. Where a card computes one of them faster than the host
launches its kernels, the number of these operations decides the time. Counted is a pass after the first of an update:
adapters have been cast where that is done once, and their gradients are added to those of the passes before.
"""

import tempfile
from pathlib import Path

import torch

from rlhf.data.batch import collate
from rlhf.plan.phases import DEPTHS
from rlhf.plan.rehearsal.decoding_step import rehearsed_roles
from rlhf.plan.rehearsal.device import META, stand_in_of
from rlhf.plan.rehearsal.short_runs import rehearsal_changes
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.choices import Trunk
from rlhf.recipe.model_types import LEAN_TYPES
from rlhf.run.directory import StageRun

ROWS, TOKENS = 2, 8  # of the micro-batch, in prompts and responses; the operations do not depend on them


def update_passes(loaded: PinnedRecipe, number: int = 2) -> dict[str, dict[str, int]]:
    """Return the operations of a layer, by trunk and by pass: `forward` and `backward`.

    Those of the micro-batch with this number in its minibatch, from 1 on, without recomputation. The lean trunk is
    among the trunks if it supports the recipe's type of model.
    """
    architecture = loaded.recipe.model.architecture
    assert architecture
    trunks: list[Trunk] = ["library", "lean"] if architecture.model_type in LEAN_TYPES else ["library"]
    return {trunk: _per_layer(loaded, trunk, number) for trunk in trunks}


def _per_layer(loaded: PinnedRecipe, trunk: Trunk, number: int) -> dict[str, int]:
    """Return what each further layer adds to both passes."""
    shallow, deeper = DEPTHS
    counts = zip(*(_operations(loaded, trunk, layers, number) for layers in DEPTHS), strict=True)
    forward, backward = ((more - less) // (deeper - shallow) for less, more in counts)
    return {"forward": forward, "backward": backward}


def _operations(loaded: PinnedRecipe, trunk: Trunk, layers: int, number: int) -> tuple[int, int]:
    """Return the operations of both passes of a model with some layers, all of which have adapters."""
    changed = loaded.with_changes(rehearsal_changes(loaded.recipe, layers))
    recipe = changed.recipe
    stage, options = next(iter(recipe.online().items()))
    with tempfile.TemporaryDirectory(prefix="rlhf-plan-") as folder, stand_in_of(recipe) as stand_in:
        shared = rehearsed_roles(StageRun(Path(folder), changed, stage), options, lean=trunk == "lean")
        rollout = collate([[1] * TOKENS] * ROWS, [[1] * TOKENS] * ROWS, 0, 1, META)
        with shared.role("policy"):
            for _ in range(number):
                start = stand_in.work().launched
                hidden = shared.response_hidden(rollout)
                middle = stand_in.work().launched
                hidden.backward(torch.empty_like(hidden))
        return middle - start, stand_in.work().launched - middle
