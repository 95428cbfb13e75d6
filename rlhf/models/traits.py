"""Traits of a model that decide how the engine computes with it: scale of logits, sliding window, rope, experts."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.errors import UserError
from rlhf.recipe.context import context_length, too_long

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # types whose frequencies depend on the longest row of a batch


def logit_scale(config: PreTrainedConfig) -> float:
    """Return the constant by which a model of a type in rlhf/recipe/model_types.py scales logits: 1 but for Granite."""
    return 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the length of the sliding window of attention layers, in tokens; None where no layer has one."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    return window if kinds is None or "sliding_attention" in kinds else None


def has_fused_experts(model: PreTrainedModel) -> bool:
    """Return whether a model keeps the weights of many experts in one tensor (experts, out, in)."""
    return any(
        weight.dim() == 3
        for module in model.modules()
        if not isinstance(module, nn.Conv1d)
        for weight in module.parameters(recurse=False)
    )


def check_lengths(config: PreTrainedConfig, lengths: Mapping[str, int], name: str) -> None:
    """Raise UserError where sequences exceed the model's context, or would change the rotary frequencies.

    `lengths` are the longest sequences of the stages, by the keys of the recipe. Frequencies of some ropes depend on
    the longest row of a batch, so that a response would depend on its neighbours, and keys that are cached would keep
    other frequencies than new ones.
    """
    if problem := too_long(lengths, context_length(config.to_dict())):
        raise UserError(f"{problem} ({name})")
    longest = max(lengths.values(), default=0)
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # of one rope, or of one for each type of layer (Gemma 3)
        if isinstance(rope, Mapping) and rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limit = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            if longest > limit:
                raise UserError(
                    f"{name}: with a rope of type {rope['rope_type']} a sequence may have {limit} tokens, and the "
                    f"recipe admits {longest}: lower max_length, max_prompt_length or response_length"
                )
