"""Attention of a decoding step in which every row reads the cached tokens of its own, and no empty or padded slot.

torch's flash attention for sequences of different lengths takes where each sequence begins and how many of its tokens
count, both as tensors of the device: a captured step reads new ones each time.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.models import flash
from rlhf.models.flash import flash_attention

SPANS = torch.int32


def spans(padding: Tensor, lengths: Tensor, slots: int) -> Tensor:
    """Return where the tokens are that each row of a step reads, (3, rows + 1) int32.

    `padding` (rows,) are the slots before a row's first token, `lengths` (rows,) its cached tokens, of `slots` in the
    cache. The three are: the row's number, the slot of its first token counted through the rows, and its tokens. The
    last column ends the first two.
    """
    rows = torch.arange(len(padding) + 1, device=padding.device)
    first = rows * slots + F.pad(padding, (0, 1))
    return torch.stack([rows, first, F.pad(lengths, (0, 1))]).to(SPANS)


def attention_of_spans(query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, scaling: float | None) -> Tensor:
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
    cache = torch.randn(3, slots, 2 * heads[1], size, generator=draw).to(device, dtype)
    keys, values = cache.chunk(2, 2)
    expected = []
    for row, (first, length) in enumerate(zip(padding.tolist(), lengths.tolist(), strict=True)):
        k, v = (x[row, first : first + length].float().movedim(1, 0) for x in (keys, values))
        out = F.scaled_dot_product_attention(query[row, :, None].float(), k, v, enable_gqa=True)
        expected.append(out[:, 0])
        for cached in (keys, values):
            cached[row, :first], cached[row, first + length :] = 30.0, 30.0
    found = attention_of_spans(query, keys, values, spans(padding, lengths, slots).to(device), None)
    return float((found.float() - torch.stack(expected)).abs().max().nan_to_num(nan=torch.inf))
