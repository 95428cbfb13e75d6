"""Events of a deep model from those of two shallow ones, for programs whose events at any depth are known."""

import pytest

from peakmem.depth import deepen
from peakmem.events import BEGIN, Event
from peakmem.replaying import replay
from peakmem.stacks import Stack

MIB = 1 << 20


class Program:
    """Writes down what a program over layers allocates and releases."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sizes: list[int] = []
        self.phase: tuple[str, ...] = ()

    def make(self, name: str, size: int) -> int:
        self.sizes.append(size)
        self.events.append(Event(len(self.sizes) - 1, size, self.phase, f"{name}, {size} bytes"))
        return len(self.sizes) - 1

    def release(self, *storages: int) -> None:
        for storage in storages:
            self.events.append(Event(storage, -self.sizes[storage], self.phase, ""))

    def begin(self, phase: str) -> None:
        self.phase = (phase,)
        self.events.append(Event(None, 0, self.phase, BEGIN))


def training(layers: int, steps: int = 2) -> list[Event]:
    """Weights, then steps.

    A step has a forward pass that keeps two activations a layer, of which the first layer's is smaller, a loss, a
    backward pass in reverse, the gradients' norms as one tensor, and their release in the weights' order.
    """
    program = Program()
    program.begin("load")
    weights = [[program.make("weight", size) for size in (3 * MIB, 5 * MIB)] for _ in range(layers)]
    program.begin("train")
    states: list[int] = []
    for step in range(steps):
        kept = []
        hidden = program.make("embed", 2 * MIB)
        for layer in range(layers):
            wide = program.make("mm", 7 * MIB if layer else 6 * MIB)
            temporary = program.make("silu", 7 * MIB)
            out = program.make("mm", 2 * MIB)
            program.release(temporary)
            kept.append((wide, hidden))
            hidden = out
        logits = program.make("head", 31 * MIB)
        program.release(hidden)
        gradient = program.make("mm", 2 * MIB)
        program.release(logits)
        gradients = []
        for wide, before in reversed(kept):
            inner = program.make("mm", 7 * MIB)
            gradients.append([program.make("grad", size) for size in (3 * MIB, 5 * MIB)])
            program.release(wide, gradient)
            gradient = program.make("mm", 2 * MIB)
            program.release(inner, before)
        program.release(gradient)
        norms = [program.make("norm", 512) for _ in range(2 * layers)]
        stacked = program.make("stack", 4096 * layers)
        program.release(*norms, stacked)
        if not step:
            states = [program.make("state", size) for _ in range(layers) for size in (3 * MIB, 5 * MIB)]
        program.release(*(gradient for pair in reversed(gradients) for gradient in pair))
    program.begin("evaluate")
    program.release(*states, *(weight for pair in weights for weight in pair))
    program.make("last", MIB)
    return program.events


@pytest.mark.parametrize("layers", [6, 8, 32, 80])
def test_events_at_any_even_depth(layers):
    found, real = deepen(training(2), training(4), layers).events, training(layers)
    assert [(e.bytes, e.phase) for e in found] == [(e.bytes, e.phase) for e in real]


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("layers", [6, 24])
def test_what_is_reserved_is_that_of_the_real_depth(layers, expandable):
    """Not linear in depth, so that a line through two depths would not do."""
    found = replay(deepen(training(2), training(4), layers).events, expandable)
    assert found == replay(training(layers), expandable)


def hybrid(layers: int) -> list[Event]:
    """Three layers of one kind and one of another, in periods, forward and back."""
    program = Program()
    program.begin("train")
    kept = [program.make("full" if n % 4 == 3 else "linear", (5 if n % 4 == 3 else 3) * MIB) for n in range(layers)]
    for storage in reversed(kept):
        program.release(program.make("gradient", MIB))
        program.release(storage)
    return program.events


@pytest.mark.parametrize(("layers", "depths"), [(24, (8, 16)), (32, (8, 16)), (20, (4, 12)), (28, (4, 12))])
def test_layers_of_several_kinds_repeat_in_periods(layers, depths):
    assert Stack("Layer", layers, 4).depths == depths
    assert deepen(hybrid(depths[0]), hybrid(depths[1]), layers, depths).events == hybrid(layers)
