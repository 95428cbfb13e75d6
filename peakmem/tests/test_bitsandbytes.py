"""What bitsandbytes does on a card: 4-bit products, and optimizer states in unified memory."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from peakmem.cards import CARDS, Gpu
from peakmem.device import StandIn
from peakmem.events import Parts, Peak
from peakmem.patches import bitsandbytes
from peakmem.tensors import META

pytest.importorskip("bitsandbytes")
PHASES = ("load", "train")
HUGE = 10**9  # a vocabulary that nothing below reaches

# -- 4-bit products ----------------------------------------------------------------------------------------------------

SHAPES = {  # (out, in) of the linear layers
    "llama2-7b": ((4096, 4096), (11008, 4096), (4096, 11008)),
    "llama2-13b": ((5120, 5120), (13824, 5120), (5120, 13824)),
    "mistral-7b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
    "llama2-70b": ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
}


def noted(ways: list[bool], way: bool, result: torch.Tensor) -> torch.Tensor:
    ways.append(way)
    return result


def library_unpacks(card: Gpu, rows: int, out: int, inner: int) -> bool:
    """What bitsandbytes itself does: its kernel for CUDA is called, with both of its ways replaced by notes."""
    library = pytest.importorskip("bitsandbytes") and bitsandbytes.cuda_backend()
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


@pytest.mark.parametrize("card", ("4090", "h100", "h100-sxm"))
@pytest.mark.parametrize("model", SHAPES)
def test_a_4bit_weight_is_unpacked_where_the_library_unpacks_it(card, model):
    """Every number of rows that a rollout decodes together, and those around the limits of larger batches."""
    gpu = CARDS[card].gpu
    for out, inner in SHAPES[model]:
        for rows in (*range(1, 65), 128, 512, 513, 1536, 1537, 4096):
            assert bitsandbytes.unpacks_4bit(gpu, torch.bfloat16, rows, out, inner) == library_unpacks(
                gpu, rows, out, inner
            ), (out, inner, rows)


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_paged_states_are_outside_the_allocator():
    library = pytest.importorskip("bitsandbytes")

    def run(kind) -> tuple[Peak, Parts]:
        with StandIn("cuda", PHASES, HUGE) as stand_in, record_function("train"):
            layer = nn.Linear(512, 512, bias=False, device=META)
            optimizer = kind(layer.parameters())
            layer(torch.empty(1, 512, device=META)).sum().backward()
            optimizer.step()
            with record_function("load"):
                pass
        peak = stand_in.peaks()["train/load"]
        return peak, max(peak.by_operation.values(), key=lambda parts: sum(parts.values()))

    numbers = 512 * 512
    paged, parts = run(library.optim.PagedAdamW32bit)
    assert paged.paged == 2 * 4 * numbers
    assert parts.get("optimizer", 0) < numbers
    plain, parts = run(library.optim.AdamW8bit)
    assert plain.paged == 0
    assert 2 * numbers <= parts["optimizer"] <= 2.1 * numbers
    eight, parts = run(library.optim.PagedAdamW8bit)
    assert eight.paged == 2 * numbers
    assert parts.get("optimizer", 0) < 0.1 * numbers
