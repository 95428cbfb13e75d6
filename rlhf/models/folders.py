"""Checks of folders with a base model, made before anything is built from them."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from rlhf.errors import UserError
from rlhf.files import read_json, reading

WEIGHTS = "*.safetensors"
SIZES = ("vocab_size", "num_hidden_layers"), ("hidden_size",)


def check(folder: Path) -> None:
    """Raise UserError for a folder without a config.json of full weights, or with fewer weights than it describes."""
    config = read_json(folder / "config.json")
    if config is None:
        raise UserError(f"{folder}/config.json is missing or no JSON")
    check_full(config, str(folder))
    one, parts = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.exists() and parts.exists():
        raise UserError(f"{folder}: weights of two saves, {one.name} and the parts of {parts.name}: move one away")
    held = sum(_held(file) for file in folder.glob(WEIGHTS))
    inner = config.get("text_config")
    text = {**config, **(inner if isinstance(inner, dict) else {})}
    rows, width = ([size for key in keys if type(size := text.get(key)) is int] for keys in SIZES)
    if sum(rows) * max(width, default=0) > held:  # at least an embedding, and a norm of each layer
        raise UserError(f"{folder}/config.json describes more weights than the {held:,} that the files hold")


def share_weights(config: Path) -> None:
    """Give the weights beside a written config its permissions.

    safetensors writes for the user alone, whatever the umask: a server of another user could not read them.
    """
    for file in config.parent.glob(WEIGHTS):
        shutil.copymode(config, file)


def check_encoder(folder: Path) -> None:
    """Raise UserError if there is no model for BERTScore."""
    if not (folder / "config.json").is_file():
        raise UserError(f"evaluate.bertscore_model: {folder} is not a folder with a model (it has no config.json)")


def check_full(config: Mapping[str, object], name: str) -> None:
    """Raise UserError for a checkpoint with quantised weights: the recipe alone decides how they are quantised."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise UserError(
                f"{name}/config.json has {key}: its weights are quantised already; name a checkpoint with full "
                "weights (model.quantization: nf4 quantises them here)"
            )


def _held(file: Path) -> int:
    """Return the number of elements in all tensors of a safetensors file, from its header."""
    with reading(file), safe_open(file, framework="pt") as handle:
        return sum(math.prod(handle.get_slice(key).get_shape()) for key in handle.keys())  # noqa: SIM118
