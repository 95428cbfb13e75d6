"""What CUDA libraries allocate on a card: workspaces, unpacked 4-bit weights, attention's sums."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import record_function
from torch.utils import flop_counter

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.memory import plan, predict
from rlhf.memory.card import cards, kernels
from rlhf.memory.card.cards import CARDS, SMALL_WORKSPACE, UNKNOWN, Gpu
from rlhf.memory.phases import PHASES
from rlhf.memory.rehearsal.device import StandIn
from rlhf.memory.rehearsal.operations import META
from rlhf.recipe import StageName
from tests.helpers import noted

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = ("4090", "h100", "8xh100")

# -- cards and workspaces ----------------------------------------------------------------------------------------------


def test_several_cards_are_cards_of_their_kind():
    assert cards.gpu_of("2x4090") == cards.gpu_of("4090") == CARDS["4090"].gpu
    assert cards.gpu_of("8xh100").multiprocessors == 132, "a name of its own: these are SXM cards"
    assert cards.gpu_of("2xh100") == CARDS["h100"].gpu
    assert cards.gpu_of("some-card") == UNKNOWN


@pytest.mark.parametrize("card", ["4090", "2x4090", (8, 9), (8, 0), (8, 6)])
def test_a_workspace_of_a_card_before_hopper(card):
    assert cards.workspace(card) == 8_519_680 == SMALL_WORKSPACE


@pytest.mark.parametrize("card", ["h100", "8xh100", "h200", (9, 0), (10, 0), (12, 0)])
def test_a_workspace_since_hopper(card):
    assert cards.workspace(card) == 2**25


def test_a_card_that_is_not_known_counts_as_the_one_that_takes_most():
    assert cards.workspace("some-card") == max(cards.workspace(name) for name in CARDS)


def test_each_thread_and_the_captured_stream_have_a_workspace():
    loaded = recipe.load(RECIPES / "4090-llama2-7b" / "v1").recipe
    places: tuple[tuple[StageName, str], ...] = (
        ("sft", "train"),
        ("ppo", "rollout/prefill"),
        ("ppo", "rollout/decode"),
        ("evaluate", "load"),
        ("evaluate", "evaluate/decode"),
        ("merge", "merge"),
    )
    counts = [predict.workspaces(loaded, stage, phase) / cards.workspace("4090") for stage, phase in places]
    assert counts == [2, 2, 3, 1, 2, 0], "autograd's thread only where there is training; merging: no card"
    cpu = recipe.load(RECIPES / "cpu-tiny" / "v1").recipe
    assert predict.workspaces(cpu, "sft", "train") == 0


@pytest.mark.parametrize(("name", "card"), [("2x4090-llama2-13b/v1", "4090"), ("8xh100-llama2-70b/v1", "h100")])
def test_each_of_several_cards_has_the_workspaces_of_one(name, card):
    pinned = json.loads((RECIPES / name / "predicted.json").read_text())["stages"]
    assert pinned["sft"]["train"]["workspace"] == 2 * cards.workspace(card)


# -- 4-bit products ----------------------------------------------------------------------------------------------------

SHAPES = {  # (out, in) of the linear layers
    "llama2-7b": ((4096, 4096), (11008, 4096), (4096, 11008)),
    "llama2-13b": ((5120, 5120), (13824, 5120), (5120, 13824)),
    "mistral-7b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
    "llama2-70b": ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
}


def library_unpacks(card: Gpu, rows: int, out: int, inner: int) -> bool:
    """What bitsandbytes itself does: its kernel for CUDA is called, with both of its ways replaced by notes."""
    library = pytest.importorskip("bitsandbytes") and kernels._bitsandbytes_cuda()
    assert library
    ways: list[bool] = []
    x = torch.empty(rows, inner, dtype=torch.bfloat16, device=META)
    packed = torch.empty(out * inner // 2, 1, dtype=torch.uint8, device=META)
    scales = torch.empty(out * inner // 64, device=META)
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    library._gemm_4bit_use_custom_cuda.cache_clear()
    with (
        mock.patch.object(library, "_gpu_dispatch_props", lambda index: (card.multiprocessors, *card.capability)),
        mock.patch.object(library, "_dequant_linear_fallback", lambda *_, **__: noted(ways, True, x)),
        mock.patch.object(library, "_gemm_4bit_kernel_impl", lambda *_, **__: noted(ways, False, x)),
    ):
        torch.ops.bitsandbytes.gemm_4bit.default.redispatch(cuda, x, packed, [out, inner], scales, 64, "nf4")
    library._gemm_4bit_use_custom_cuda.cache_clear()
    return ways[0]


@pytest.mark.parametrize("card", NAMES)
@pytest.mark.parametrize("model", SHAPES)
def test_a_4bit_weight_is_unpacked_where_the_library_unpacks_it(card, model):
    """Every number of rows that a rollout decodes together, and those around the limits of larger batches."""
    pytest.importorskip("bitsandbytes")
    gpu = CARDS[card].gpu
    for out, inner in SHAPES[model]:
        for rows in (*range(1, 65), 128, 512, 513, 1536, 1537, 4096):
            assert kernels.unpacks_4bit(gpu, torch.bfloat16, rows, out, inner) == library_unpacks(
                gpu, rows, out, inner
            ), (out, inner, rows)


def test_the_rows_up_to_which_decoding_stays_fused():
    """bitsandbytes 0.50.2; another version may choose otherwise, and then docs/memory-method.md is to be corrected."""
    pytest.importorskip("bitsandbytes")

    def fused(card: str, model: str) -> int:
        shapes = SHAPES[model]
        return next(
            rows - 1
            for rows in range(1, 65)
            if any(kernels.unpacks_4bit(CARDS[card].gpu, torch.bfloat16, rows, *shape) for shape in shapes)
        )

    models = ("llama2-7b", "llama2-13b", "mistral-7b")
    assert [fused("4090", model) for model in models] == [8, 8, 8]
    assert [fused("h100", model) for model in models] == [5, 5, 5]


def inside(card: Gpu, rows: int, out: int, inner: int) -> int:
    """Bytes that the stand-in counts inside one product with a 4-bit weight whose scales are 8-bit."""
    x = torch.empty(rows, inner, dtype=torch.bfloat16, device=META)
    packed = torch.empty(out * inner // 2, 1, dtype=torch.uint8, device=META)
    nested = {
        "absmax_8bit": torch.empty(out * inner // 64, dtype=torch.uint8, device=META),
        "absmax_code": torch.empty(256, device=META),
        "absmax_offset": torch.empty((), device=META),
    }
    scales = torch.empty(out * inner // 64 // 256, device=META)
    with StandIn("cuda", PHASES, 10**9, card) as stand_in, record_function("decode"):
        torch.ops.bitsandbytes.gemm_4bit.default(x, packed, [out, inner], scales, 64, "nf4", **nested)
    return max(parts.get("kernels", 0) for parts in stand_in.peaks()["decode"].by_operation.values())


def test_an_unpacked_weight_takes_its_memory_on_the_card_that_unpacks_it():
    pytest.importorskip("bitsandbytes")
    weight, scales = 2 * 4096 * 4096, 2 * 4 * 4096 * 4096 // 64
    assert inside(CARDS["4090"].gpu, 8, 4096, 4096) == 0
    assert inside(CARDS["4090"].gpu, 9, 4096, 4096) == weight + scales
    assert inside(CARDS["h100"].gpu, 8, 4096, 4096) == weight + scales
    assert inside(CARDS["4090"].gpu, 9, 11008, 4096) == 0 < inside(CARDS["h100"].gpu, 33, 11008, 4096)


def test_a_library_without_the_choice_counts_as_unpacking(monkeypatch):
    monkeypatch.setattr(kernels, "_bitsandbytes_cuda", lambda: None)
    kernels.unpacks_4bit.cache_clear()
    assert kernels.unpacks_4bit(CARDS["4090"].gpu, torch.bfloat16, 1, 4096, 4096)
    kernels.unpacks_4bit.cache_clear()


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


def test_many_rows_share_one_part_of_the_keys():
    tiles = 5 * 2 * (16 + 64 * 64 * 4)
    inside = attention_inside(CARDS["4090"].gpu, 128, 300, 128)
    assert inside == rounded(2 * 128 * (tiles + 2 * 64 * 128 * 4 + 300 * 4))


@pytest.mark.parametrize(
    ("card", "size", "blocks", "columns"), [("4090", 64, 64, 1), ("h100", 64, 64, 1), ("4090", 96, 128, 2)]
)
def test_small_heads_keep_keys_and_values_in_registers(card, size, blocks, columns):
    tiles = -(-300 // blocks) * columns * (16 + blocks * 64 * 4)
    assert attention_inside(CARDS[card].gpu, 4, 300, size) == rounded(2 * 4 * (tiles + 300 * 4))


@pytest.mark.parametrize("heads", [4, 2])
def test_operations_of_attention_are_those_that_torch_counts(heads):
    """By query heads, where torch up to 2.11 refuses fewer heads of keys."""
    query, few = (3, 4, 10, 8), (3, heads, 12, 8)
    assert kernels.attention_flops(query, few, few, 0.0) == flop_counter.sdpa_flop_count(query, few, few)
    counted = kernels.attention_backward_flops(query, query, few, few)
    assert counted == flop_counter.sdpa_backward_flop_count(query, query, few, few)


def test_attention_in_float32_has_no_sums_of_its_own():
    """The product of output and gradient is written out, and one number per query made of it."""
    inside = attention_inside(CARDS["t4"].gpu, 4, 300, 64, torch.float32)
    assert inside == rounded(2 * 4 * 300 * (64 + 1) * 4)


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


def test_a_card_before_ampere_is_refused_for_bfloat16():
    assert cards.lacks_bfloat16("4090") is cards.lacks_bfloat16("some-card") is cards.lacks_bfloat16("2x3060") is None
    assert "compute capability is 7.5, and 8.0 is needed" in str(cards.lacks_bfloat16("t4"))
    assert cards.lacks_bfloat16("2xt4") == cards.lacks_bfloat16("t4")
    loaded = recipe.load(RECIPES / "4090-llama2-7b" / "v2").recipe
    on_t4 = loaded.model_copy(update={"hardware": loaded.hardware.model_copy(update={"name": "t4"})})
    plan.check_type(loaded)
    with pytest.raises(UserError, match=r"hardware\.name: t4: a Tesla T4 does not compute in bfloat16"):
        plan.check_type(on_t4)


def test_what_attention_to_a_row_s_own_tokens_allocates_and_computes():
    """Grouped queries are copied, and so are their results; partial sums of at most 4 blocks of 128 keys, by hand."""
    op = torch.ops.torch_attn._varlen_attn.default
    keys = torch.empty(16 * 512, 8, 128, dtype=torch.bfloat16, device=META)
    for heads, inside in ((8, 0), (32, 2 * 16 * 32 * 128 * 2 + 4 * 16 * 32 * (128 + 1) * 4)):
        query = torch.empty(16, heads, 128, dtype=torch.bfloat16, device=META)
        args = (query, keys, keys, None, None, 1, 512)
        assert kernels.inside(CARDS["h100"].gpu)[op](args, {}) == inside
        assert kernels.FLOPS[op](args, {}) == 4 * 16 * heads * 128 * 512
    short = (*args[:6], 128)
    assert kernels.inside(CARDS["h100"].gpu)[op](short, {}) == 2 * 16 * 32 * 128 * 2, "one block has no partial sums"
