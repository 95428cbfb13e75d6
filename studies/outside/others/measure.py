"""A program on the stand-in device, and the peaks of it."""

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peakmem import StandIn, replay
from peakmem.cards import SMALL_WORKSPACE, Gpu

META = torch.device("meta")
TRAIN = "train"  # the phase whose peaks a set publishes, where it is not the whole program

AFTER_STEP = "after a step"  # a mark that a program may set


class Peaks(NamedTuple):
    """Bytes of torch's allocator."""

    allocated: int
    reserved: int
    alive: int  # allocated at the last AFTER_STEP mark, 0 without one


def peaks(program: Callable[[StandIn], None], gpu: Gpu, phase: str = "") -> Peaks:
    """Return the peaks of a program that trains on `META`, in one of its phases or as a whole.

    The program is given the recorder, inside whose `paused()` nothing is counted.
    """
    torch.manual_seed(0)
    gc.collect()
    gc.disable()  # what is released when must not depend on Python's collector
    try:
        recorder = StandIn("cuda", (TRAIN,), 1, gpu)
        with recorder:
            program(recorder)
    finally:
        gc.enable()
    events = recorder.events()
    held = replay(events, expandable=False, workspace=SMALL_WORKSPACE)[phase]
    steps = [number for number, event in enumerate(events) if event.name == AFTER_STEP]
    alive = sum(event.bytes for event in events[: steps[-1]]) + 2 * SMALL_WORKSPACE if steps else 0
    return Peaks(held.allocated, held.reserved, alive)


def to_card(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Allocate each weight and buffer of a model by itself, tied ones once, as Module.to does; `dtype` of floats."""
    moved: dict[int, Tensor] = {}

    def on_card(x: Tensor) -> Tensor:
        if id(x) not in moved:
            kind = dtype if dtype and x.is_floating_point() else x.dtype
            moved[id(x)] = torch.empty(x.shape, dtype=kind, device=META)
        return moved[id(x)]

    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if weight.device == META:
                weight.data = on_card(weight)
            else:  # an adapter's, which its library leaves on the CPU
                module._parameters[name] = nn.Parameter(on_card(weight), weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = on_card(buffer)


def numbers(*shape: int) -> Tensor:
    """Return whole numbers on the card: tokens, classes."""
    return torch.ones(shape, dtype=torch.int64).to(META)
