"""Checkpoints that another program wrote: loading, and the checks of folders and weights.

A weight that is missing, left over, of another shape or not finite is an error in one line: libraries would skip it,
draw it at random, or train on NaN.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.errors import UserError
from rlhf.files import reading

WEIGHTS = "*.safetensors"
# Buffers that a model's code computes, and old checkpoints have: rotary frequencies, positions, causal masks.
COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|(attn|attention)\.(masked_)?bias)$")


def load(
    kind: Any,
    name: str,
    *,
    revision: str | None = None,
    unneeded: Sequence[str] = (),
    placed: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """Return the model of a checkpoint, loaded by one of transformers' classes for any model.

    Names of weights that begin with one of `unneeded` may be missing. `placed`: every weight of the checkpoint must
    have a place in the model. Raises UserError for another checkpoint and for weights that are not finite; the
    library's own errors pass.
    """
    one, parts = Path(name, "model.safetensors"), Path(name, "model.safetensors.index.json")
    if one.exists() and parts.exists():
        raise UserError(f"{name}: weights of two saves, {one.name} and the parts of {parts.name}: move one away")
    check_full(PreTrainedConfig.get_config_dict(name, revision=revision)[0], name)
    model: PreTrainedModel
    model, report = kind.from_pretrained(
        name,
        revision=revision,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the report names them; an error would not
        use_safetensors=True,
        **options,
    )
    missing = [key for key in report["missing_keys"] if not key.startswith(tuple(unneeded))]
    other_shape = [str(key[0]) for key in report["mismatched_keys"]]
    left_out = [*report["unexpected_keys"]] if placed else []
    for keys, problem in ((missing, "lacks"), (other_shape, "has another shape of"), (left_out, "has no place for")):
        if keys := sorted(key for key in keys if not COMPUTED.search(key)):
            raise UserError(f"{name}: its config.json's model {problem} {keys[0]}: take both from one save")
    check_finite(_numbers(model), name)
    return model


def check_full(config: Mapping[str, object], name: str) -> None:
    """Raise UserError for a checkpoint with quantised weights: the recipe alone decides how they are quantised."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise UserError(
                f"{name}/config.json has {key}: its weights are quantised already; name a checkpoint with full "
                "weights (model.quantization: nf4 quantises them here)"
            )


def tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, on the CPU. Raises UserError where one is not finite."""
    with reading(file):
        loaded = load_file(file)
    check_finite(loaded, str(file))
    return loaded


@torch.no_grad()
def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError for the first tensor that holds NaN or infinity. Each is read once, without a copy."""
    for name, x in tensors.items():
        if x.is_floating_point() and x.numel() and not x.is_meta:
            low, high = x.aminmax()  # NaN propagates
            if not (low.isfinite() and high.isfinite()):
                raise UserError(f"{where}: {name} holds NaN or infinity; it cannot be used")


def _numbers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return tensors of a model by name that hold NaN or infinity where its weights do, or did before they were packed.

    Rotary frequencies count too: with a base of 0 they are infinite, which some kernels hide until the backward pass.
    """
    values: dict[str, Tensor] = {name: x for name, x in model.named_buffers() if name.endswith("inv_freq")}
    for name, parameter in model.named_parameters():
        packed = getattr(parameter, "quant_state", None)  # its blocks have scales, and these a mean as their offset
        values[name] = parameter if packed is None else packed.offset.reshape(1)  # NaN where one of the scales is
    return values


def share_weights(config: Path) -> None:
    """Give the weights beside a written config its permissions.

    safetensors writes for the user alone, whatever the umask: a server of another user could not read them.
    """
    for file in config.parent.glob(WEIGHTS):
        shutil.copymode(config, file)
