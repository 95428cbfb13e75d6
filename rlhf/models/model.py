"""The type of a model with or without adapters."""

import torch
from peft import PeftModel
from transformers import PreTrainedModel

Model = PreTrainedModel | PeftModel


def dtype_of(model: Model) -> torch.dtype:
    """Return the type in which a model multiplies: that of its input embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.dtype
