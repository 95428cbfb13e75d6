"""What the lean trunk does not support: models and lengths of sequences that it refuses."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from rlhf.errors import UserError
from rlhf.models.traits import LENGTH_DEPENDENT_ROPE, sliding_window
from rlhf.recipe.model_types import LEAN_TYPES


def check_supported(base: PreTrainedModel) -> None:
    """Raise UserError for a base model that the lean trunk does not support."""
    if problem := _why_unsupported(base):
        raise UserError(f"hardware.trunk: lean does not support {problem}: use hardware.trunk: library")


def check_length(config: PreTrainedConfig, longest: int) -> None:
    """Raise UserError where sequences of `longest` tokens exceed a sliding window: the lean trunk has none."""
    window = sliding_window(config)
    if window and longest > window:
        raise UserError(
            f"hardware.trunk: lean: sequences of {longest} tokens exceed the model's sliding window of {window}: "
            "use hardware.trunk: library"
        )


def _why_unsupported(base: PreTrainedModel) -> str | None:
    """Return the part of a base model that the lean trunk does not support; None where it supports the model."""
    config = base.config
    heads: tuple[Any, ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    if config.model_type not in LEAN_TYPES or type(base) not in [of_type[type(config)] for of_type in heads]:
        return f"{type(base).__name__}, only models of type {', '.join(LEAN_TYPES)}"
    if config.hidden_act != "silu":
        return f"the activation function {config.hidden_act}"
    if getattr(config, "use_sliding_window", False):
        return "a sliding window in some layers"
    if (rope := (getattr(config, "rope_parameters", None) or {}).get("rope_type")) in LENGTH_DEPENDENT_ROPE:
        return f"a rope of type {rope}, whose frequencies depend on the length"
    if foreign := [m for m in base.get_decoder().modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear]:
        kinds = {type(m).__name__ for m in foreign} - {"Linear4bit"}
        return f"layers of type {kinds.pop()}" if kinds else None
    return None
