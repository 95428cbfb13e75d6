"""What was alive at the peak of each phase, computed from the events of a tracker."""

from collections import Counter
from collections.abc import Sequence

from peakmem.events import BEGIN, COMPONENTS, PAGED, WHOLE, Event, Parts, Peak, StorageKind


def peaks_of(events: Sequence[Event], component_of: Sequence[StorageKind]) -> dict[str, Peak]:
    """Return the peak of each phase by its name; WHOLE is the whole program.

    Phases are in the order in which they began. `component_of` has the component of each storage by its number.
    """
    operations_at_peak = _operations_at_peak(events, component_of)
    live: Counter[StorageKind] = Counter()
    peaks: dict[str, Peak] = {WHOLE: Peak()}
    for position, (storage, size, phase, _) in enumerate(events):
        if storage is not None:
            live[component_of[storage]] += size
        if storage is None or component_of[storage] == PAGED:
            for peak in around(peaks, phase):  # a mark makes phases, in the order in which they begin
                peak.paged = max(peak.paged, live[PAGED])
        operation = operations_at_peak.get(position)
        if operation is None:
            continue
        components: Parts = {name: live[name] for name in COMPONENTS if live[name]}
        for peak in around(peaks, phase):
            if sum(components.values()) > sum(peak.by_operation.get(operation, {}).values()):
                peak.by_operation[operation] = components
    return peaks


def _operations_at_peak(events: Sequence[Event], component_of: Sequence[StorageKind]) -> dict[int, str]:
    """Return the events at which an operation has most bytes in a phase: {position: operation}."""
    most: dict[tuple[tuple[str, ...], str], tuple[int, int]] = {}  # phase, operation -> bytes, position
    total = 0
    for position, (storage, size, phase, operation) in enumerate(events):
        if storage is not None and component_of[storage] != PAGED:
            total += size
        if (size > 0 or operation == BEGIN) and total > most.get((phase, operation), (0, 0))[0]:
            most[phase, operation] = total, position
    return {position: operation for (_, operation), (_, position) in most.items()}


def around(peaks: dict[str, Peak], phase: tuple[str, ...]) -> list[Peak]:
    """Return the peaks of a phase and of those that it is inside of."""
    return [peaks.setdefault("/".join(phase[:depth]), Peak()) for depth in range(len(phase) + 1)]
