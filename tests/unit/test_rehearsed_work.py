"""What a rehearsal counts beside memory: operations of products, bytes that others move, kernels that are launched."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from peakmem.tensors import META
from rlhf.plan.rehearsal import work
from rlhf.plan.rehearsal.work import Counting, CountingStandIn

PHASES = ("load", "train", "rollout", "decode")


def tracker() -> Counting:
    return Counting("cpu", PHASES, 10**9)


def test_operations_of_products():
    """2 m n k for a product, added in place or not, once forward and once for each factor that gets a gradient."""
    a, b = torch.zeros(5, 7), torch.zeros(7, 11)
    w = torch.zeros(7, 11, requires_grad=True)
    with tracker() as found:
        with record_function("load"):
            a @ b
            a.exp().add_(1)
            torch.zeros(5, 11).addmm_(a, b)
        with record_function("rollout"), record_function("decode"):
            torch.zeros(3, 5, 7) @ torch.zeros(3, 7, 11)
        with record_function("train"):
            (a @ w).sum().backward()
    flops = {name: peak.work.flops for name, peak in found.worked_peaks().items()}
    one = 2 * 5 * 7 * 11
    assert flops == {
        "load": 2 * one,
        "rollout": 3 * one,
        "rollout/decode": 3 * one,
        "train": 2 * one,
        "": 7 * one,
    }


def traffic(run) -> tuple[float, float]:
    """Bytes moved and operations launched while `run` ran."""
    watch = tracker()
    with watch:
        run()
    everything = watch.worked_peaks()[""].work
    return everything.moved, everything.launched


def test_an_operation_reads_its_inputs_and_writes_its_result():
    x, y = torch.ones(256), torch.ones(256)
    assert traffic(lambda: x + y) == (3 * 1024, 1)
    assert traffic(lambda: x.add_(y)) == (3 * 1024, 1), "in place: two are read, one is written"
    assert traffic(lambda: x.zero_()) == (2 * 1024, 1)


def test_a_product_is_launched_and_its_bytes_are_not_counted():
    x = torch.ones(16, 16)
    assert traffic(lambda: x @ x) == (0, 1)


def test_picking_rows_reads_only_those():
    table, places = torch.ones(10_000, 64), torch.zeros(4, dtype=torch.int64)
    assert traffic(lambda: nn.functional.embedding(places, table)) == (2 * 4 * 64 * 4, 1)


@pytest.mark.parametrize(
    "device",
    ["cuda", "cpu"],
)
def test_operations_of_attention_by_hand(device):
    """4 heads of 64 over 100 places: two products of 100 x 64 x 100 each, and five in the backward pass."""

    with CountingStandIn(device, PHASES, 10**9) as stand_in, record_function("train"):
        q, k, v = (torch.randn(1, 4, 100, 64, dtype=torch.bfloat16, device=META, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert stand_in.worked_peaks()["train"].work.flops == 7 * 4 * 2 * 100 * 64 * 100


def test_what_the_host_writes_launches_nothing():
    """A batch is padded on the host and then copied."""
    for on_card, launches in ((False, 0), (True, 2)):
        with CountingStandIn("cuda", PHASES, 10**9) as stand_in:
            rows = torch.zeros(4, 9)
            rows[0].copy_(torch.ones(9))
            if on_card:
                rows.to("meta")[0].copy_(rows[1])
        assert stand_in.worked_peaks()[""].work.launched == launches


def test_operations_of_sequences_of_different_lengths():
    """Every query to the keys of its sequence; where the bounds are not known, as many as the longest has."""
    q, k, v = (torch.empty(n, 4, 40, dtype=torch.bfloat16, device=META, requires_grad=True) for n in (30, 70, 70))
    with CountingStandIn("cuda", PHASES, 10**9) as stand_in, record_function("train"):
        ends, key_ends = (torch.tensor(n, dtype=torch.int32).to(META) for n in ([0, 5, 10, 30], [0, 5, 20, 70]))
        out = torch.ops.aten._flash_attention_forward(q, k, v, ends, key_ends, 20, 50, 0.0, True, False)[0]
        out.backward(torch.empty_like(out))
    assert stand_in.worked_peaks()["train"].work.flops == (4 + 10) * 4 * 40 * (5 * 5 + 5 * 15 + 20 * 50)
    unknown = (q, k, v, torch.zeros(4, device=META), torch.zeros(4, device=META), 20, 50)
    assert work.FLOPS["aten::_flash_attention_forward"](unknown, {}) == 4 * 30 * 4 * 40 * 50
