"""The parts of a prediction: the phases of a stage, their peaks and their work."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from peakmem import events
from peakmem.events import Parts
from rlhf.errors import UserError
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import STAGE_TABLE

PHASES = ("load", "evaluate", "train", "rollout", "prefill", "decode", "score", "update", "merge")
PHASES_OF_A_STEP = ("train", "rollout", "score", "update")  # of which a step consists
REHEARSED_STEPS = 2  # of a rehearsed stage; the second one has optimizer states, and its work is what is counted
MOST_REPEATS = 2  # in a rehearsal, of a step's micro-batches or minibatches and of held-out batches
ON_HOST = tuple(stage for stage, row in STAGE_TABLE.items() if row.on_host)  # stages that leave the card alone


@dataclass
class Work:
    """What the operations of a phase compute, move and launch; `+=` adds that of others."""

    flops: int | float = 0  # operations of products; they are counted, and of a whole stage a share of what was counted
    moved: int | float = 0  # bytes that other operations read and write
    launched: int | float = 0  # operations that launch at least one kernel

    def __iadd__(self, other: "Work") -> Self:
        self.flops += other.flops
        self.moved += other.moved
        self.launched += other.launched
        return self

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.flops - other.flops, self.moved - other.moved, self.launched - other.launched)


@dataclass
class Peak(events.Peak):
    """peakmem's peak of a phase, and the phase's work."""

    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class PredictedPhase:
    """Bytes at the peak of one phase, and what they are; `work` is that of the whole phase.

    `needed_bytes` is that of `Reserved`, guessed from the peak where the events could not be aligned, and None where no
    card is used.
    """

    peak_bytes: int
    components: Parts
    paged_bytes: int  # unified memory of paged optimizers, which is not in `peak_bytes`
    work: Work
    needed_bytes: int | None = None


class PredictionError(UserError):
    """A stage cannot be predicted; it may still run."""


class PredictedStage(NamedTuple):
    """What is predicted for a stage as a whole, and for each of its phases."""

    whole: PredictedPhase
    phases: dict[str, PredictedPhase]  # by name, in the order in which they begin


Predict = Callable[[PinnedRecipe, StageName], PredictedStage]
