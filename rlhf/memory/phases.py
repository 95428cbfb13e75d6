"""The parts of a prediction: allocation events, the phases of a stage, and the components of a peak."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config

from rlhf.errors import UserError
from rlhf.recipe import STAGE_TABLE, PinnedRecipe, StageName
from rlhf.recipe.choices import Component

PHASES = ("load", "evaluate", "train", "rollout", "prefill", "decode", "score", "update", "merge")
DEPTHS = (2, 4)  # layers with which a stage is rehearsed
REHEARSED_STEPS = 2  # of a rehearsed stage; the second one has optimizer states
MOST_REPEATS = 2  # in a rehearsal, of a step's micro-batches or minibatches and of held-out batches
DECODING_STEP: Literal["decoding step"] = "decoding step"
UPDATE_PASS: Literal["update pass"] = "update pass"
# What is rehearsed: a stage, one step of sampling, or the two passes of an update.
RehearsalName = StageName | Literal["decoding step", "update pass"]
ON_HOST = tuple(stage for stage, row in STAGE_TABLE.items() if row.on_host)  # stages that leave the card alone
WHOLE = ""  # the whole stage: the empty path; nested phases are joined by a slash, the outermost first

PAGED: Literal["paged"] = "paged"  # in unified memory; no peak has it, for it lies outside torch's allocator
WORKSPACE: Literal["workspace"] = "workspace"  # of cuBLAS; only a predicted peak has it
StorageKind = Component | Literal["paged"]  # what a storage is part of
PeakPart = Component | Literal["workspace"]  # of a predicted peak
Parts = dict[PeakPart, int]  # of a peak, in bytes


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


new_event = tuple.__new__  # makes an Event in half the time; a deep model has hundreds of thousands

# Marks among the events.
BEGIN = "begin"  # of a phase
PRODUCT = "product"  # the first matrix product of a thread, which makes cuBLAS's workspace
CAPTURE = "capture"  # of a CUDA graph, which first empties the allocator's cache on a full card (process/cuda.py)
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


@dataclass
class Peak:
    """The components at the peak of each operation of a phase, {operation: {component: bytes}}, and the phase's work.

    The peak of each operation is kept, because another one may make the phase's peak in a deeper model.
    """

    by_operation: dict[str, Parts] = field(default_factory=dict)
    paged: int = 0  # most bytes in unified memory, not among the others
    work: Work = field(default_factory=Work)

    @property
    def highest(self) -> Parts:
        """Return the components when most was alive at once."""
        return max(self.by_operation.values(), key=lambda parts: sum(parts.values()), default={})

    @property
    def bytes(self) -> int:
        """Return the most that was alive at once."""
        return sum(self.highest.values())


class Reserved(NamedTuple):
    """Bytes of torch's allocator in one phase. Paged states and the driver's context are not among them."""

    allocated: int  # peak of allocated blocks: torch.cuda.max_memory_allocated
    reserved: int  # peak of what the allocator holds, on a card that is never full: torch.cuda.max_memory_reserved
    needed: int  # of the card: what is held when most is allocated, less what the allocator gives back on a full card


ONLY_KNOWN_KEYS = ConfigDict(extra="forbid")  # in a question or an answer as JSON, the peaks and roles in it included


@with_config(ONLY_KNOWN_KEYS)
@dataclass(frozen=True)
class Question:
    """What a rehearsal is asked: which stage, decoding step or pass of an update, of which recipe."""

    recipe: str  # its folder
    overrides: dict[str, Any]  # rlhf.recipe.Changes; pydantic has no form for a recursive alias
    name: RehearsalName
    expandable: bool  # whether the allocator has expandable segments


def _of_the_same_phases(depths: list[dict[str, Peak]]) -> list[dict[str, Peak]]:
    """Return the peaks at each of DEPTHS. Raises ValueError unless all have the same phases and the whole stage."""
    if len(depths) != len(DEPTHS) or any(WHOLE not in peaks or peaks.keys() != depths[0].keys() for peaks in depths):
        raise ValueError(f"not the same phases, with the whole stage, at {len(DEPTHS)} depths")
    return depths


@with_config(ONLY_KNOWN_KEYS)
@dataclass(frozen=True)
class RehearsedStage:
    """The answer of a rehearsal about a stage.

    `depths` has the peaks of the phases by name at each of DEPTHS; the others are about the recipe's own depth.
    """

    depths: Annotated[list[dict[str, Peak]], AfterValidator(_of_the_same_phases)]
    reserved: dict[str, Reserved] | None  # None if the events of the two depths could not be aligned
    highest: dict[str, Parts] = field(default_factory=dict)  # at each phase's peak; of the phases that were repeated


@dataclass(frozen=True)
class RehearsedRole:
    """The operations of one decoding step of a role; a plain layer has no adapters, and None says that none is."""

    per_layer: int
    per_plain_layer: int | None
    outside: int
    unsafe: list[str]


@with_config(ONLY_KNOWN_KEYS)
@dataclass(frozen=True)
class RehearsedStep:
    """The answer of a rehearsal about a decoding step."""

    roles: Annotated[dict[str, RehearsedRole], Field(min_length=1)]


@with_config(ONLY_KNOWN_KEYS)
@dataclass(frozen=True)
class RehearsedPasses:
    """The answer of a rehearsal about an update: operations of a layer by trunk, of its forward and backward pass."""

    per_layer: Annotated[dict[str, dict[str, int]], Field(min_length=1)]


# What reads a question or an answer from JSON, checks it and writes it.
QUESTION_TYPE = TypeAdapter(Question)
STAGE_ANSWER = TypeAdapter(RehearsedStage)
STEP_ANSWER = TypeAdapter(RehearsedStep)
PASSES_ANSWER = TypeAdapter(RehearsedPasses)


class PredictedPhase(NamedTuple):
    """Bytes at the peak of one phase, and what they are; `work` is that of the whole phase.

    `reserved_bytes` and `needed_bytes` are those of `Reserved`, guessed from the peak where the events could not be
    aligned, and None where no card is used.
    """

    peak_bytes: int
    components: Parts
    paged_bytes: int  # unified memory of paged optimizers, which is not in `peak_bytes`
    work: Work
    reserved_bytes: int | None = None
    needed_bytes: int | None = None


class PredictedStage(NamedTuple):
    """What is predicted for a stage as a whole, and for each of its phases."""

    whole: PredictedPhase
    phases: dict[str, PredictedPhase]  # by name, in the order in which they begin


Predict = Callable[[PinnedRecipe, StageName], PredictedStage]


@dataclass(frozen=True)
class StepOperations:
    """Operations of one decoding step, each at least one kernel."""

    per_layer: int  # with adapters
    outside: int  # before, between and after the layers
    total: int
    unsafe: list[str]  # what a captured graph must not hold, with the reason
    per_plain_layer: int | None = None  # without adapters; None if all layers have them
