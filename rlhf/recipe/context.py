"""The context of a model: how many tokens a sequence may have, prompt and response together, by its config.json.

Positions beyond it were never trained: with a plain rope the model writes garbage there, and learned positions end. A
sliding window is no limit, because it moves with the text.
"""

from collections.abc import Mapping
from typing import Any

# Keys of the longest sequence in configurations of transformers: of most types, GPT-2, MPT and DBRX, RWKV.
LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "context_length")
MOST = 2**24  # a factor beyond it is no number of a rope


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that a sequence of a model with this config.json may have; None where it sets no limit.

    A rope that is scaled reaches `factor` times as far as the original length, or as the stated one where there is no
    other (YaRN, arXiv 2309.00071); a config.json may state the result instead. Ropes of single types of layers
    (Gemma 3) do not count.
    """
    stated = next((value for key in LONGEST if type(value := config.get(key)) is int), None)
    if stated is None:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    start = original if type(original) is int else stated
    if not isinstance(factor, int | float) or not 1 < factor < MOST:
        return stated
    return max(stated, int(start * factor))


def too_long(lengths: Mapping[str, int], limit: int | None) -> str | None:
    """Return which keys of a recipe admit sequences of more than `limit` tokens; None where none does.

    `lengths` are the longest sequences of the stages, by the keys that set them.
    """
    beyond = [f"{key}: {length:,}" for key, length in lengths.items() if limit is not None and length > limit]
    return f"{', '.join(beyond)} tokens are more than the model's context of {limit:,}" if beyond else None
