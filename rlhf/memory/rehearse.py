"""Runs a recipe's stages on a stand-in for its device, with random weights and the longest dialogues it admits.

`python -m rlhf.memory.rehearse` runs as a separate process, with which patches and stand-ins end. It reads
{"recipe": DIR, "overrides": {…}, "stage": NAME, "expandable": BOOL} from each line of its input and writes
{"result": {"depths": [{phase: peak}, …], "reserved": {phase: [bytes, …]}}}, or {"error": MESSAGE}: peaks at each of
DEPTHS, and for a card what the allocator reserves at the recipe's depth. For the stage DECODING_STEP it writes
{"result": {"roles": {role: operations}}}.
"""

import gc
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.memory import cards
from rlhf.memory.depth import deepen
from rlhf.memory.phases import DECODING_STEP, DEPTHS, ON_HOST, STEPS, Event, RehearsedRole
from rlhf.memory.replay import Reserved, replay
from rlhf.memory.seams import shortened
from rlhf.process.libraries import import_bitsandbytes
from rlhf.recipe import Architecture, Changes, PinnedRecipe, Recipe, StageName
from rlhf.recipe.choices import LengthsShape
from rlhf.run.directory import Run
from rlhf.stages.runner import import_stage

if TYPE_CHECKING:
    import torch

    from rlhf.memory.device import StandIn

PHASES = ("load", "evaluate", "train", "rollout", "prefill", "decode", "score", "update", "merge")
MOST_ROWS = 8192  # of dialogues that are made for a few steps


def settings(recipe: Recipe, layers: int | None) -> Changes:
    """Return the overrides of a rehearsal.

    They change only the number of layers among the settings that decide a step's memory.
    """
    architecture = recipe.model.architecture
    assert architecture
    if recipe.lora.layers not in ("all", "upper_half"):  # of 2 and 4 layers, only a half grows with the depth
        raise UserError("memory is predicted for lora.layers: all and upper_half only")
    _check_depth(architecture)
    changes = few_steps(recipe, STEPS, "longest") | {
        "model.attention": "sdpa" if recipe.model.attention == "flash_attention_2" else recipe.model.attention,
        **_shallow(architecture, layers or architecture.num_hidden_layers),
    }
    for stage, options in recipe.online().items():
        changes[f"{stage}.{'num_ppo_epochs' if stage == 'ppo' else 'num_iterations'}"] = 1
        changes[f"{stage}.normalize_scores"] = options.normalize_scores
        changes[f"{stage}.norm_responses"] = 2  # one batch of rollouts
    for stage, supervised in (("sft", recipe.sft), ("rm", recipe.rm), ("dpo", recipe.dpo)):
        changes[f"{stage}.gradient_accumulation_steps"] = min(2, supervised.gradient_accumulation_steps)
    return changes


def _check_depth(architecture: Architecture) -> None:
    """Raise UserError if the first layers differ from the others. Types that are tested have equal layers."""
    from rlhf.models.architecture import TESTED, check_layers, config_of

    if architecture.model_type not in TESTED or "mlp_only_layers" in architecture.others():
        check_layers(config_of(architecture))


def _shallow(architecture: Architecture, layers: int) -> Changes:
    """Return the overrides that give an architecture its first `layers` layers; a list with a value for each is cut."""
    per_layer = {
        key: value[:layers]
        for key, value in architecture.others().items()
        if isinstance(value, list) and len(value) == architecture.num_hidden_layers
    }
    changes: Changes = {"num_hidden_layers": layers, **per_layer}
    return {f"model.architecture.{key}": value for key, value in changes.items()}


def few_steps(recipe: Recipe, steps: int, shape: LengthsShape) -> Changes:
    """Return the overrides by which every stage takes `steps` steps on random weights, each logged, with little around
    them.

    `shape` as in `data.lengths`. Scores are not normalised: that would sample for a while before the first step.
    """
    # Half of the pairs are held out, and as many prompts as are decoded together must be among them.
    rows = min(recipe.evaluate.max_samples, recipe.evaluate.batch_size)
    changes: Changes = {
        "data.heldout_fraction": 0.5,
        "data.validation_fraction": 0.25 if recipe.data.validation_fraction else None,
        "evaluate.max_samples": rows,
    }
    for stage, options in recipe.online().items():
        evaluated = min(options.max_eval_samples, options.rollout_batch_size)
        rows = max(rows, options.batch_size, evaluated)
        section: Changes = {
            "steps": steps,
            "warmup_steps": 0,
            "normalize_scores": False,
            "logging_steps": 1,
            "save_steps": steps,
            "eval_steps": steps,
            "adapter": "last",
            "max_eval_samples": evaluated,
            "max_samples": None,
            "vllm_url": None,
            "max_update_kl": None,
        }
        changes |= {f"{stage}.{key}": value for key, value in section.items()}
        if isinstance(options, recipes.Group):  # stand-in prompts have no answers; functions take none of the memory
            changes[f"{stage}.reward_funcs"] = ["model" if options.model_scores else "length(most=1)"]
            changes |= {f"{stage}.reward_weights": None, f"{stage}.resample_groups": 0}
        else:
            changes["ppo.value_warmup_steps"] = 0
    for stage, supervised in (("sft", recipe.sft), ("rm", recipe.rm), ("dpo", recipe.dpo)):
        micro = supervised.per_device_train_batch_size
        rows = max(rows, steps * micro * supervised.gradient_accumulation_steps)
        changes |= {
            f"{stage}.max_steps": steps,
            f"{stage}.max_samples": None,
            f"{stage}.max_eval_samples": min(supervised.max_eval_samples, 2 * micro),
            f"{stage}.logging_steps": 1,
            f"{stage}.save_steps": steps,
            f"{stage}.eval_steps": None,  # held-out rows take less memory than a training step, and are not part of one
            f"{stage}.adapter": "last",
        }
    if rows > MOST_ROWS:
        raise UserError(f"{rows} rows in {steps} steps are more than any card holds: lower the batch sizes")
    return recipes.with_random_weights(recipe, 3 * rows, shape) | changes


class _Rehearsal(Run):
    """A run directory in which nothing is kept but what the next stage reads."""

    def seal_checkpoint(self, step: int, folder: Path) -> None:
        pass

    def describe(self, **facts: object) -> None:
        self._manifest.update(facts)


Peaks = dict[str, Any]  # by phase; on the stand-in device a RehearsedPhase, else what `measure` returns
# Runs a stage on a device of its choice and returns the peaks of its phases.
MeasuredRun = Callable[[Recipe, Callable[["torch.device"], object]], Peaks]


class Rehearsals:
    """Rehearses stages at one depth (None: the recipe's) on the stand-in device.

    Stages that it builds on are not run: their adapters are made, in the recipe's shape. With `measure` all of them
    run, on the device that it chooses. `events` are those of the last stage on the stand-in device.
    """

    def __init__(self, layers: int | None, measure: MeasuredRun | None = None):
        self.layers, self.measure = layers, measure
        self.folder = tempfile.TemporaryDirectory(prefix="rlhf-plan-")
        self.finished: set[tuple[str, str]] = set()  # (stage, recipe and hash of its model) whose adapters are there
        self.events: list[Event] = []

    def __call__(self, loaded: PinnedRecipe, stage: StageName) -> Peaks:
        """Return the peaks of every phase of a stage."""
        changes = loaded.overrides | settings(loaded.recipe, self.layers)
        changed = recipes.load(loaded.directory, changes, loaded.recipe.seed)
        shape = recipes.content_hash(changed.recipe.model_dump(mode="json", include={"model", "lora"}))
        folder = Path(self.folder.name) / shape[:12]
        present = [name for name in recipes.POLICIES if changed.recipe.section(name) is not None]
        policies = present if stage == "evaluate" else []  # it measures all that are there
        needed = dict.fromkeys((*recipes.parents(changed.recipe, recipes.stage_name(stage)), *policies))
        owner = f"{changed.name} {changed.version} {shape}"
        missing = [name for name in needed if (name, owner) not in self.finished]
        if self.measure is None and missing:
            with self._device(changed.recipe):
                _write_adapters(_Rehearsal(folder, changed, stage), missing)
        elif self.measure is not None:
            for name in missing:
                self._rehearse(changed, name, folder)
        self.finished |= {(name, owner) for name in (*missing, stage)}
        return self._rehearse(changed, stage, folder)

    def _rehearse(self, changed: PinnedRecipe, stage: StageName, folder: Path) -> Peaks:
        run = _Rehearsal(folder, changed, stage)
        shutil.rmtree(run.path, ignore_errors=True)
        (run.path / "checkpoints").mkdir(parents=True)
        stage_module = import_stage(run.stage)
        gc.freeze()  # events of earlier rehearsals, a million objects, at which every trainer's collection would look
        peaks = (self.measure or self._stand_in)(changed.recipe, lambda device: stage_module.run_stage(run, device))
        (run.path / "summary.json").write_text("{}")
        return peaks

    def _stand_in(self, recipe: Recipe, run_stage: Callable[["torch.device"], object]) -> Peaks:
        from rlhf.memory.operations import META

        with self._device(recipe) as stand_in:
            run_stage(META)
        self.events = stand_in.events()
        return {phase: vars(peak) for phase, peak in stand_in.peaks().items()}

    def _device(self, recipe: Recipe) -> "StandIn":
        from rlhf.memory.device import StandIn

        architecture, hardware = recipe.model.architecture, recipe.hardware
        assert architecture and architecture.vocab_size
        return StandIn(hardware.device, PHASES, architecture.vocab_size, cards.find(hardware.name))


def _write_adapters(run: Run, stages: Sequence[StageName]) -> None:
    from rlhf.memory.adapters import write_adapters  # imports torch

    write_adapters(run, stages)


class Depths(TypedDict):
    """What `RehearsedStage` holds, before it is JSON."""

    depths: list[Peaks]
    reserved: dict[str, Reserved] | None


class Rehearser:
    """Rehearses stages at each of DEPTHS, and replays what the allocator is asked for at the recipe's own depth."""

    def __init__(self) -> None:
        self.depths = [Rehearsals(layers) for layers in DEPTHS]

    def __call__(self, loaded: PinnedRecipe, stage: StageName, expandable: bool) -> Depths:
        """Return the peaks of a stage at each depth, and the reserved bytes of each phase at the recipe's depth.

        `reserved` has a `replay.Reserved` for each phase. It is empty if the stage uses no card, and None if the events
        of the two depths cannot be aligned.
        """
        peaks, events = [], []
        for rehearse in self.depths:
            peaks.append(rehearse(loaded, stage))
            events.append(rehearse.events)
        hardware, architecture = loaded.recipe.hardware, loaded.recipe.model.architecture
        reserved: dict[str, Reserved] | None = {}
        if hardware.device == "cuda" and stage not in ON_HOST and architecture:
            shallow, deeper = events
            try:
                deep = deepen(shallow, deeper, architecture.num_hidden_layers)
                reserved = replay(deep, expandable, cards.workspace(hardware.name))
            except ValueError:
                reserved = None
        return {"depths": peaks, "reserved": reserved}


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
    from rlhf.observe.console import quiet_libraries

    with quiet_libraries():
        import_bitsandbytes()
    with quiet_libraries(), shortened():
        rehearse = Rehearser()
        for line in sys.stdin:
            request = json.loads(line)
            answer: dict[str, object]
            try:
                loaded = recipes.load(Path(request["recipe"]), request["overrides"])
                if request["stage"] == DECODING_STEP:
                    answer = {"result": {"roles": _operations(loaded)}}
                else:
                    answer = {"result": rehearse(loaded, request["stage"], request["expandable"])}
            except Exception as error:
                traceback.print_exc()
                ours = isinstance(error, UserError)  # a sentence for people, complete by itself
                answer = {"error": str(error) if ours else f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
