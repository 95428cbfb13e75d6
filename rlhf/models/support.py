"""Lengths of sequences that a model can have."""

from collections.abc import Mapping

from transformers import PreTrainedConfig

from rlhf.errors import UserError
from rlhf.models.traits import LENGTH_DEPENDENT_ROPE, ropes
from rlhf.recipe.context import context_length, too_long


def check_lengths(config: PreTrainedConfig, lengths: Mapping[str, int], name: str) -> None:
    """Raise UserError where sequences exceed the model's context, or would change the rotary frequencies.

    `lengths` are the longest sequences of the stages, by the keys of the recipe. Frequencies of some ropes depend on
    the longest row of a batch, so that a response would depend on its neighbours, and keys that are cached would keep
    other frequencies than new ones.
    """
    if problem := too_long(lengths, context_length(config.to_dict())):
        raise UserError(f"{problem} ({name})")
    longest = max(lengths.values(), default=0)
    for rope in ropes(config):
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limit = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            if longest > limit:
                raise UserError(
                    f"{name}: with a rope of type {rope['rope_type']} a sequence may have {limit} tokens, and the "
                    f"recipe admits {longest}: lower max_length, max_prompt_length or response_length"
                )
