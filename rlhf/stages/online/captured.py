"""Passes of an update that a card captures as CUDA graphs and replays: the host launches one graph for each.

The host needs longer to launch the thousands of kernels of a micro-batch than a fast card needs to run them
(docs/internals.md). A graph has fixed shapes and addresses. So a micro-batch is joined without padding and filled up to
one of few sizes; there is a graph for each size, role and kind of loss. Forward pass, loss and backward pass read a
batch that stays where it is, into which each micro-batch is copied, and add to gradients that stay where they are. The
host reads no number in between. The optimizer steps outside.

The first micro-batch of a size is computed without a graph; then its pass is captured. The next one is computed both
ways: where the graph gives another gradient or other statistics, updates go on without graphs, and say so. Where its
gradient is small beside the usual one, so that rounding may be most of it, the one after it is compared too. All these
count as computed without.

The first graph is one of the largest micro-batch that the recipe admits. All share its memory, which they keep to the
end of the stage. What CUDA keeps of each comes on top, and is why there are at most `MOST`: sizes that come later are
computed without.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rlhf.data.batch import TrainingBatch
from rlhf.models.lean.filled_sizes import filled_slots, filled_up
from rlhf.models.lean.packed import filled_places, pieces_of, sizes_of
from rlhf.models.shared_base import SharedBase
from rlhf.objectives.losses import Stats
from rlhf.process import distributed
from rlhf.process.cuda import capturing
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.terminal import message_of, say

CAPTURES_BY_DEVICE = {"cpu": False, "cuda": True}
MOST = 48  # graphs: PPO with a critic of its own has as many on rows as long as HH-RLHF's
# Relative difference from a pass without a graph. A wrong address gives about 1. Two passes of a deep model in 16 bits
# may differ by some per cent: a kernel for another shape rounds otherwise, and each layer adds to it.
BOUND = 0.25
USUAL = 0.5  # share of the mean norm so far from which on a gradient is one that can be compared
LEAST_VALUE = 0.1  # statistics are compared relative to themselves, or to this where they are smaller
LAUNCHED_EACH = "hardware.update_graphs: updates launch each kernel"  # without graphs, as it is said
BatchT = TypeVar("BatchT", bound=TrainingBatch)


class Weighted(NamedTuple):
    """Statistics of a micro-batch, each times the same weight, on the device."""

    names: tuple[str, ...]
    values: Tensor  # one of each name


AddGradient = Callable[..., Weighted]  # (micro-batch, what else its loss depends on)


def weighted(stats: Stats, weight: Tensor | float = 1.0) -> Weighted:
    """Return the statistics of a micro-batch times `weight`."""
    return Weighted(tuple(stats), torch.stack([x.detach() for x in stats.values()]) * weight)


class _Graph(NamedTuple):
    """A captured pass."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # that it reads
    parameters: list[nn.Parameter]  # to whose gradients it adds
    result: Weighted  # that it writes

    def replay(self, inputs: Sequence[Tensor]) -> Weighted:
        """Do the same with other inputs; return the result, which the next replay overwrites."""
        for kept, new in zip(self.inputs, inputs, strict=True):
            kept.copy_(new)
        self.graph.replay()
        return self.result


def why_not(shared: SharedBase, options: OnlineOptions) -> str | None:
    """Return why the passes of an update cannot be captured; None if they can."""
    if not CAPTURES_BY_DEVICE[shared.device.type]:
        return "that needs a GPU"
    if shared.lean_trunk is None or not shared.lean_trunk.packs:
        return "rows must be joined without padding, as hardware.trunk: lean does in 16 bits"
    if distributed.world() > 1:
        return "several processes train together"
    return options.differs_in_each_update


def captured_passes(
    shared: SharedBase, options: OnlineOptions, parameters: Sequence[nn.Parameter]
) -> "CapturedPasses | None":
    """Return what captures and replays the passes of updates; None where that cannot be. Say which."""
    if reason := why_not(shared, options):
        say(f"note: {LAUNCHED_EACH}: {reason}")
        return None
    say("updates replay captured graphs")
    return CapturedPasses(shared, options, parameters)


class CapturedPasses:
    """Adds gradients of micro-batches by replaying graphs, or without them from the first on that fails.

    given_up: why there are no graphs any more; None while they work.
    """

    def __init__(self, shared: SharedBase, options: OnlineOptions, parameters: Sequence[nn.Parameter]):
        self.shared, self.options, self.parameters = shared, options, parameters
        self._graphs: dict[Hashable, _Graph] = {}
        self._checked: set[Hashable] = set()
        self._gradients: dict[nn.Parameter, Tensor] = {}  # where the graphs add to
        self._pool: Any = None  # of the first graph
        self._norms: dict[Hashable, list[float]] = {}  # of the gradients computed without, of each kind of pass
        self.given_up: str | None = None

    def __call__(self, add: AddGradient, micro: BatchT, *given: Tensor | Hashable) -> Weighted:
        """Return `add(micro, *given)`, which adds to the gradients of parameters, or replay what it does.

        A graph sees new tensors of `given`. For each other value, and each role, there is another graph; a value that
        `add` takes from elsewhere must never change.
        """
        if self.given_up is not None:
            return add(micro, *given)
        fixed = self._fixed(micro)
        inputs = [*fixed.tensors(), *(x for x in given if isinstance(x, Tensor))]
        assert fixed.rollout.places is not None
        sizes = (fixed.rollout.places.counts, tuple((x.shape, x.dtype) for x in inputs))
        key = (add, self.shared.roles.active, tuple(x for x in given if not isinstance(x, Tensor)), sizes)
        if key not in self._graphs and len(self._graphs) >= MOST:
            return add(micro, *given)
        if key not in self._checked:
            return self._without(key, add, micro, fixed, given, inputs)
        self._attach(self._graphs[key].parameters)
        result = self._graphs[key].replay(inputs)
        return result._replace(values=result.values.clone())

    def _fixed(self, micro: BatchT) -> BatchT:
        """Return a micro-batch in the shapes of a graph; without any yet, in those of the largest micro-batch."""
        lengths, prompt, response = micro.rollout.lengths, self.options.max_prompt_length, self.options.response_length
        pieces, numbers = pieces_of(lengths)
        rows = len(lengths.prompt)
        longest, _ = pieces_of(lengths._replace(prompt=[prompt] * rows, response=[response] * rows))
        slots, sizes, most = micro.rollout.longest_response, sizes_of(pieces), sizes_of(longest)
        if not self._graphs:
            slots, sizes = response, most
        slots = filled_slots(slots, response)
        numbers = nn.functional.pad(numbers, (0, slots - numbers.shape[1]))
        places = filled_places(prompt + response, pieces, numbers, filled_up(sizes, most))
        return micro.padded(prompt + response, slots, places.to(self.shared.device))

    def _without(
        self,
        key: Hashable,
        add: AddGradient,
        micro: BatchT,
        fixed: BatchT,
        given: Sequence[Tensor | Hashable],
        inputs: Sequence[Tensor],
    ) -> Weighted:
        """Compute a micro-batch without a graph; then capture the pass, or compare the graph that there is."""
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        result = add(micro, *given)
        plain = {p: p.grad for p in self.parameters if p.grad is not None}
        for parameter in self.parameters:
            parameter.grad = None
        if plain:  # else there is nothing to add
            try:
                self._attach([*plain])
                norms = self._norms.setdefault((add, self.shared.roles.active), [])
                norms.append(float(nn.utils.get_total_norm(plain.values())))
                if key not in self._graphs:
                    self._graphs[key] = self._capture(add, fixed, given, [*plain])
                elif 0 < USUAL * fmean(norms) <= norms[-1]:
                    self._compare(self._graphs[key].replay(inputs), result, plain)
                    self._checked.add(key)
            except RuntimeError as error:  # among them those of CUDA, and a lack of memory
                self.given_up = message_of(error)
                say(f"note: {LAUNCHED_EACH} from now on: {self.given_up}")
                self._graphs.clear()  # with their memory
        for parameter, old in zip(self.parameters, before, strict=True):
            new = plain.get(parameter)
            parameter.grad = old if new is None else new if old is None else old.add_(new)
        return result

    def _capture(
        self, add: AddGradient, fixed: BatchT, given: Sequence[Tensor | Hashable], parameters: list[nn.Parameter]
    ) -> _Graph:
        """Capture a pass, after one without a graph that does the set-up which a capture must not."""
        trunk, graph = self.shared.role_trunk, torch.cuda.CUDAGraph()
        assert trunk is not None
        kept = [x.clone() if isinstance(x, Tensor) else x for x in given]
        add(fixed, *kept)
        with capturing(graph, shares=True, pool=self._pool), trunk.trunk.casting_anew(trunk.role):
            result = add(fixed, *kept)
        self._pool = self._pool or graph.pool()
        return _Graph(graph, [*fixed.tensors(), *(x for x in kept if isinstance(x, Tensor))], parameters, result)

    def _compare(self, found: Weighted, result: Weighted, plain: Mapping[nn.Parameter, Tensor]) -> None:
        """Raise RuntimeError unless a graph has given the statistics and gradients of a pass without one."""
        of_values = (found.values - result.values).abs() / result.values.abs().clamp(min=LEAST_VALUE)
        differing = nn.utils.get_total_norm([self._gradients[p] - gradient for p, gradient in plain.items()])
        of_gradients = differing / nn.utils.get_total_norm(plain.values()).clamp(min=1e-30)
        parts = torch.stack([of_values.max(), of_gradients])
        if not (difference := float(parts.max())) < BOUND:  # NaN is not
            raise RuntimeError(f"a captured pass differs by {difference:.2g} from one that is not")

    def _attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the gradients of parameters lie where graphs add to them, with the sums that they have so far."""
        new = [p for p in parameters if p.grad is None]
        for parameter in parameters:
            kept = self._gradients.get(parameter)
            if kept is None:
                kept = self._gradients[parameter] = torch.zeros_like(parameter)
            if parameter.grad is not None and parameter.grad is not kept:
                kept.copy_(parameter.grad)
            parameter.grad = kept
        if new:
            torch._foreach_zero_([self._gradients[p] for p in new])
