"""The recipe's base with random weights and the adapters of PPO's roles, for the decoding and training items."""

from pathlib import Path

import torch

from rlhf.data.tokenize import DialogueTokenizer
from rlhf.models.adapters import new_adapter, save_adapter
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.names import Role
from rlhf.run.directory import StageRun

ROLES: tuple[Role, ...] = ("policy", "reference", "reward", "value")


def shared_base(loaded: PinnedRecipe, device: torch.device, folder: Path) -> tuple[SharedBase, DialogueTokenizer]:
    """Return a base with four LoRA adapters and the stand-in tokenizer. Policy and value are trainable.

    `loaded` must have random weights. All adapters are the same new one, B = 0, which is as fast as any. Files are
    written below `folder`.
    """
    run = StageRun(folder, loaded, "sft")
    base = load_base(run.base, device)
    first = run.path / "adapter"
    first.mkdir(parents=True)
    model = new_adapter(base, run.loaded.recipe.lora)
    save_adapter(model, run.base, first)
    lean = loaded.recipe.hardware.trunk == "lean"
    shared = SharedBase(model.unload(), dict.fromkeys(ROLES, run.path), trainable=("policy", "value"), lean=lean)
    shared.roles.activate("policy")
    return shared, load_tokenizer(run.base)
