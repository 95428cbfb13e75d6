"""Checks of folders with a base model, made before anything is built from them."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from rlhf.errors import UserError
from rlhf.models import records
from rlhf.run import reader
from rlhf.run.reader import reading

INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def check(folder: Path) -> None:
    """Raise UserError for a configuration that is not plausible, and for weights that do not fit it."""
    config = reader.read(folder / "config.json", records.ModelConfig)
    if config is None:
        raise UserError(f"{folder}/config.json is missing")
    check_full(config.plain(), str(folder))
    _check_weights(folder, config)


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
    _weight_files(folder)


def check_full(config: Mapping[str, object], name: str) -> None:
    """Raise UserError for a checkpoint with quantised weights.

    The recipe alone decides whether and how weights are quantised.
    """
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise UserError(
                f"{name}/config.json has {key}: its weights are quantised already; name a checkpoint with full "
                "weights (model.quantization: nf4 quantises them here)"
            )


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights.

    Raises UserError for weights as pickles, for files that are missing, and for some of another save beside them:
    transformers would read one of the two.
    """
    index = reader.read(folder / INDEX, records.WeightsIndex)
    files = sorted(folder / name for name in {*index.weight_map.values()}) if index else [folder / "model.safetensors"]
    missing = next((file for file in files if not file.is_file()), None)
    if missing:
        pickled = any(file for pattern in PICKLES for file in folder.glob(pattern))
        why = "; its weights are pickles, which are not read: convert them to safetensors" if pickled else ""
        raise UserError(f"{missing} is missing{why}")
    others = sorted(file for file in folder.glob("model*") if WEIGHTS.fullmatch(file.name) and file not in files)
    if others:
        named_in = INDEX if index else files[0].name
        raise UserError(f"{others[0]} belongs to other weights than {named_in}: keep the files of one save")
    return files


def _check_weights(folder: Path, config: records.ModelConfig) -> None:
    """Raise UserError for files of weights that cannot be used, and for a configuration of a far larger model."""
    held = sum(_held(file) for file in _weight_files(folder))
    vocabulary, width, layers = (
        size or 0 for size in (config.vocab_size, config.hidden_size, config.num_hidden_layers)
    )
    needed = (vocabulary + layers) * width  # the embedding, and one norm per layer
    if needed > held:
        raise UserError(f"{folder}/config.json describes {needed:,} weights or more, the files hold {held:,}")


def _held(file: Path) -> int:
    """Return the number of elements in all tensors of a safetensors file, from its header."""
    count = 0
    with reading(file), safe_open(file, framework="pt") as handle:
        for key in handle.keys():  # noqa: SIM118
            size = 1
            for side in handle.get_slice(key).get_shape():
                size *= side
            count += size
    return count
