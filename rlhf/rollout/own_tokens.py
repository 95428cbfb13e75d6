"""Attention of a decoding step in which every row reads the cached tokens of its own, and no empty or padded slot.

torch's flash attention for sequences of different lengths takes where each sequence begins and how many of its tokens
count, both as tensors of the device: a captured step reads new ones each time. Prompts end together in the cache, so
that a row's tokens are one piece that begins behind its padding.

Where the kernel does not take keys and values (rlhf/models/flash.py), a step reads a window of the cache with a mask
(rlhf/rollout/library_decoding.py).
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from rlhf.models import flash
from rlhf.models.flash import flash_attention
from rlhf.models.precision import Model
from rlhf.recipe.model_types import TESTED

NAME = "own_tokens"  # of this attention among those of transformers
BY_DEVICE = {"cpu": False, "cuda": True}
SPANS = torch.int32  # in place of a mask; no mask has this type


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
        and kernel_works(keys.device, keys.dtype, size)
    )


def spans(padding: Tensor, lengths: Tensor, slots: int) -> Tensor:
    """Return what a step's attention gets in place of a mask, (1, 1, 3, rows + 1) int32.

    `padding` (rows,) are the slots before a row's first token, `lengths` (rows,) its cached tokens, of `slots` in the
    cache. The three are: the row's number, the slot of its first token counted through the rows, and its tokens. The
    last column ends the first two.
    """
    rows = torch.arange(len(padding) + 1, device=padding.device)
    first = rows * slots + F.pad(padding, (0, 1))
    return torch.stack([rows, first, F.pad(lengths, (0, 1))]).to(SPANS)[None, None]


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
    out = _of_spans(query.squeeze(2), key.transpose(1, 2), value.transpose(1, 2), attention_mask[0, 0], scaling)
    return out.unsqueeze(1), None


def _of_spans(query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, scaling: float | None) -> Tensor:
    """Return attention (rows, heads, size) of one query a row to keys and values (rows, slots, key heads, size)."""
    slots, heads, size = keys.shape[1:]
    numbers, first, lengths = rows
    out: Tensor
    out, *_ = flash_attention(
        query,
        keys.view(-1, heads, size),
        values.view(-1, heads, size),
        numbers,
        first,
        1,
        slots,
        0.0,  # dropout
        False,  # causal: the only query is the newest token
        False,  # debug mask
        scale=scaling,
        seqused_k=lengths[:-1],
    )
    return out


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@functools.cache
def kernel_works(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Return whether the device's kernel reads the tokens that it should, tried once with a few numbers.

    Where it does not, the reason is said, and steps read the cache through a mask.
    """
    what = "decoding reads padded and empty slots too, as torch's attention of own tokens fails"
    return flash.works(what, lambda: max(_difference(device, dtype, size, heads) for heads in ((2, 2), (4, 2))))


def _difference(device: torch.device, dtype: torch.dtype, size: int, heads: Sequence[int]) -> float:
    """Return the largest difference from torch's plain attention, with other numbers in the slots not to be read."""
    draw = torch.Generator().manual_seed(0)
    padding, lengths, slots = torch.tensor([0, 7, 130]), torch.tensor([300, 1, 150]), 300
    query = torch.randn(3, heads[0], size, generator=draw).to(device, dtype)
    keys, values = torch.randn(2, 3, slots, heads[1], size, generator=draw).to(device, dtype)
    expected = []
    for row, (first, length) in enumerate(zip(padding.tolist(), lengths.tolist(), strict=True)):
        k, v = (x[row, first : first + length].float().movedim(1, 0) for x in (keys, values))
        out = F.scaled_dot_product_attention(query[row, :, None].float(), k, v, enable_gqa=True)
        expected.append(out[:, 0])
        for cached in (keys, values):
            cached[row, :first], cached[row, first + length :] = 30.0, 30.0
    found = _of_spans(query, keys, values, spans(padding, lengths, slots)[0, 0].to(device), None)
    return float((found.float() - torch.stack(expected)).abs().max().nan_to_num(nan=torch.inf))
