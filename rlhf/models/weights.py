"""Safe reading of weights, optimizer states and adapters that another process wrote.

Only tensors, numbers and containers of them are unpickled, so no code runs. A weight that is missing, left over, of
another shape or not finite is an error in one line: libraries would skip it, draw it at random, or train on NaN.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.models.precision import Model
from rlhf.run.layout import ADAPTER, ADAPTER_CONFIG, ADAPTER_FILE
from rlhf.run.reader import reading

MOMENTS = ("exp_avg", "exp_avg_sq", "state1", "state2")  # in torch's AdamW and in bitsandbytes'
# Buffers that a model's code computes, and old checkpoints have: rotary frequencies, positions, causal masks.
COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|(attn|attention)\.(masked_)?bias)$")
SCORE_WEIGHT = "base_model.model.score.weight"  # the reward model's head in its adapter


def unpickled(file: Path) -> object:
    """Read a file of torch.save, onto the CPU.

    Raises UserError for anything but tensors, numbers and containers of them.
    """
    with reading(file):
        return torch.load(file, map_location="cpu", weights_only=True)


def tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, on the CPU. Raises UserError where one is not finite."""
    if not file.is_file():
        raise UserError(f"{file} is missing")
    with reading(file):
        loaded = load_file(file)
    check_finite(loaded, str(file))
    return loaded


def adapter_weights(stage_dir: Path) -> dict[str, Tensor]:
    """Return the tensors of a finished stage's adapter, on the CPU, with its configuration and values checked."""
    adapter_config(stage_dir / ADAPTER)
    return tensors(stage_dir / ADAPTER / ADAPTER_FILE)


def adapter_config(folder: Path) -> LoraConfig:
    """Return the configuration of a LoRA adapter. Raises UserError for any other kind."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise UserError(f"{file} is missing")
    with reading(file):
        config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig) or config.bias != "none" or config.use_dora:
        raise UserError(f"{file}: peft_type, bias or use_dora is not that of a plain LoRA adapter, the only kind here")
    return config


def reward_weights(rm_dir: Path, hidden_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the reward model's LoRA weights, and its head's weight (1, hidden_size)."""
    weights = adapter_weights(rm_dir)
    lora = {name: weight for name, weight in weights.items() if "lora_" in name}
    head = {name: weight for name, weight in weights.items() if name not in lora}
    expected = {SCORE_WEIGHT: torch.empty(1, hidden_size)}
    check_shapes(head, expected, str(rm_dir / ADAPTER / ADAPTER_FILE))
    return lora, head[SCORE_WEIGHT]


def attach_adapter(base: Model, stage_dir: Path, name: str = "default", trainable: bool = False) -> PeftModel:
    """Attach a finished stage's adapter to a base, which may have other adapters already.

    Raises UserError unless it fits.
    """
    folder = stage_dir / ADAPTER
    # only shapes are compared, for peft reads its own copy: each is an expanded scalar, which takes no memory
    shapes = {key: weight.new_empty(()).expand(weight.shape) for key, weight in adapter_weights(stage_dir).items()}
    with reading(folder):
        if isinstance(base, PeftModel):
            model = base
            model.load_adapter(folder, name, is_trainable=trainable)
        else:
            model = PeftModel.from_pretrained(base, folder, adapter_name=name, is_trainable=trainable)
    check_shapes(shapes, adapter_state(model, name), str(folder / ADAPTER_FILE))
    return model


def adapter_state(model: PeftModel, name: str = "default") -> dict[str, Tensor]:
    """Return the weights of one adapter by the names that they have in its file."""
    weights: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=dict(model.named_parameters()), adapter_name=name
    )
    return weights


def set_adapter_state(model: PeftModel, weights: Mapping[str, Tensor], name: str = "default") -> None:
    """Set weights of an adapter by their names, which must all be names of this adapter."""
    outcome: Any = set_peft_model_state_dict(model, dict(weights), adapter_name=name)
    assert not outcome.unexpected_keys


def check_shapes(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError unless two sets of tensors have the same names with the same shapes."""
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    mismatched = sorted(name for name in actual.keys() & expected.keys() if actual[name].shape != expected[name].shape)
    for names, what in ((missing, "lacks"), (extra, "has an unknown weight"), (mismatched, "has another shape of")):
        if names:
            shapes = (
                f", {list(actual[names[0]].shape)} for {list(expected[names[0]].shape)}" if names is mismatched else ""
            )
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{where} {what} {names[0]}{others}{shapes}: it does not fit this base and these settings")


@torch.no_grad()
def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError for the first tensor that holds NaN or infinity. Each is read once, without a copy."""
    for name, x in tensors.items():
        if x.is_floating_point() and x.numel() and not x.is_meta:
            low, high = x.aminmax()  # NaN propagates
            if not (low.isfinite() and high.isfinite()):
                raise UserError(f"{where}: {name} holds NaN or infinity; it cannot be used")


def check_optimizer(optimizer: Any, where: str) -> None:
    """Raise UserError unless the moments of a loaded optimizer are finite and have the shapes of their parameters."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        moments = {f"{name} of parameter {number}": x for name, x in state.items() if name in MOMENTS}
        check_shapes(moments, dict.fromkeys(moments, parameter), where)
        check_finite(moments, where)


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
            others = f" and {len(keys) - 1} more weights" if len(keys) > 1 else ""
            raise UserError(f"{where}: its config.json's model {problem} {keys[0]}{others}: take both from one save")


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
