"""Weights in NF4, the 4-bit format of QLoRA (arXiv 2305.14314), packed by bitsandbytes."""

from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.errors import UserError
from rlhf.models.traits import has_fused_experts
from rlhf.recipe.schema_model import Architecture


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return bitsandbytes' settings for NF4 with double quantization, as QLoRA uses it; layers compute in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def check_blocks(architecture: Architecture | None, device: torch.device) -> None:
    """Raise UserError where bitsandbytes' kernels for a CPU would fail: a row must be whole blocks of 64 weights."""
    for key in ("hidden_size", "intermediate_size"):
        size = getattr(architecture, key, 0)
        if device.type == "cpu" and size % 64:
            raise UserError(
                f"model.quantization: nf4 on a CPU needs model.architecture.{key}, {size}, in multiples of 64"
            )


def check_layers(base: PreTrainedModel, name: str) -> None:
    """Raise UserError where NF4 would leave most weights as they are: linear layers alone are packed here."""
    if has_fused_experts(base) or any(isinstance(module, Conv1D) for module in base.modules()):
        raise UserError(
            f"{name}: model.quantization: nf4 packs linear layers alone, and most weights of this "
            f"{base.config.model_type} model are in none: use quantization: none"
        )


def quantized(module: Any, weight: torch.Tensor) -> nn.Parameter:
    """Pack a weight and the scales of its blocks on any device, as bitsandbytes does when a weight is moved to one.

    `module` is the Linear4bit that holds the weight.
    """
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Params4bit

    packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    module.quant_state = state
    return Params4bit(
        packed, quant_state=state, quant_type="nf4", module=module, bnb_quantized=True, compress_statistics=True
    )


def is_packed(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose weights are packed, or will be."""
    return type(module).__name__ == "Linear4bit"


def keep_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights anew for a kernel that some CPUs have; it does so at first use.

    A layer in that layout passes no gradient to its input, without an error: training after a first evaluation would
    follow a wrong gradient. Ranks that divide weights would undo the layout. GPUs have no such kernel.
    """
    for layer in filter(is_packed, model.modules()):
        setattr(layer, "support_avx512bf16_for_cpu", False)  # noqa: B010


def unpacked(layer: nn.Linear) -> torch.Tensor:
    """Return a linear layer's weight (out, in); a 4-bit one is unpacked in bitsandbytes' compute type."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return layer.weight
    from bitsandbytes.functional import dequantize_4bit

    weight: torch.Tensor = dequantize_4bit(layer.weight.data, state)
    return weight
