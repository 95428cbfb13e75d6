"""Which attention kernel CUDA takes."""

import pytest
import torch

from peakmem.attention import attention, backend
from peakmem.cards import Gpu

ADA, HOPPER, TURING = Gpu((8, 9), 128), Gpu((9, 0), 132), Gpu((7, 5), 40)


def heads(count: int = 8, tokens: int = 16, size: int = 128, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(2, count, tokens, size, dtype=dtype, device="meta")


def chosen(q=None, k=None, mask=None, dropout=0.0, causal=True, gqa=False, gpu=ADA) -> str:
    q = heads() if q is None else q
    k = q if k is None else k
    return backend(q, k, k, mask, dropout, causal, gqa, gpu)


MASK = torch.empty(2, 1, 16, 16, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("flash", {}),
        ("flash", {"q": heads(32), "k": heads(8), "gqa": True}),
        ("flash", {"q": heads(tokens=1), "k": heads(), "causal": False}),
        ("efficient", {"gpu": TURING, "q": heads(dtype=torch.float16)}),
        ("efficient", {"mask": MASK, "causal": False}),
        ("efficient", {"q": heads(dtype=torch.float32)}),
        ("efficient", {"q": heads(size=512)}),
        ("efficient", {"q": heads(tokens=1), "k": heads(), "causal": True}),
        ("math", {"q": heads(32), "k": heads(8), "gqa": True, "mask": MASK, "causal": False}),
        ("math", {"mask": MASK.to(torch.float32), "causal": False}),
        ("math", {"q": heads(size=66), "mask": MASK, "causal": False}),
        ("math", {"q": heads().transpose(2, 3)}),
        ("math", {"q": heads(32), "k": heads(8)}),
    ],
)
def test_the_first_kernel_whose_conditions_hold(expected, given):
    assert chosen(**given) == expected


def test_large_heads_have_no_flash_backward_pass_on_consumer_cards():
    q = heads(size=208).requires_grad_()
    assert chosen(q=q) == "efficient"
    assert chosen(q=q, gpu=HOPPER) == "flash"
    with torch.no_grad():
        assert chosen(q=q) == "flash"
    assert chosen(q=heads(size=256).requires_grad_()) == "flash"
    assert chosen(q=heads(size=256).requires_grad_(), dropout=0.1) == "efficient"


def test_the_stand_in_takes_the_arguments_by_the_names_that_torch_gives_them():
    q = heads(32)
    k = heads(8)
    out = attention("cuda", ADA)(query=q, key=k, value=k, is_causal=True, enable_gqa=True)
    assert out.shape == q.shape and out.dtype == q.dtype
