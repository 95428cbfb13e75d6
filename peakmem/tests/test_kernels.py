"""What CUDA libraries allocate on a card: workspaces, unpacked 4-bit weights, attention's sums."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import record_function

from peakmem import cards, kernels
from peakmem.cards import CARDS, UNKNOWN, Gpu
from peakmem.device import StandIn
from peakmem.tensors import META

PHASES = ("load", "train")

# -- cards and workspaces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "gb"),
    [
        ("4090", "RTX 4090", 25.7),
        ("A100", "A100", 85.9),
        ("24GB", "card with 24 GB", 24),
        ("1.5GiB", "card with 1.61061 GB", 1.5 * 2**30 / 1e9),
    ],
)
def test_a_card_by_its_name_or_any_of_a_size(text, words, gb):
    card = cards.named(text)
    assert card.words == words and card.memory and card.memory.gb == pytest.approx(gb)
    assert (card.gpu == UNKNOWN) == words.startswith("card with")
    assert StandIn(text, PHASES, 1).gpu == card.gpu


def test_a_card_that_is_not_known_counts_as_the_one_that_takes_most():
    assert cards.workspace(UNKNOWN) == max(cards.workspace(card.gpu) for card in CARDS.values())


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_inside(card: Gpu, heads: int, length: int, size: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes inside the backward pass of masked attention over two rows, as the stand-in counts them."""
    q, k, v = (torch.empty(2, heads, length, size, dtype=dtype, device=META, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, length, length, dtype=torch.bool, device=META)
    with StandIn("cuda", PHASES, 10**9, card) as stand_in, record_function("train"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    operations = stand_in.peaks()["train"].by_operation
    (parts,) = (parts for name, parts in operations.items() if "(inside)" in name)
    return parts["kernels"]


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def test_masked_attention_adds_up_gradients_in_float32():
    """Heads of 128, 300 places.

    They are 3 blocks of 128 on an H100; on a 4090 5 blocks of 64 in 2 columns, and for keys and values one block of
    64 x 128 each, with 200 // (2 x 40) = 2 parts.
    """
    delta = 2 * 40 * 300 * 4
    assert attention_inside(CARDS["h100"].gpu, 40, 300, 128) == rounded(2 * 40 * 3 * (16 + 128 * 128 * 4) + delta)
    tiles = 5 * 2 * (16 + 64 * 64 * 4)
    assert attention_inside(CARDS["4090"].gpu, 40, 300, 128) == rounded(2 * 40 * (tiles + 2 * 2 * 64 * 128 * 4) + delta)


def test_softmax_of_float16_is_float32_without_a_copy_and_its_backward_pass_writes_a_product():
    """Measured on a T4: eager attention of SmolLM2-1.7B over 2048 tokens, 5706 MiB; the two were worth 512 MiB."""
    x = torch.empty(4, 1024, 1024, dtype=torch.float16, device=META, requires_grad=True)
    with StandIn("cuda", PHASES, 10**9, CARDS["t4"].gpu) as stand_in:
        with record_function("load"):
            out = F.softmax(x, dim=-1, dtype=torch.float32)
        with record_function("train"):
            out.backward(torch.empty_like(out))
    assert (out.dtype, x.grad is not None and x.grad.dtype) == (torch.float32, torch.float16)
    half, single = x.nbytes, out.nbytes
    peaks = stand_in.peaks()
    assert peaks["load"].bytes == single
    assert peaks["train"].bytes == single + single + half + single, "output, gradient, the input's gradient, product"


def test_a_masked_softmax_and_its_mask_are_blocks_of_their_own():
    """As one block they would not fit where a softmax alone has been."""
    x = torch.empty(4, 1024, 1024, device=META)
    with StandIn("t4", PHASES, 10**9) as stand_in:
        torch.ops.aten._safe_softmax.default(x, -1)
    inside = [event.bytes for event in stand_in.events() if "(inside)" in event.name]
    assert inside == [x.nbytes, x.numel()]


@pytest.mark.parametrize("name", kernels.VARIABLE_LENGTHS)
def test_what_attention_to_a_row_s_own_tokens_allocates(name):
    """Grouped queries are copied, and so are their results; partial sums of at most 4 blocks of 128 keys, by hand."""
    keys = torch.empty(16 * 512, 8, 128, dtype=torch.bfloat16, device=META)
    for heads, inside in ((8, 0), (32, 2 * 16 * 32 * 128 * 2 + 4 * 16 * 32 * (128 + 1) * 4)):
        query = torch.empty(16, heads, 128, dtype=torch.bfloat16, device=META)
        args = (query, keys, keys, None, None, 1, 512)
        assert kernels.inside(CARDS["h100"].gpu)[name](args, {}) == inside
    short = (*args[:6], 128)
    assert kernels.inside(CARDS["h100"].gpu)[name](short, {}) == 2 * 16 * 32 * 128 * 2, "one block has no partial sums"
    several = (*args[:5], 2, 512)
    assert kernels.inside(CARDS["h100"].gpu)[name](several, {}) == 0, "several queries of a row stay as they lie"


@pytest.mark.parametrize(("kv_heads", "copied"), [(4, 0), (2, 2 * 70 * 4 * 40 * 2)])
def test_what_the_gradient_of_sequences_of_different_lengths_allocates(kv_heads, copied):
    """softmax_d and dq_accum in float32, with 128 places more for each of 3 sequences; heads of 40 numbers are 64."""
    sizes = ((30, 4), (70, kv_heads), (70, kv_heads))
    q, k, v = (torch.empty(*n, 40, dtype=torch.bfloat16, device=META, requires_grad=True) for n in sizes)
    with StandIn("cuda", PHASES, 10**9, CARDS["h100"].gpu) as stand_in, record_function("train"):
        ends, key_ends = (torch.tensor(n, dtype=torch.int32).to(META) for n in ([0, 5, 10, 30], [0, 5, 20, 70]))
        out = torch.ops.aten._flash_attention_forward(q, k, v, ends, key_ends, 20, 50, 0.0, True, False)[0]
        out.backward(torch.empty_like(out))
    peak = stand_in.peaks()["train"]
    (inside,) = (parts["kernels"] for name, parts in peak.by_operation.items() if "(inside)" in name)
    assert inside == rounded((30 + 3 * 128) * 4 * (1 + 64) * 4 + copied)
