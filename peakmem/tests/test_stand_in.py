"""The stand-in device: values that it knows, answers where it knows none, and the memory of the device's kernels."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import record_function

from peakmem.cards import Device
from peakmem.device import StandIn
from peakmem.events import Peak
from peakmem.tensors import META

PHASES = ("load", "train")
HUGE = 10**9  # a vocabulary that nothing below reaches


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that depend on weights."""
    tensor = torch.randn(*shape, device=META)
    return tensor > 0 if dtype == torch.bool else tensor.to(dtype)


@pytest.fixture(params=["cpu", "cuda"])
def stand_in(request):
    with StandIn(request.param, PHASES, HUGE) as device:
        yield device


# -- values ------------------------------------------------------------------------------------------------------------


def test_masks_and_lengths_are_known(stand_in):
    lengths = torch.tensor([3, 1, 2]).to(META)
    mask = torch.arange(4, device=META) < lengths[:, None]
    assert mask.sum().item() == 6
    assert mask.tolist() == [[True] * 3 + [False], [True] + [False] * 3, [True] * 2 + [False] * 2]
    assert int(lengths.max()) == 3
    assert lengths.argsort(descending=True).tolist() == [0, 2, 1]
    assert (mask.int().cumsum(1) - 1).clamp(min=0)[0].tolist() == [0, 1, 2, 2]
    assert bool((lengths > 0).all()) and not bool(mask.all())
    assert [part.tolist() for part in lengths.split(2)] == [[3, 1], [2]]
    assert torch.cat([lengths, lengths[:1]]).cpu().tolist() == [3, 1, 2, 3]
    assert torch.where(lengths > 1, lengths, 9).tolist() == [3, 9, 2]


def test_changes_in_place_go_through_views(stand_in):
    x = torch.zeros(4, dtype=torch.int64, device=META)
    x[1:3] = 7
    x.view(2, 2)[1].add_(1)
    x[3:].copy_(torch.tensor([5]))
    assert x.tolist() == [0, 7, 8, 5]
    middle = x[1:3]
    x.mul_(2)
    assert middle.tolist() == [14, 16]
    x[:2] = torch.tensor([1, 2]).to(META)
    assert x.tolist() == [1, 2, 16, 10]


def test_what_is_not_known_reads_as_one(stand_in):
    assert unknown(3).sum().item() == 1.0
    assert isinstance(unknown(3).mean().item(), float)
    number = unknown(3, 5).argmax(-1)[0].item()
    assert number == 1 and isinstance(number, int)
    assert (unknown(1) > 5).item() is True
    assert bool(unknown(2).isfinite().all())
    known = torch.ones(3, device=META)
    assert (known + unknown(3)).sum().item() == 1.0, "what is not known makes all that follows so"


@pytest.mark.parametrize("change", ["add_", "copy_", "view", "index", "random"])
def test_unknown_values_written_into_known_ones_make_them_unknown(stand_in, change):
    x = torch.zeros(4, device=META)
    if change == "add_":
        x.add_(unknown(4))
    elif change == "copy_":
        x.copy_(unknown(4))
    elif change == "view":
        x[1:3] = unknown(2)
    elif change == "random":
        x.uniform_()
    else:
        x[torch.tensor([0, 1]).to(META)] = unknown(2)
    assert x.sum().item() == 1.0


# -- kernels -----------------------------------------------------------------------------------------------------------


def peak_of(device: Device, run, vocab_size: int = HUGE) -> Peak:
    with StandIn(device, PHASES, vocab_size) as stand_in, record_function("train"):
        run()
    return stand_in.peaks()["train"]


def heads(length: int, kv: int = 4) -> list[torch.Tensor]:
    shapes = ((1, n, length, 64) for n in (4, kv, kv))
    return [torch.randn(*shape, dtype=torch.bfloat16, device=META, requires_grad=True) for shape in shapes]


def attend(length: int, function, **options) -> int:
    """Bytes over those of the inputs, forward and backward."""

    def run() -> None:
        q, k, v = heads(length)
        out = function(q, k, v, **options)
        out.sum().backward()

    inputs = 3 * 4 * length * 64 * 2
    return peak_of("cuda", run).bytes - inputs


def test_attention_without_a_mask_makes_no_matrix_of_scores():
    """Twice the length takes twice the memory; in plain steps the matrix alone is 4 heads x T x T bfloat16 numbers."""
    plain = torch._C._nn.scaled_dot_product_attention
    scores = 4 * 2048 * 2048 * 2

    def patched(*args, **options) -> torch.Tensor:
        return F.scaled_dot_product_attention(*args, **options)

    fused, longer = (attend(length, patched, is_causal=True) for length in (2048, 4096))
    assert fused < scores / 2
    assert longer == pytest.approx(2 * fused, rel=0.01)
    assert attend(2048, plain, is_causal=True) > 2 * scores


def test_attention_with_a_mask_keeps_one_bias_for_all_heads():
    """A mask of 10 x 50 x 50 flags becomes numbers of the inputs' type, each row of 50 in room for 64."""

    def run() -> None:
        q = torch.randn(10, 4, 50, 64, dtype=torch.bfloat16, device=META)
        mask = torch.ones(10, 1, 50, 50, dtype=torch.bool, device=META)
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    queries, mask, unpadded, padded = 10 * 4 * 50 * 64 * 2, 25_088, 10 * 50 * 50 * 2, 10 * 50 * 64 * 2
    over = peak_of("cuda", run).bytes - 2 * queries - mask
    assert padded <= over <= padded + unpadded + 15_000, "one of each, where one for every head would take four"


def inside_flash_backward(length: int, kv: int) -> int:
    """Bytes that the backward pass takes inside, with 4 heads of queries and `kv` of keys and values."""

    def run() -> None:
        q, k, v = heads(length, kv)
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv < 4).sum().backward()

    operations = peak_of("cuda", run).by_operation
    (inside,) = (parts for name, parts in operations.items() if "(inside)" in name)
    return inside["kernels"]


def test_flash_attention_s_backward_pass_takes_memory_inside():
    """softmax_d and dq_accum in float32: 4 heads x 256 rows x (1 + 64) numbers.

    With 1 head of keys and values for 4 of queries: on top, gradients of 256 x 64 bfloat16 keys and values for each.
    """
    assert inside_flash_backward(256, kv=4) == 4 * 4 * 256 * 65
    assert inside_flash_backward(256, kv=1) == 4 * 4 * 256 * 65 + 2 * 4 * 256 * 64 * 2


def test_dropout_keeps_a_byte_for_each_number_on_cuda():
    """4,096 bfloat16 numbers: the result, and a mask of one byte each; on a CPU the mask is of the input's type."""

    def run() -> None:
        x = torch.empty(4096, dtype=torch.bfloat16, device=META, requires_grad=True)
        kept.append(F.dropout(x, 0.1, training=True))

    kept: list[torch.Tensor] = []
    assert peak_of("cuda", run).bytes == 8192 + 8192 + 4096
    kept.clear()
    assert peak_of("cpu", run).bytes >= 8192 + 8192 + 8192
    kept.clear()


# -- mixed precision ---------------------------------------------------------------------------------------------------


def test_autocast_on_the_stand_in_takes_what_it_takes_on_real_tensors():
    """The same layers on a CPU with torch's own autocast: types of all results."""

    def types(device: str) -> list[torch.dtype]:
        a, b = (torch.ones(4, 8, device=device, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
        w = torch.ones(8, 8, device=device, requires_grad=True)
        with torch.autocast(device, torch.bfloat16):
            results = [F.linear(a, w), F.linear(b, w), a @ w, b @ w, torch.mm(a, w), torch.matmul(a, w), a * a, a + b]
        return [x.dtype for x in results]

    real = types("cpu")
    with StandIn("cuda", PHASES, HUGE):
        assert types("meta") == real


# -- afterwards --------------------------------------------------------------------------------------------------------


def test_a_stand_in_leaves_torch_as_it_was():
    """torch lists the functions that a device context acts on once; with a stand-in among them, models load wrongly."""
    code = """
import torch
from peakmem.device import StandIn
with StandIn("cuda", ["load"], 8), torch.device("meta"):
    torch.empty(1)
with torch.device("meta"):
    assert torch.tensor([]).device.type == "meta"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
