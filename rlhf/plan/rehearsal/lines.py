"""Peaks at any number of layers, from those of two shallow runs.

Every layer of a decoder is alike. What a phase holds at its peak therefore grows linearly with their number as long as
the same moment makes the peak. At other depths another moment may be higher, even of the same operation, so that a line
can be too low. peakmem/depth.py repeats a layer's events, which finds that peak, and what the allocator reserves.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from peakmem.events import COMPONENTS, DEPTHS, WHOLE, WORKSPACE, Parts, Reserved
from rlhf.plan.phases import Peak, PredictedPhase, PredictedStage, Work

FRAGMENTATION = 0.15  # reserved over allocated where nothing can be replayed; the recipes' stages have at most 0.12


def stage_at_depth(
    shallow: Mapping[str, Peak],
    deeper: Mapping[str, Peak],
    layers: int,
    workspace: Callable[[str], int],
    reserved: Mapping[str, Reserved] | None,
    repeated: Mapping[str, Parts],
) -> PredictedStage:
    """Return a stage at `layers` layers from its phases' peaks at both depths; `workspace` and the others are by phase.

    `reserved` is what the allocator needs for the repeated events: None where they could not be aligned, which is then
    guessed, and without phases where no card is used.
    """

    def with_needed(name: str, phase: PredictedPhase) -> PredictedPhase:
        if reserved is None:
            return replace(phase, needed_bytes=round(phase.peak_bytes * (1 + FRAGMENTATION)))
        if name not in reserved:
            return phase
        # A peak has the workspaces from the start; the allocator is asked for them by the first product.
        return replace(phase, needed_bytes=max(reserved[name].needed, phase.peak_bytes))

    extrapolated = {n: at_depth(shallow[n], deeper[n], layers, workspace(n), repeated.get(n)) for n in shallow}
    phases = {name: with_needed(name, phase) for name, phase in with_inner(extrapolated).items()}
    whole = phases.pop(WHOLE)
    # A stage needs what its neediest phase does. The replay of all events together may add the margin of a full card
    # (TIGHT) to a phase that never reserves so much.
    if needed := [phase.needed_bytes for phase in phases.values() if phase.needed_bytes is not None]:
        whole = replace(whole, needed_bytes=max(whole.peak_bytes, *needed))
    return PredictedStage(whole, phases)


def at_depth(shallow: Peak, deeper: Peak, layers: int, workspace: int, repeated: Parts | None = None) -> PredictedPhase:
    """Return the peak of a phase at `layers` layers, from its peaks at both depths.

    A line is drawn through the peaks of each operation; the phase's peak is the highest of them at `layers`, or that of
    the `repeated` events (`highest_at_depth`) if it is higher. The bytes of cuBLAS's `workspace` are added.
    """
    low, high = DEPTHS

    def line(a: int, b: int) -> int:
        return round(a + (b - a) * (layers - low) / (high - low))

    highest, components = -1, {}
    for operation in {**shallow.by_operation, **deeper.by_operation}:
        a, b = shallow.by_operation.get(operation), deeper.by_operation.get(operation)
        if (a is None and layers < high) or (b is None and layers > low):
            continue  # there at the other depth only
        a, b = a or b or {}, b or a or {}
        total = line(sum(a.values()), sum(b.values()))
        if total > highest:
            highest, components = total, {name: line(a.get(name, 0), b.get(name, 0)) for name in {**a, **b}}
    if repeated and sum(repeated.values()) > highest:
        highest, components = sum(repeated.values()), repeated
    components = _without_negative(components, highest) | {WORKSPACE: workspace}
    return PredictedPhase(
        sum(components.values()),
        {name: components[name] for name in (*COMPONENTS, WORKSPACE) if components.get(name)},
        line(shallow.paged, deeper.paged),
        Work(*(line(getattr(shallow.work, part.name), getattr(deeper.work, part.name)) for part in fields(Work))),
    )


def _without_negative(components: Parts, total: int) -> Parts:
    """Return the components of a peak without negative sizes; they add up to `total`, which is not negative.

    A component's line may fall below zero if the peak was made at different moments at the two depths. The surplus of
    the others is then subtracted from the largest ones. What rounding has lost is added to the largest.
    """
    positive = {name: max(0, size) for name, size in components.items()}
    surplus = sum(positive.values()) - total
    for name in sorted(positive, key=positive.__getitem__, reverse=True):
        part = min(positive[name], surplus)
        positive[name] -= part
        surplus -= part
    return positive


def with_inner(phases: Mapping[str, PredictedPhase]) -> dict[str, PredictedPhase]:
    """Raise the peak of each phase, and of WHOLE, to at least those of the phases inside it.

    At depth another operation may make the peak.
    """
    raised = {}
    for name, phase in phases.items():
        inner = [p for n, p in phases.items() if name == WHOLE or n.startswith(f"{name}/")]
        highest = max((phase, *inner), key=lambda p: p.peak_bytes)
        raised[name] = replace(phase, peak_bytes=highest.peak_bytes, components=highest.components)
    return raised
