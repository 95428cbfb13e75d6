"""Adapters that finished stages would have left, made without running those stages."""

from collections.abc import Iterable

import torch
from safetensors.torch import load_file, save_file

from rlhf.models.adapters import new_adapter, save_adapter
from rlhf.models.loading import load_base
from rlhf.models.weights import SCORE_WEIGHT
from rlhf.plan.rehearsal.device import META
from rlhf.recipe import StageName
from rlhf.recipe.stages import REWARD_MODELS
from rlhf.run.directory import StageRun
from rlhf.run.layout import ADAPTER, ADAPTER_FILE, SUMMARY


def write_adapters(run: StageRun, stages: Iterable[StageName]) -> None:
    """Write a new adapter of the recipe's shape as the result of each stage, beside the run.

    A reward model's has a head. Call it where the stand-in device is on
    (rlhf/plan/rehearsal/device.py).
    """
    model = new_adapter(load_base(run.base, META), run.loaded.recipe.lora)
    for stage in stages:
        folder = run.run_directory / stage / ADAPTER
        save_adapter(model, run.base.model.revision, folder)
        if stage in REWARD_MODELS:
            file = folder / ADAPTER_FILE
            head = torch.zeros(1, model.config.hidden_size)
            save_file(load_file(file) | {SCORE_WEIGHT: head}, file, {"format": "pt"})
        (run.run_directory / stage / SUMMARY).write_text("{}")
