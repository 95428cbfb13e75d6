"""Runs a recipe's stages on a stand-in for its device, with random weights and the longest dialogues it admits.

`python -m rlhf.memory.rehearse` runs as a separate process, so that patches and stand-ins end with it. It reads
{"recipe": DIR, "overrides": {…}, "stage": NAME, "expandable": BOOL} from each line of its input and writes
{"result": {"depths": [{phase: peak}, …], "reserved": {phase: [bytes, …]}}}, or {"error": MESSAGE}: peaks at each of
DEPTHS, and for a card what the allocator reserves at the recipe's depth. For the stage DECODING_STEP it writes
{"result": {"roles": {role: operations}}}.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.memory import cards
from rlhf.memory.depth import NotAligned, deepen
from rlhf.memory.phases import (
    DECODING_STEP,
    DEPTHS,
    ON_HOST,
    PHASES,
    Event,
    Peak,
    RehearsedRole,
    RehearsedStage,
    Reserved,
    as_json,
)
from rlhf.memory.replay import replay
from rlhf.memory.seams import shortened
from rlhf.memory.short_runs import RunStage, ShortRun, ShortRuns
from rlhf.process.libraries import import_bitsandbytes
from rlhf.recipe import PinnedRecipe, Recipe, StageName

if TYPE_CHECKING:
    from rlhf.memory.device import StandIn


class Rehearsals(ShortRuns[Peak]):
    """Rehearses stages on the stand-in device. `events` are those of the last one.

    Stages that a stage builds on are not run: their adapters are made, in the recipe's shape.
    """

    def __init__(self, layers: int | None):
        super().__init__(layers)
        self.events: list[Event] = []

    def measure(self, recipe: Recipe, run_stage: RunStage) -> dict[str, Peak]:
        """Run a stage on the stand-in device and keep its events."""
        from rlhf.memory.operations import META

        with self._device(recipe) as stand_in:
            run_stage(META)
        self.events = stand_in.events()
        return stand_in.peaks()

    def make_parents(self, changed: PinnedRecipe, stages: Sequence[StageName], folder: Path) -> None:
        """Write adapters of the recipe's shape."""
        from rlhf.memory.adapters import write_adapters  # imports torch

        with self._device(changed.recipe):
            write_adapters(ShortRun(folder, changed, stages[0]), stages)

    def _device(self, recipe: Recipe) -> "StandIn":
        from rlhf.memory.device import StandIn

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
        return {"depths": peaks, "reserved": reserved}


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


def _operations(loaded: PinnedRecipe) -> dict[str, RehearsedRole]:
    """Return the operations of a decoding step of each role: in one layer, outside the layers, and what no graph may
    hold.
    """
    from rlhf.memory.decode_step import decoding_steps

    return {
        role: {
            "per_layer": len(step.per_layer),
            "outside": len(step.outside),
            "unsafe": [f"{operation.name} {operation.unsafe}" for operation in step.unsafe],
        }
        for role, step in decoding_steps(loaded).items()
    }


def main() -> None:
    """Answer requests, one JSON object a line, until there are no more."""
    gc.disable()  # collections take a tenth of the time; what is predicted is the same with them
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints shall not stand between the answers
    from rlhf.process.libraries import quiet_libraries

    with quiet_libraries():
        import_bitsandbytes()
    with quiet_libraries(), shortened():
        rehearse = RehearsalsAtDepths()
        for line in sys.stdin:
            request = json.loads(line)
            answer: dict[str, object]
            try:
                loaded = recipes.load(Path(request["recipe"]), request["overrides"])
                if request["stage"] == DECODING_STEP:
                    answer = {"result": {"roles": _operations(loaded)}}
                else:
                    answer = {"result": as_json(rehearse(loaded, request["stage"], request["expandable"]))}
            except Exception as error:
                traceback.print_exc()
                ours = isinstance(error, UserError)  # a sentence for people, complete by itself
                answer = {"error": str(error) if ours else f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
