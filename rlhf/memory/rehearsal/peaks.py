"""What was alive at the peak of each phase, computed from the events of a tracker."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.memory.phases import BEGIN, PAGED, WHOLE, Event, Peak
from rlhf.recipe.choices import COMPONENTS


@dataclass(slots=True)
class Storage:
    """An allocation: where it was made and released, and the component that it is part of, if that is known."""

    bytes: int
    phase: tuple[str, ...]
    in_backward: bool  # allocated in a backward pass
    component: str | None = None
    freed_in: tuple[str, ...] | None = None
    freed_in_backward: bool = False

    def resolved_component(self) -> str:
        """Return the label, or the component that follows from where the storage was allocated and freed."""
        if self.component:
            return self.component
        if self.freed_in_backward and not self.in_backward:
            return "activations"
        return "temporaries" if self.freed_in == self.phase else "buffers"


def peaks_of(events: Sequence[Event], component_of: Sequence[str]) -> dict[str, Peak]:
    """Return the peak of each phase by its name; WHOLE is the whole program.

    Phases are in the order in which they began. `component_of` has the component of each storage by its number.
    Operations are not counted here.
    """
    most: dict[tuple[tuple[str, ...], str], tuple[int, int]] = {}  # phase, operation -> bytes, event
    total = 0
    for position, (index, size, phase, operation) in enumerate(events):
        if index is not None and component_of[index] != PAGED:
            total += size
        if (size > 0 or operation == BEGIN) and total > most.get((phase, operation), (0, 0))[0]:
            most[phase, operation] = total, position
    peak_events = {position: where for where, (_, position) in most.items()}
    live: Counter[str] = Counter()
    peaks: dict[str, Peak] = {WHOLE: Peak()}
    for position, (index, size, phase, _) in enumerate(events):
        if index is not None:
            live[component_of[index]] += size
        else:
            around(peaks, phase)  # phases in the order in which they begin
        if position not in peak_events:
            continue
        components: dict[str, int] = {name: live[name] for name in COMPONENTS if live[name]}
        operation = peak_events[position][1]
        for peak in around(peaks, phase):
            peak.paged = max(peak.paged, live[PAGED])
            if sum(components.values()) > sum(peak.operations.get(operation, {}).values()):
                peak.operations[operation] = components
    return peaks


def around(peaks: dict[str, Peak], phase: tuple[str, ...]) -> list[Peak]:
    """Return the peaks of a phase and of those that it is inside of."""
    return [peaks.setdefault("/".join(phase[:depth]), Peak()) for depth in range(len(phase) + 1)]
