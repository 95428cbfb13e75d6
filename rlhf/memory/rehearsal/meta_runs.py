"""Runs stages on a stand-in for the recipe's device: tensors without data, random weights, the longest dialogues."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.memory.card import cards
from rlhf.memory.card.replay import replay
from rlhf.memory.phases import (
    DEPTHS,
    ON_HOST,
    PHASES,
    Event,
    Peak,
    RehearsedStage,
    Reserved,
)
from rlhf.memory.rehearsal.depth import NotAligned, deepen
from rlhf.memory.rehearsal.short_runs import ShortRun, ShortRuns, StageFn
from rlhf.recipe import PinnedRecipe, Recipe, StageName

if TYPE_CHECKING:
    from rlhf.memory.rehearsal.device import StandIn


class Rehearsals(ShortRuns[Peak]):
    """Rehearses stages on the stand-in device. `events` are those of the last one.

    Stages that a stage builds on are not run: their adapters are made, in the recipe's shape.
    """

    def __init__(self, layers: int | None):
        super().__init__(layers)
        self.events: list[Event] = []

    def measure(self, recipe: Recipe, run_stage: StageFn) -> dict[str, Peak]:
        """Run a stage on the stand-in device and keep its events."""
        from rlhf.memory.rehearsal.operations import META

        with self._device(recipe) as stand_in:
            run_stage(META)
        self.events = stand_in.events()
        return stand_in.peaks()

    def make_parents(self, changed: PinnedRecipe, stages: Sequence[StageName], folder: Path) -> None:
        """Write adapters of the recipe's shape."""
        from rlhf.memory.rehearsal.adapters import write_adapters  # imports torch

        with self._device(changed.recipe):
            write_adapters(ShortRun(folder, changed, stages[0]), stages)

    def _device(self, recipe: Recipe) -> "StandIn":
        from rlhf.memory.rehearsal.device import StandIn

        architecture, hardware = recipe.model.architecture, recipe.hardware
        assert architecture and architecture.vocab_size
        return StandIn(hardware.device, PHASES, architecture.vocab_size, cards.gpu_of(hardware.name))


class RehearsalsAtDepths:
    """Rehearses stages at each of DEPTHS, and replays what the allocator is asked for at the recipe's own depth."""

    def __init__(self) -> None:
        self.depths = [Rehearsals(layers) for layers in DEPTHS]

    def __call__(self, loaded: PinnedRecipe, stage: StageName, expandable: bool) -> RehearsedStage:
        """Return the peaks of a stage at each depth, and the reserved bytes of each phase at the recipe's depth."""
        peaks, events = [], []
        for rehearse in self.depths:
            peaks.append(rehearse(loaded, stage))
            events.append(rehearse.events)
        reserved = reserved_at_depth(events, loaded.recipe, stage, expandable)
        return RehearsedStage(peaks, reserved)


def reserved_at_depth(
    events: Sequence[list[Event]], recipe: Recipe, stage: StageName, expandable: bool
) -> dict[str, Reserved] | None:
    """Return the reserved bytes of each phase at the recipe's depth, from a stage's events at each of DEPTHS.

    They are empty if the stage uses no card, and None if the events of the two depths cannot be aligned.
    """
    hardware, architecture = recipe.hardware, recipe.model.architecture
    if hardware.device != "cuda" or stage in ON_HOST or not architecture:
        return {}
    shallow, deeper = events
    try:
        deep = deepen(shallow, deeper, architecture.num_hidden_layers)
    except NotAligned:
        return None
    return replay(deep, expandable, cards.workspace(hardware.name))
