"""Runs stages on a stand-in for the recipe's device: tensors without data, random weights, the longest dialogues."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.memory.card import cards
from rlhf.memory.card.replay import with_captures
from rlhf.memory.phases import (
    DEPTHS,
    ON_HOST,
    Event,
    Parts,
    Peak,
    RehearsedStage,
    StorageKind,
)
from rlhf.memory.rehearsal.depth import Deep, NotAligned, deepen
from rlhf.memory.rehearsal.peaks import peaks_of
from rlhf.memory.rehearsal.short_runs import ShortRun, ShortRuns, StageFn
from rlhf.recipe import PinnedRecipe, Recipe, StageName

if TYPE_CHECKING:
    from rlhf.memory.rehearsal.device import StandIn


class Rehearsals(ShortRuns[Peak]):
    """Rehearses stages on the stand-in device. `events` are those of the last one, `components` of their storages.

    Stages that a stage builds on are not run: their adapters are made, in the recipe's shape.
    """

    def __init__(self, layers: int | None):
        super().__init__(layers)
        self.events: list[Event] = []
        self.components: list[StorageKind] = []

    def measure(self, recipe: Recipe, run_stage: StageFn) -> dict[str, Peak]:
        """Run a stage on the stand-in device and keep its events."""
        from rlhf.memory.rehearsal.operations import META

        with self._device(recipe) as stand_in:
            run_stage(META)
        self.events, self.components = stand_in.events(), stand_in.components()
        return stand_in.peaks()

    def make_parents(self, changed: PinnedRecipe, stages: Sequence[StageName], folder: Path) -> None:
        """Write adapters of the recipe's shape."""
        from rlhf.memory.rehearsal.adapters import write_adapters  # imports torch

        with self._device(changed.recipe):
            write_adapters(ShortRun(folder, changed, stages[0]), stages)

    def _device(self, recipe: Recipe) -> "StandIn":
        from rlhf.memory.rehearsal.device import stand_in_of  # imports torch

        return stand_in_of(recipe)


class RehearsalsAtDepths:
    """Rehearses stages at each of DEPTHS, and repeats the layers' events for the recipe's own depth."""

    def __init__(self) -> None:
        self.depths = [Rehearsals(layers) for layers in DEPTHS]

    def __call__(self, loaded: PinnedRecipe, stage: StageName, expandable: bool) -> RehearsedStage:
        """Return the peaks of a stage at each depth, and the peak and reserved bytes of each phase at the recipe's."""
        peaks = [rehearse(loaded, stage) for rehearse in self.depths]
        hardware, architecture = loaded.recipe.hardware, loaded.recipe.model.architecture
        if hardware.device != "cuda" or stage in ON_HOST or not architecture:
            return RehearsedStage(peaks, {})
        shallow, deeper = self.depths
        layers = architecture.num_hidden_layers
        try:
            deep = deepen(shallow.events, deeper.events, layers)
        except NotAligned:
            return RehearsedStage(peaks, None)
        reserved = with_captures(deep.events, expandable, cards.workspace(hardware.name))
        return RehearsedStage(peaks, reserved, highest_at_depth(deep, layers, deeper.components))


def highest_at_depth(deep: Deep, layers: int, component_of: Sequence[StorageKind]) -> dict[str, Parts]:
    """Return the components at the peak of each phase, from repeated events, by the components of their sources.

    They are empty where nothing was repeated, and for an odd number of layers, whose events are those of one more.
    """
    if layers <= DEPTHS[-1] or layers % 2:
        return {}
    peaks = peaks_of(deep.events, [component_of[source] for source in deep.sources])
    return {name: peak.highest for name, peak in peaks.items()}
