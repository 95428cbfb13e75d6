"""Attention to own tokens (rlhf/models/spans.py) as transformers' layers ask for it.

A step gets `spans` with two dimensions before them, (1, 1, 3, rows + 1), in place of a mask; no mask has their type.
Prompts end together in the cache, so that a row's tokens are one piece that begins behind its padding. Where the kernel
does not take keys and values (rlhf/models/flash.py), a step reads a window of the cache with a mask
(rlhf/rollout/library_decoding.py).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from rlhf.models import flash, spans
from rlhf.models.precision import Model
from rlhf.models.spans import SPANS
from rlhf.recipe.model_types import TESTED

NAME = "own_tokens"  # of this attention among those of transformers
BY_DEVICE = {"cpu": False, "cuda": True}


def attention_of_steps(model: Model) -> str:
    """Return the attention implementation with which the model samples: this one, where types were tested with it."""
    return NAME if BY_DEVICE[model.device.type] and model.config.model_type in TESTED else "sdpa"


def readable(keys: Tensor, values: Tensor) -> bool:
    """Return whether steps can read a cache of these keys and values, (rows, heads, slots, size), so."""
    size = keys.shape[-1]
    return (
        keys.dtype == values.dtype
        and size == values.shape[-1]
        and flash.suits(keys.dtype, size)
        and spans.kernel_works(keys.device, keys.dtype, size)
    )


def newest(rows: Tensor, most: int) -> Tensor:
    """Return the `spans` of the newest `most` tokens of each row."""
    _, _, lengths = rows.unbind(2)
    skipped = (lengths - most).clamp(min=0)
    return rows + torch.stack([torch.zeros_like(skipped), skipped, -skipped], 2)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention (rows, queries, heads, size) as transformers asks for it, with `spans` for a mask in a step.

    query: (rows, heads, 1, size), keys and values: (rows, key heads, slots, size), views of memory in which the heads
    of a slot lie side by side. Anything but `spans` is left to torch's usual attention.
    """
    if attention_mask is None or attention_mask.dtype != SPANS:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    out = spans.attention_of_spans(
        query.squeeze(2), key.transpose(1, 2), value.transpose(1, 2), attention_mask[0, 0], scaling
    )
    return out.unsqueeze(1), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
