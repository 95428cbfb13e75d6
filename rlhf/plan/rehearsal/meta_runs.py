"""Runs stages on a stand-in for the recipe's device: tensors without data, random weights, the longest dialogues."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from peakmem import NotPredicted, cards, deepen, events, highest_at_depth, replay
from peakmem.events import DEPTHS, Event, Parts, Reserved
from rlhf.models.adapters import SCORE_WEIGHT, new_adapter, save_adapter
from rlhf.models.loading import load_base
from rlhf.plan.hardware import gpu_of
from rlhf.plan.phases import ON_HOST, PHASES, Peak, PredictedStage
from rlhf.plan.rehearsal.lines import stage_at_depth
from rlhf.plan.rehearsal.paths import patches
from rlhf.plan.rehearsal.short_runs import ShortRun, ShortRuns, StageFn
from rlhf.plan.rehearsal.work import CountingStandIn
from rlhf.plan.weights import shape_of
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.stages import REWARD_MODELS, TRAINING_STAGES
from rlhf.rollout.graphs import EMPTIED_EVERY
from rlhf.run.layout import ADAPTER, ADAPTER_FILE, SUMMARY

META = torch.device("meta")


class Rehearsals(ShortRuns[Peak]):
    """Rehearses stages on the stand-in device. `events` are those of the last one, `components` of their storages.

    Stages that a stage builds on are not run: their adapters are made, in the recipe's shape.
    """

    def __init__(self, layers: int | None):
        super().__init__(layers)
        self.events: list[Event] = []
        self.components: list[events.StorageKind] = []

    def measure(self, recipe: Recipe, run_stage: StageFn) -> dict[str, Peak]:
        """Run a stage on the stand-in device and keep its events."""
        with stand_in_of(recipe) as stand_in:
            run_stage(META)
        self.events, self.components = stand_in.events(), stand_in.components()
        return stand_in.worked_peaks()

    def make_parents(self, changed: PinnedRecipe, stages: Sequence[StageName], folder: Path) -> None:
        """Write a new adapter of the recipe's shape as the result of each stage. A reward model's has a head."""
        run = ShortRun(folder, changed, stages[0])
        with stand_in_of(changed.recipe):
            model = new_adapter(load_base(run.base, META), changed.recipe.lora)
            for stage in stages:
                adapter = run.run_directory / stage / ADAPTER
                save_adapter(model, run.base.model.revision, adapter)
                if stage in REWARD_MODELS:
                    file = adapter / ADAPTER_FILE
                    head = torch.zeros(1, model.config.hidden_size)
                    save_file(load_file(file) | {SCORE_WEIGHT: head}, file, {"format": "pt"})
                (run.run_directory / stage / SUMMARY).write_text("{}")


def stand_in_of(recipe: Recipe) -> CountingStandIn:
    """Return the device that is stood in for where this recipe, which has an architecture, is rehearsed."""
    architecture, hardware = recipe.model.architecture, recipe.hardware
    assert architecture and architecture.vocab_size
    gpu = gpu_of(hardware.name)
    return CountingStandIn(hardware.device, PHASES, architecture.vocab_size, gpu, patches)


class RehearsalsAtDepths:
    """Rehearses stages at each of DEPTHS, and predicts them at the recipe's own depth."""

    def __init__(self) -> None:
        self.depths = [Rehearsals(layers) for layers in DEPTHS]

    def __call__(self, loaded: PinnedRecipe, stage: StageName, expandable: bool) -> PredictedStage:
        """Return what a stage is predicted to need: on a card, of the events of all layers in its allocator."""
        recipe, (shallow, deeper) = loaded.recipe, self.depths
        low, high = shallow(loaded, stage), deeper(loaded, stage)
        layers = shape_of(recipe).num_hidden_layers
        reserved: dict[str, Reserved] | None = {}
        repeated: dict[str, Parts] = {}
        if recipe.hardware.device == "cuda" and stage not in ON_HOST:
            try:
                deep = deepen(shallow.events, deeper.events, layers)
            except NotPredicted:
                reserved = None
            else:
                reserved = with_captures(deep.events, expandable, cards.workspace(gpu_of(recipe.hardware.name)))
                repeated = highest_at_depth(deep, layers, deeper.components)
        return stage_at_depth(low, high, layers, partial(workspaces, recipe, stage), reserved, repeated)


def workspaces(recipe: Recipe, stage: StageName, phase: str) -> int:
    """Return the bytes of cuBLAS's workspaces on the recipe's card in a phase of a stage.

    The program's own thread has one and autograd's thread another. A phase that decodes has a third, of the stream on
    which a decoding step is captured; it lies in the graph's memory and goes with it.
    """
    if recipe.hardware.device != "cuda" or stage in ON_HOST:
        return 0
    threads = 2 if stage in TRAINING_STAGES else 1
    return (threads + phase.endswith("decode")) * cards.workspace(gpu_of(recipe.hardware.name))


def with_captures(made: Sequence[Event], expandable: bool, workspace: int = 0) -> dict[str, Reserved]:
    """Return what `replay` returns for a card with room; `needed` is that of a full card.

    The latter empties its cache before each capture of a graph.
    """
    reserved = replay(made, expandable, workspace, emptied_every=EMPTIED_EVERY)
    if not any(event.name == events.CAPTURE for event in made):
        return reserved
    full = replay(made, expandable, workspace, emptied_every=1)
    return {name: found._replace(needed=min(full[name].needed, found.reserved)) for name, found in reserved.items()}
