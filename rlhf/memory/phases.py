"""The parts of a prediction: allocation events, the phases of a stage, and the components of a peak."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

from rlhf.errors import UserError
from rlhf.recipe import StageName

PHASES = ("load", "evaluate", "train", "rollout", "prefill", "decode", "score", "update", "merge")
DEPTHS = (2, 4)  # layers with which a stage is rehearsed
STEPS = 2  # of a rehearsed stage; the second one has optimizer states
DECODING_STEP: Literal["decoding step"] = "decoding step"
Rehearsed = StageName | Literal["decoding step"]
ON_HOST: tuple[StageName, ...] = ("merge",)  # stages that leave the card alone

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


class PredictedPhase(NamedTuple):
    """Bytes at the peak of one phase, and what they are; operations are counted over the whole phase.

    `reserved_bytes` and `needed_bytes` as in rlhf/memory/replay.py, without paged states and the driver's context; None
    where nothing was replayed.
    """

    peak_bytes: int
    components: dict[str, int]
    paged_bytes: int  # unified memory of paged optimizers, which is not in `peak_bytes`
    flops: int  # all that the card computes
    recomputed: int = 0  # of `flops`, those that a backward pass repeats because it did not keep their results
    moved: int = 0  # bytes that operations other than products read and write
    launched: int = 0  # operations that launch at least one kernel
    reserved_bytes: int | None = None
    needed_bytes: int | None = None


class RehearsedPhase(TypedDict):
    """A `Peak` of rlhf/memory/peaks.py as JSON."""

    operations: dict[str, dict[str, int]]
    paged: int
    flops: int
    recomputed: int
    moved: int
    launched: int


class RehearsedStage(TypedDict):
    """The answer of a rehearsal about a stage.

    `depths` has the phases by name at each of DEPTHS; `reserved` has the three numbers of a `Reserved` for each phase.
    """

    depths: list[dict[str, RehearsedPhase]]
    reserved: dict[str, list[int]] | None  # None if the events of the two depths could not be aligned


class RehearsedRole(TypedDict):
    """The operations of one decoding step of a role."""

    per_layer: int
    outside: int
    unsafe: list[str]


class RehearsedStep(TypedDict):
    """The answer of a rehearsal about a decoding step."""

    roles: dict[str, RehearsedRole]


PredictedStage = dict[str, PredictedPhase]  # by the phase's name; the first one, "", is the whole stage


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
