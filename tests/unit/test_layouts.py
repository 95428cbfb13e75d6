"""Attention of the lean trunk's layouts."""

import pytest
import torch

from rlhf.models.lean.layouts import attention
from tests.helpers import gradient


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_bfloat16_is_rounded_once_on_a_cpu(masked):
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 7, heads, 16, generator=generator).bfloat16().requires_grad_() for heads in (6, 2, 2))
    mask = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 7, 7) if masked else None
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]

    narrow_result = attention(q, k, v, mask)
    wide_result = attention(wide[0], wide[1], wide[2], mask)
    slope = torch.randn(narrow_result.shape, generator=generator).bfloat16()
    narrow_result.backward(slope)
    wide_result.backward(slope.float())

    assert narrow_result.dtype == torch.bfloat16
    assert torch.equal(narrow_result, wide_result.bfloat16())
    for narrow, exact in zip((q, k, v), wide, strict=True):
        assert torch.equal(gradient(narrow), gradient(exact).bfloat16())
