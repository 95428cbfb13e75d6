"""Checks of weights that another process wrote.

A weight that is missing, left over, of another shape or not finite is an error in one line: libraries would skip it,
draw it at random, or train on NaN.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.files import reading

# Buffers that a model's code computes, and old checkpoints have: rotary frequencies, positions, causal masks.
COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|(attn|attention)\.(masked_)?bias)$")


def tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, on the CPU. Raises UserError where one is not finite."""
    with reading(file):
        loaded = load_file(file)
    check_finite(loaded, str(file))
    return loaded


def check_fits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError unless two sets of tensors have the same names with the same shapes."""
    for name in sorted(actual.keys() | expected.keys()):
        found, wanted = ([*tensors[name].shape] if name in tensors else "none" for tensors in (actual, expected))
        if found != wanted:
            raise UserError(f"{where}: {name} has shape {found}; this base and these settings need {wanted}")


@torch.no_grad()
def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError for the first tensor that holds NaN or infinity. Each is read once, without a copy."""
    for name, x in tensors.items():
        if x.is_floating_point() and x.numel() and not x.is_meta:
            low, high = x.aminmax()  # NaN propagates
            if not (low.isfinite() and high.isfinite()):
                raise UserError(f"{where}: {name} holds NaN or infinity; it cannot be used")


def check_report(report: Mapping[str, Any], where: str, unneeded: tuple[str, ...] = (), placed: bool = True) -> None:
    """Raise UserError where transformers drew weights that a checkpoint lacks, or left out some of it if `placed`.

    `report` is its `output_loading_info`. Names that begin with one of `unneeded` may be missing, and buffers that the
    code computes.
    """
    missing = [key for key in report["missing_keys"] if not key.startswith(unneeded)]
    other_shape = [str(key[0]) for key in report["mismatched_keys"]]
    left_out = [*report["unexpected_keys"]] if placed else []
    for keys, problem in ((missing, "lacks"), (other_shape, "has another shape of"), (left_out, "has no place for")):
        if keys := sorted(key for key in keys if not COMPUTED.search(key)):
            raise UserError(f"{where}: its config.json's model {problem} {keys[0]}: take both from one save")


def check_base(model: PreTrainedModel, where: str) -> None:
    """Raise UserError where a loaded base holds NaN or infinity, or did before its weights were packed to 4 bits.

    Rotary frequencies count too: with a base of 0 they are infinite, which some kernels hide until the backward pass.
    """
    values: dict[str, Tensor] = {name: x for name, x in model.named_buffers() if name.endswith("inv_freq")}
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        if state is None:
            values[name] = parameter
        elif state.nested:  # a block with NaN has a NaN scale, and the mean of the scales is their offset
            values[name] = state.offset.reshape(1)
        else:
            values[name] = state.absmax
    check_finite(values, where)
