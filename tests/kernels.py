"""Reference implementations of kernels that only a card has, by their documentation."""

import pytest
import torch
from torch import Tensor

from rlhf.models.lean import packed, trunk
from rlhf.rollout import library_decoding


def join_rows(patch: pytest.MonkeyPatch) -> None:
    """Let the lean trunk join rows on a CPU as on a card, also in float32."""
    patch.setattr(trunk.LeanTrunk, "packs", True)
    patch.setitem(packed.APART_BY_DEVICE, "cpu", False)
    patch.setattr(packed, "flash_attention", flash_attention)


def decode_as_a_card(patch: pytest.MonkeyPatch) -> None:
    """Let the lean trunk sample on a CPU as on a card, also in float32: own tokens, fused kernels, weights apart."""
    join_rows(patch)
    patch.setattr(packed, "flash_attention", lambda *args, **options: (one_kernel(*args, **options),))
    patch.setitem(library_decoding.FEW_KERNELS_BY_DEVICE, "cpu", True)
    patch.setitem(trunk.ONEDNN_BY_DEVICE, "cpu", False)


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
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward of sequences that follow each other, with what its kernel checks.

    Its arguments are those that torch has had since 2.11. A sequence has the queries and keys between two bounds; of
    the keys of number n the first seqused_k[n] are read. With `is_causal` its last query belongs to its last key, the
    one before to the key before, and so on. Only the first of the five results is computed.
    """
    (count, heads, size), sequences = query.shape, len(cu_seq_q) - 1
    key_heads = key.shape[1]
    assert key.shape == value.shape == (len(key), key_heads, size)
    assert heads % key_heads == 0 and dropout_p == 0 and not return_debug_mask
    assert all(x.stride(-1) == 1 for x in (query, key, value)) and query.dtype == key.dtype == value.dtype
    used = cu_seq_k.diff() if seqused_k is None else seqused_k
    for x, length in ((cu_seq_q, sequences + 1), (cu_seq_k, sequences + 1), (used, sequences)):
        assert x.dtype == torch.int32 and x.is_contiguous() and x.shape == (length,)
    assert cu_seq_q.tolist()[-1] == count and max(cu_seq_q.diff().tolist()) <= max_q and max(used.tolist()) <= max_k
    own = torch.repeat_interleave(torch.arange(sequences), cu_seq_q.diff())  # the sequence of each query
    first, end = cu_seq_k[own], cu_seq_k[own] + used[own]
    if is_causal:
        end = end - cu_seq_q[own + 1] + torch.arange(count) + 1
    place = torch.arange(len(key))
    read = (place >= first[:, None]) & (place < end[:, None])  # (queries, keys)
    keys, values = (x.repeat_interleave(heads // key_heads, 1).float() for x in (key, value))
    scores = torch.einsum("nhd,khd->nhk", query.float(), keys) * (size**-0.5 if scale is None else scale)
    weights = scores.masked_fill(~read[:, None], -torch.inf).softmax(-1)
    none = query.new_empty(0)
    return torch.einsum("nhk,khd->nhd", weights, values).to(query.dtype), none, none, none, none


@torch.library.custom_op("rlhf_tests::flash_attention", mutates_args=())
def one_kernel(
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
    scale: float | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor:
    """`flash_attention` as one operation, as a graph holds it; without a gradient."""
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    out, *_ = flash_attention(
        query, key, value, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale, seqused_k=seqused_k
    )
    return out
