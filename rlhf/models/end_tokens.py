"""Ids with which a checkpoint ends a text by its own account; here texts end with the tokenizer's EOS."""

from typing import Any

from transformers import PreTrainedModel

from rlhf.errors import UserError


def end_ids(base: PreTrainedModel, name: str) -> frozenset[int]:
    """Return the end tokens of generation_config.json, or of config.json without one, that the model can sample.

    Ids beyond the vocabulary are left out: nothing ever draws them. Raises UserError for what is no id.
    """
    value: Any = None if base.generation_config is None else base.generation_config.eos_token_id
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):  # True is an instance of int
        raise UserError(
            f"{name}: eos_token_id in generation_config.json is {value!r}, not a token's id or a list of ids: "
            "correct it or leave it out"
        )
    return frozenset(i for i in ids if 0 <= i < len(base.get_output_embeddings().weight))
