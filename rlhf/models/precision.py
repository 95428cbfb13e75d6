"""The precision in which a model, with or without adapters, multiplies."""

import torch
from peft import PeftModel
from transformers import PreTrainedModel

Model = PreTrainedModel | PeftModel


def dtype_of(model: Model) -> torch.dtype:
    """Return the type in which a model multiplies: that of its input embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.dtype


def computes_in_bfloat16(model: Model) -> bool:
    """Return whether the base is in bfloat16.

    All forward passes then run in `mixed_precision`; adapters are float32.
    """
    return dtype_of(model) == torch.bfloat16


def mixed_precision(model: Model) -> torch.autocast:
    """Return the autocast context in which every forward pass runs.

    A bfloat16 base multiplies its float32 adapters in bfloat16 too, as in training.
    """
    return torch.autocast(model.device.type, torch.bfloat16, enabled=computes_in_bfloat16(model))
