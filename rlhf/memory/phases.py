"""The parts of a prediction: allocation events, the phases of a stage, and the components of a peak."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Self, TypedDict

from rlhf.errors import UserError
from rlhf.files import JsonObject
from rlhf.recipe import PinnedRecipe, StageName

PHASES = ("load", "evaluate", "train", "rollout", "prefill", "decode", "score", "update", "merge")
DEPTHS = (2, 4)  # layers with which a stage is rehearsed
STEPS = 2  # of a rehearsed stage; the second one has optimizer states
DECODING_STEP: Literal["decoding step"] = "decoding step"
RehearsalName = StageName | Literal["decoding step"]  # what is rehearsed: a stage, or one step of sampling
ON_HOST: tuple[StageName, ...] = ("merge",)  # stages that leave the card alone
# The whole stage among the phases of a rehearsal. Names of nested phases are joined by a slash, the outermost first:
# outside all of them there is no name to join.
WHOLE = ""

COMPONENTS = (
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
)
PAGED = "paged"  # the component in unified memory; no peak has it, for it lies outside torch's allocator
WORKSPACE = "workspace"  # of cuBLAS: the component that a predicted peak has besides COMPONENTS


class PredictionError(UserError):
    """A stage cannot be predicted; it may still run."""


class Event(NamedTuple):
    """An allocation (`bytes` > 0), the release of what an earlier event allocated (< 0), or a mark (0).

    `storage` numbers what is allocated or released; None is a mark. `name` is an allocation's operation, or the mark.
    """

    storage: int | None
    bytes: int
    phase: tuple[str, ...]
    name: str


# Marks among the events.
BEGIN = "begin"  # of a phase
PRODUCT = "product"  # the first matrix product of a thread, which makes cuBLAS's workspace
CAPTURE = "capture"  # of a CUDA graph, which first empties the allocator's cache (torch.cuda.graph.__enter__)
CAPTURED = "captured"  # the end of a capture
DROPPED = "dropped"  # no graph is left
PASS = "pass"  # the start or the end of a forward or backward pass; nothing happens in the allocator


@dataclass
class Work:
    """What the operations of a phase compute, move and launch; `+=` adds that of others."""

    flops: int = 0  # all that the device computes
    recomputed: int = 0  # of `flops`, those that a backward pass repeats because it did not keep their results
    moved: int = 0  # bytes that operations other than products read and write
    launched: int = 0  # operations that launch at least one kernel

    def __iadd__(self, other: "Work") -> Self:
        self.flops += other.flops
        self.recomputed += other.recomputed
        self.moved += other.moved
        self.launched += other.launched
        return self

    def __sub__(self, other: "Work") -> "Work":
        return Work(
            self.flops - other.flops,
            self.recomputed - other.recomputed,
            self.moved - other.moved,
            self.launched - other.launched,
        )


class PredictedPhase(NamedTuple):
    """Bytes at the peak of one phase, and what they are; `work` is that of the whole phase.

    `reserved_bytes` and `needed_bytes`: see `Reserved`, without paged states and the driver's context. They are guessed
    from the peak where the events could not be aligned, and None where no card is used.
    """

    peak_bytes: int
    components: dict[str, int]
    paged_bytes: int  # unified memory of paged optimizers, which is not in `peak_bytes`
    work: Work
    reserved_bytes: int | None = None
    needed_bytes: int | None = None


@dataclass
class Peak(Work):
    """The work of a phase, and the components at the peak of each operation: {operation: {component: bytes}}.

    The peak of each operation is kept, because another one may make the phase's peak in a deeper model.
    """

    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    paged: int = 0  # bytes in unified memory, not among the others

    @property
    def bytes(self) -> int:
        """Return the most that was alive at once."""
        return max((sum(components.values()) for components in self.operations.values()), default=0)


class Reserved(NamedTuple):
    """Bytes of one phase."""

    allocated: int  # peak of allocated blocks: torch.cuda.max_memory_allocated
    reserved: int  # peak of what the allocator holds, on a card that is never full: torch.cuda.max_memory_reserved
    needed: int  # of the card: what is held when most is allocated, less what the allocator gives back on a full card


class RehearsedStage(TypedDict):
    """The answer of a rehearsal about a stage.

    `depths` has the peaks of the phases by name at each of DEPTHS; `reserved` is about the recipe's own depth.
    """

    depths: list[dict[str, Peak]]
    reserved: Mapping[str, Reserved] | None  # None if the events of the two depths could not be aligned


def as_json(stage: RehearsedStage) -> JsonObject:
    """Return the answer of a rehearsal about a stage as JSON."""
    depths = [{name: asdict(peak) for name, peak in phases.items()} for phases in stage["depths"]]
    return {"depths": depths, "reserved": stage["reserved"]}


def from_json(content: Mapping[str, Any]) -> RehearsedStage:
    """Return what `as_json` has written."""
    depths = [{name: Peak(**peak) for name, peak in phases.items()} for phases in content["depths"]]
    reserved = content["reserved"]
    phases = None if reserved is None else {name: Reserved(*numbers) for name, numbers in reserved.items()}
    return {"depths": depths, "reserved": phases}


class RehearsedRole(TypedDict):
    """The operations of one decoding step of a role."""

    per_layer: int
    outside: int
    unsafe: list[str]


class RehearsedStep(TypedDict):
    """The answer of a rehearsal about a decoding step."""

    roles: dict[str, RehearsedRole]


class PredictedStage(NamedTuple):
    """What is predicted for a stage as a whole, and for each of its phases."""

    whole: PredictedPhase
    phases: dict[str, PredictedPhase]  # by name, in the order in which they begin


Predict = Callable[[PinnedRecipe, StageName], PredictedStage]


@dataclass(frozen=True)
class StepOperations:
    """Operations of one decoding step, each at least one kernel."""

    per_layer: int
    outside: int  # before, between and after the layers
    total: int
    unsafe: list[str]  # what a captured graph must not hold, with the reason


def gb(size: float, digits: int = 2) -> str:
    """Return a size in bytes as GB of 10^9 bytes; `-` for none."""
    return f"{size / 1e9:.{digits}f}" if size else "-"
