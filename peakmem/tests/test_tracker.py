"""The tracker on real CPU tensors: bytes that can be worked out by hand, of each kind and in each phase.

Every size below is a multiple of 512 where nothing else is said: 128 float32 numbers, 64 float64 or int64 numbers.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from peakmem.events import Parts, Peak
from peakmem.tracker import Tracker

aten = torch.ops.aten
PHASES = ("load", "train", "rollout", "prefill", "decode")
KB = 1024


def tracker(vocab_size: int = 10**9, **options) -> Tracker:
    return Tracker("cpu", PHASES, vocab_size, **options)


def kilobytes(size: int) -> torch.Tensor:
    return torch.zeros(size * KB // 4)


def parts(peak: Peak) -> Parts:
    """Components at the highest of a phase's peaks."""
    return max(peak.by_operation.values(), key=lambda components: sum(components.values()))


def test_views_share_a_storage_and_copies_do_not():
    with tracker() as found:
        x = kilobytes(8)
        views = [x.view(2, -1), x[5:], x.view(2, -1).T, x.detach(), x.view(torch.int32), x.unsqueeze(0).expand(9, -1)]
        assert found.peaks()[""].bytes == 8 * KB
        clone = x[:256].clone()
    assert found.peaks()[""].bytes == 9 * KB
    del views, clone


# -- phases ----------------------------------------------------------------------------------------------------------


def test_inner_phases_count_towards_outer_ones():
    with tracker() as found:
        base = kilobytes(1)
        with record_function("rollout"):
            with record_function("prefill"):
                x = kilobytes(8)
                del x
            with record_function("decode"):
                y = kilobytes(2)
                del y
        with record_function("train"):
            z = kilobytes(4)
            del z
    peaks = {name: peak.bytes for name, peak in found.peaks().items()}
    expected = {"": 9, "rollout": 9, "rollout/prefill": 9, "rollout/decode": 3, "train": 5}
    assert peaks == {name: size * KB for name, size in expected.items()}
    del base


def test_what_is_alive_when_a_phase_begins_counts_in_it():
    """Also when nothing is made there, and only until it is freed."""
    with tracker() as found:
        with record_function("load"):
            x = kilobytes(8)
        with record_function("decode"):
            pass
        del x
        y = kilobytes(2)
        with record_function("train"):
            z = kilobytes(1)
    peaks = found.peaks()
    assert peaks["decode"].by_operation == {"begin": {"buffers": 8 * KB}}
    assert peaks["train"].bytes == 3 * KB
    del y, z


# -- components --------------------------------------------------------------------------------------------------------


def test_activations_are_made_forward_and_freed_by_the_backward_pass():
    """y = exp(x): the result is what its backward pass needs; the sum needs nothing of its input."""
    x = torch.zeros(2 * KB // 4, requires_grad=True)
    with tracker() as found:
        with record_function("train"):
            loss = x.exp().sum()
            loss.backward()
            del loss
        assert x.grad is not None
    peaks = found.peaks()["train"]
    # exp 2 KB, the loss 512 bytes, the seed of the gradient 512 bytes, exp's gradient 2 KB (sum's is an expanded view)
    assert parts(peaks)["activations"] == 2 * KB
    assert peaks.bytes == 2 * KB + 512 + 512 + 2 * KB


def test_weights_gradients_and_states_of_a_linear_layer():
    """Weight 64 x 128 and bias 64 in float32: 32 KB and 512 bytes. AdamW: two such, and two counters of one block."""
    with tracker() as found:
        with record_function("load"):
            layer = nn.Linear(128, 64)
            optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
        with record_function("train"):
            for _ in range(2):
                layer(torch.zeros(1, 128)).sum().backward()
                optimizer.step()
                with record_function("decode"):
                    pass
                optimizer.zero_grad()
    peaks = found.peaks()
    size = 32 * KB + 512
    assert parts(peaks["load"])["base"] == size
    left = parts(peaks["train/decode"])
    assert left["base"] == size
    assert left["gradients"] == size
    assert left["optimizer"] == 2 * size + 2 * 512


def test_logits_are_known_by_their_vocabulary():
    """Not a vector, not integers, not what is narrower or wider, such as the inside of an MLP."""
    with tracker(1000) as found:
        kept = [torch.zeros(2, 1000), torch.zeros(3, 4, 1000).bfloat16()]
        kept += [torch.zeros(1000), torch.zeros(2, 1000, dtype=torch.int64), torch.zeros(9, 999), torch.zeros(8, 1024)]
    components = parts(found.peaks()[""])
    assert components["logits"] == 8192 + 47 * 512, "8,000 bytes are sixteen blocks, 24,000 are 47"
    assert components["buffers"] == 4096 + 16384 + -(-9 * 999 * 4 // 512) * 512 + 32 * KB
    del kept


# -- kernels and operations --------------------------------------------------------------------------------------------


def test_memory_inside_a_kernel_comes_on_top_while_it_runs():
    """A table says that `mm` takes 1,000 bytes, which are two blocks."""
    asked = []

    def inside(args, kwargs) -> int:
        asked.append([tuple(x.shape) for x in args])
        return 1000

    with tracker(kernels={"aten::mm": inside}) as found:
        a, b = torch.zeros(32, 8), torch.zeros(8, 16)
        with record_function("train"):
            product = a @ b
        with record_function("load"):
            pass
    peaks = found.peaks()
    assert asked == [[(32, 8), (8, 16)]]
    assert peaks["train"].bytes == 1024 + 512 + 2048 + 1024
    assert parts(peaks["train"])["kernels"] == 1024
    assert max(peaks["train"].by_operation, key=lambda o: sum(peaks["train"].by_operation[o].values())) == (
        "aten.mm.default (inside), 1024 bytes"
    )
    assert peaks["load"].bytes == 1024 + 512 + 2048
    del product


# -- afterwards --------------------------------------------------------------------------------------------------------


def test_watching_changes_no_number():
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 16)
    layer(x).pow(2).sum().backward()
    with tracker():
        twin(x).pow(2).sum().backward()
    assert layer.weight.grad is not None and twin.weight.grad is not None
    assert torch.equal(layer.weight.grad, twin.weight.grad)


# -- sums of gradients -------------------------------------------------------------------------------------------------


def sums(events: list[Any]) -> list[int]:
    """Bytes of the storages that additions made."""
    return [e.bytes for e in events if e.bytes > 0 and e.name.startswith("aten.add.Tensor")]


def test_autograd_adds_gradients_in_place():
    """Two uses of y: without a dispatch mode the second gradient is added to the first, and no third one is made."""
    x = kilobytes(4).requires_grad_()
    with tracker() as found:
        y = x.exp()
        loss = (y.sin() * y.cos()).sum()
        del y
        loss.backward()
    assert sums(found.events()) == []
    released = [e.storage for e in found.events() if e.bytes < 0]
    assert len(released) == len(set(released)), "each once"


def test_a_sum_that_python_code_makes_in_a_backward_pass_is_made():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            total = gradient.exp()
            total = total + gradient
            return total

    x = kilobytes(4).requires_grad_()
    with tracker() as found:
        Twice.apply(x).sum().backward()
    assert sums(found.events()) == [4 * KB]
