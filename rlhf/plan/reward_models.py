"""Memory of reward models of others, `reward_model(...)`, which score beside a stage.

All of them lie on the device, and one after the other has the activations of a batch; the stage keeps what it has
reserved there. Weights are counted from the headers of their files. Activations are estimated from the widths that
config.json names.
"""

import json
import math
from pathlib import Path

from safetensors import safe_open

from rlhf.files import reading
from rlhf.plan.weights import NF4_BYTES
from rlhf.recipe import Recipe, StageName
from rlhf.recipe.stages import EVALUATE
from rlhf.stages.online.model_reward import ModelReward
from rlhf.stages.online.rewards import find

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of a weight, by its type in a file
UNPACKED = ("embed", "score", "classifier", "head")  # in names of matrices that NF4 does not pack
# Numbers of the hidden and of the intermediate width that are held of each token, at most. On a CPU, batches of 8 texts
# of 256 tokens at widths of 1,024 and 4,096 took 152 MB (BERT), 198 (DeBERTa) and 318 (Qwen2), of 336 estimated; of 512
# tokens 538 (DeBERTa), of 671 (2026-11-27).
PER_TOKEN = (16, 6)


def beside(recipe: Recipe, stage: StageName) -> int:
    """Return the bytes that the reward models of others need beside a stage, as far as they are on this machine.

    Raises UserError for files that are damaged.
    """
    known = [size for model in _models(recipe, stage) if (size := known_size(recipe, model)) is not None]
    return sum(weights for weights, _ in known) + max((work for _, work in known), default=0)


def _models(recipe: Recipe, stage: StageName) -> list[ModelReward]:
    """Return each reward model that a stage calls; an evaluation calls those of all policies."""
    callers = [options for online, options in recipe.online().items() if stage in (online, EVALUATE)]
    names = [name for options in callers for name in options.reward_funcs]
    of_models = [name for name in dict.fromkeys(names) if name.partition("(")[0].strip() == "reward_model"]
    found = [find(name, stage).function for name in of_models]
    return [model for model in found if isinstance(model, ModelReward)]


def known_size(recipe: Recipe, model: ModelReward) -> tuple[int, int] | None:
    """Return the bytes of a model's weights and of its activations; None if it is not on this machine."""
    folder = _folder(model.name, model.revision)
    if folder is None:
        return None
    weights, width = 0.0, 2
    for file in sorted(folder.glob("*.safetensors")):
        with reading(file), safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                tensor = tensors.get_slice(name)
                shape = tensor.get_shape()
                size: float = ELEMENT_BYTES.get(tensor.get_dtype(), 4)
                is_matrix = len(shape) == 2 and name.endswith(".weight")
                if model.quantization == "nf4" and is_matrix and not any(part in name for part in UNPACKED):
                    size = NF4_BYTES
                weights += math.prod(shape) * size
                width = max(width, math.ceil(size))
    with reading(folder / "config.json"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    hidden, inner = int(text.get("hidden_size") or 0), int(text.get("intermediate_size") or 0)
    tokens = model.batch_size * recipe.longest()
    return math.ceil(weights), tokens * (PER_TOKEN[0] * hidden + PER_TOKEN[1] * inner) * width


def _folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a checkpoint, or of the hub's in the cache; None where there is none yet."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download  # a recipe without such a model does without

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None
