"""Checks of folders with a base model, made before anything is built from them."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from rlhf.errors import UserError
from rlhf.files import read_json
from rlhf.run.reader import reading

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
SIZES = ("vocab_size", "num_hidden_layers"), ("hidden_size",)
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def check(folder: Path) -> None:
    """Raise UserError for a folder without a config.json, without whole weights, or with those of two saves."""
    config = read_json(folder / "config.json")
    if config is None:
        raise UserError(f"{folder}/config.json is missing or no JSON")
    check_full(config, str(folder))
    held = sum(_held(file) for file in _check_files(folder))
    inner = config.get("text_config")
    text = {**config, **(inner if isinstance(inner, dict) else {})}
    rows, width = ([size for key in keys if type(size := text.get(key)) is int] for keys in SIZES)
    if sum(rows) * max(width, default=0) > held:  # at least an embedding, and a norm of each layer
        raise UserError(f"{folder}/config.json describes more weights than the {held:,} that the files hold")


def share_weights(config: Path) -> None:
    """Give the weights beside a written config its permissions.

    safetensors writes for the user alone, whatever the umask: a server of another user could not read them.
    """
    for file in config.parent.glob("*.safetensors"):
        shutil.copymode(config, file)


def check_encoder(folder: Path) -> None:
    """Raise UserError if there is no model for BERTScore, or one without safetensors."""
    if not (folder / "config.json").is_file():
        raise UserError(f"evaluate.bertscore_model: {folder} is not a folder with a model (it has no config.json)")
    _check_files(folder)


def check_full(config: Mapping[str, object], name: str) -> None:
    """Raise UserError for a checkpoint with quantised weights: the recipe alone decides how they are quantised."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise UserError(
                f"{name}/config.json has {key}: its weights are quantised already; name a checkpoint with full "
                "weights (model.quantization: nf4 quantises them here)"
            )


def _check_files(folder: Path) -> list[Path]:
    """Return the files of the weights.

    Raises UserError for pickled or missing ones, and for those of another save, which would be read by chance.
    """
    index = read_json(folder / INDEX)
    parts = index.get("weight_map") if index else {"": WEIGHTS}
    if not isinstance(parts, dict):
        raise UserError(f"{folder / INDEX} has no weight_map: get the file again")
    files = {folder / str(name) for name in parts.values()}
    if missing := sorted(file for file in files if not file.is_file() or file.parent != folder):
        pickled = any(file for pattern in PICKLES for file in folder.glob(pattern))
        why = "; its weights are pickles, which are not read: convert them to safetensors" if pickled else ""
        raise UserError(f"{missing[0]} is missing{why}")
    if index and (folder / WEIGHTS).is_file() and folder / WEIGHTS not in files:
        raise UserError(f"{folder / WEIGHTS} belongs to other weights than {INDEX}: keep the files of one save")
    return sorted(files)


def _held(file: Path) -> int:
    """Return the number of elements in all tensors of a safetensors file, from its header."""
    with reading(file), safe_open(file, framework="pt") as handle:
        return sum(math.prod(handle.get_slice(key).get_shape()) for key in handle.keys())  # noqa: SIM118
