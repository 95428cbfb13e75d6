"""What a run leaves behind: its allocations and releases in order, and what was alive at the peaks of its phases.

All sizes are bytes. A phase's name is a path: nested phases are joined by a slash, the outermost first, and `WHOLE` is
the whole run.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

# What a peak consists of.
Component = Literal[
    "base",  # the model's own weights and buffers
    "quantization",  # scales and code book beside packed weights
    "adapters",
    "heads",
    "gradients",
    "optimizer",
    "activations",  # made in a forward pass and freed in its backward pass
    "logits",
    "kv_cache",
    "buffers",  # what one phase leaves for another
    "temporaries",
    "kernels",  # inside kernels
]
COMPONENTS: tuple[Component, ...] = get_args(Component)
PAGED: Literal["paged"] = "paged"  # in unified memory; no peak has it, for it lies outside torch's allocator
WORKSPACE: Literal["workspace"] = "workspace"  # of cuBLAS; only a predicted peak has it
StorageKind = Component | Literal["paged"]  # what a storage is part of
PeakPart = Component | Literal["workspace"]  # of a predicted peak
Parts = dict[PeakPart, int]  # of a peak, in bytes

WHOLE = ""  # the empty path
DEPTHS = (2, 4)  # layers of the shallow runs from which a deep one is predicted


class Event(NamedTuple):
    """An allocation (`bytes` > 0), the release of what an earlier event allocated (< 0), or a mark (0).

    `storage` numbers what is allocated or released; None is a mark. `name` is an allocation's operation, or the mark.
    """

    storage: int | None
    bytes: int
    phase: tuple[str, ...]
    name: str


new_event = tuple.__new__  # makes an Event in half the time; a deep model has hundreds of thousands

# Marks among the events.
BEGIN = "begin"  # of a phase
PRODUCT = "product"  # the first matrix product of a thread, which makes cuBLAS's workspace
CAPTURE = "capture"  # of a CUDA graph, which may first empty the allocator's cache
CAPTURED = "captured"  # the end of a capture
DROPPED = "dropped"  # no graph is left
EMPTIED = "emptied"  # the allocator's cache, by the program
PASS = "pass"  # the start or the end of a forward or backward pass; nothing happens in the allocator


@dataclass
class Peak:
    """The components at the peak of each operation of a phase, {operation: {component: bytes}}.

    The peak of each operation is kept, because another one may make the phase's peak in a deeper model.
    """

    by_operation: dict[str, Parts] = field(default_factory=dict)
    paged: int = 0  # most bytes in unified memory, not among the others

    @property
    def highest(self) -> Parts:
        """Return the components when most was alive at once."""
        return max(self.by_operation.values(), key=lambda parts: sum(parts.values()), default={})

    @property
    def bytes(self) -> int:
        """Return the most that was alive at once."""
        return sum(self.highest.values())


@dataclass(slots=True)
class Storage:
    """An allocation: where it was made and released, and the component that it is part of, if that is known."""

    bytes: int
    phase: tuple[str, ...]
    in_backward: bool  # allocated in a backward pass
    component: StorageKind | None = None
    freed_in: tuple[str, ...] | None = None
    freed_in_backward: bool = False

    def resolved_component(self) -> StorageKind:
        """Return the label, or the component that follows from where the storage was allocated and freed."""
        if self.component:
            return self.component
        if self.freed_in_backward and not self.in_backward:
            return "activations"
        return "temporaries" if self.freed_in == self.phase else "buffers"


class Reserved(NamedTuple):
    """Bytes of torch's allocator in one phase. Paged states and the driver's context are not among them."""

    allocated: int  # peak of allocated blocks: torch.cuda.max_memory_allocated
    reserved: int  # peak of what the allocator holds, on a card that is never full: torch.cuda.max_memory_reserved
    needed: int  # of the card: what is held when most is allocated, less what the allocator gives back on a full card


class NotPredicted(Exception):
    """A run cannot be followed or extrapolated; the message is one line that says what stands in the way."""

    kind, code = "refused", 3  # the command's exit code


class ProgramFailed(NotPredicted):
    """The program ends with an error of its own."""

    kind, code = "failed", 4


class Crashed(NotPredicted):
    """This package is at fault."""

    kind, code = "crashed", 5
