"""A base with random weights: the true shape and memory of an architecture, without a download."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers import AutoHfQuantizer, HfQuantizer

from rlhf.models.architecture import config_of
from rlhf.models.classifier import add_classifier
from rlhf.models.nf4 import is_packed, quantized
from rlhf.recipe.schema_model import Model

AutoModel = type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification]


def random_base(
    settings: Model,
    device: torch.device,
    kind: AutoModel,
    nf4: BitsAndBytesConfig | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    """Return the recipe's architecture with random weights, drawn and quantised on the device module by module."""
    architecture = settings.architecture
    assert architecture
    config: Any = config_of(architecture, num_labels=1)
    add_classifier(config)
    quantizer = AutoHfQuantizer.from_config(nf4) if nf4 else None
    model: Any = skeleton(kind, config, quantizer, options)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = torch.empty(parameter.shape, dtype=options["dtype"], device=device)
            if weight.dim() > 1:
                weight.normal_(0.0, config.initializer_range)
            else:
                weight.fill_(0.0 if name == "bias" else 1.0)
            packs = is_packed(module) and name == "weight"  # biases stay as they are
            setattr(module, name, quantized(module, weight) if packs else nn.Parameter(weight))
    _compute_buffers(model, device)
    model.tie_weights()
    if quantizer:
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    model.hf_device_map = {"": device}
    model.generation_config = GenerationConfig()  # a type's usual end token is none of this model's
    base: PreTrainedModel = model.eval()
    return base


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers of a model made on the device meta, such as rotary frequencies; checkpoints lack them too."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers:
            for name, buffer in buffers.items():
                module._buffers[name] = torch.empty_like(buffer, device=device)
            model._init_weights(module)


def skeleton(
    kind: AutoModel, config: PreTrainedConfig, quantizer: HfQuantizer | None, options: dict[str, Any]
) -> PreTrainedModel:
    """Return a model on the device meta, which takes no memory; with a quantizer it has bitsandbytes' layers."""
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, **options)  # type: ignore[no-untyped-call]
    if quantizer:
        quantizer.preprocess_model(model, device_map=None)
    return model
