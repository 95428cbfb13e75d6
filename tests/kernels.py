"""Reference implementations of kernels that only a card has, by their documentation."""

import torch
from torch import Tensor


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    seqused_k: Tensor,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward for one query a sequence, with what its kernel checks.

    Its arguments are those that torch has had since 2.11. Of sequence n it reads the first seqused_k[n] of the keys
    from cu_seq_k[n] on. Only the first of the five results is computed.
    """
    count, heads, size = query.shape
    key_heads = key.shape[1]
    assert key.shape == value.shape == (len(key), key_heads, size)
    assert heads % key_heads == 0 and max_q == 1
    assert dropout_p == 0 and not is_causal and not return_debug_mask
    assert all(x.stride(-1) == 1 for x in (query, key, value)) and query.dtype == key.dtype == value.dtype
    for x, length in ((cu_seq_q, count + 1), (cu_seq_k, count + 1), (seqused_k, count)):
        assert x.dtype == torch.int32 and x.is_contiguous() and x.shape == (length,)
    place = torch.arange(len(key))
    read = (place >= cu_seq_k[:-1, None]) & (place < (cu_seq_k[:-1] + seqused_k)[:, None])  # (N, keys)
    keys, values = (x.repeat_interleave(heads // key_heads, 1).float() for x in (key, value))
    scores = torch.einsum("nhd,khd->nhk", query.float(), keys) * (size**-0.5 if scale is None else scale)
    weights = scores.masked_fill(~read[:, None], -torch.inf).softmax(-1)
    none = query.new_empty(0)
    return torch.einsum("nhk,khd->nhd", weights, values).to(query.dtype), none, none, none, none
