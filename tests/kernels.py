"""Reference implementations of kernels that only a card has, by their documentation."""

import torch
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn for one query a sequence, with what its kernel checks.

    Of sequence n it reads the first seqused_k[n] of the keys from cu_seq_k[n] on.
    """
    count, heads, size = query.shape
    key_heads = key.shape[1]
    assert key.shape == value.shape == (len(key), key_heads, size)
    assert (heads != key_heads) == enable_gqa and heads % key_heads == 0 and max_q == 1
    assert all(x.stride(-1) == 1 for x in (query, key, value)) and query.dtype == key.dtype == value.dtype
    for x, length in ((cu_seq_q, count + 1), (cu_seq_k, count + 1), (seqused_k, count)):
        assert x.dtype == torch.int32 and x.is_contiguous() and x.shape == (length,)
    place = torch.arange(len(key))
    read = (place >= cu_seq_k[:-1, None]) & (place < (cu_seq_k[:-1] + seqused_k)[:, None])  # (N, keys)
    keys, values = (x.repeat_interleave(heads // key_heads, 1).float() for x in (key, value))
    scores = torch.einsum("nhd,khd->nhk", query.float(), keys) * (size**-0.5 if scale is None else scale)
    weights = scores.masked_fill(~read[:, None], -torch.inf).softmax(-1)
    return torch.einsum("nhk,khd->nhd", weights, values).to(query.dtype)
