"""Runs stages for a few steps on random weights and the longest dialogues that a recipe admits.

Rehearsals do this on a stand-in device, measurements on a real one.
"""

import gc
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Generic, TypeVar

from peakmem.events import DEPTHS
from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.plan.phases import MOST_REPEATS, REHEARSED_STEPS
from rlhf.recipe import Changes, PinnedRecipe, Recipe, StageName
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.model_types import TESTED
from rlhf.recipe.pinned import content_hash
from rlhf.recipe.rehearsal import few_steps_changes, random_weights_changes
from rlhf.recipe.schema import Dialogues
from rlhf.recipe.schema_model import Architecture
from rlhf.recipe.schema_online import GroupOptions, OnlineOptions
from rlhf.recipe.stages import EVALUATE, stage_name
from rlhf.run.directory import StageRun
from rlhf.run.layout import SUMMARY
from rlhf.stages.runner import import_stage

if TYPE_CHECKING:
    import torch

MOST_ROWS = 8192  # of dialogues that are made for a few steps
# Largest allowed difference in the share of sliding layers between the layers that are repeated and those that they
# stand for. Patterns with one sliding or one full layer in 4 or in 6 have at most this.
MOST_UNLIKE = 0.25

PeakT = TypeVar("PeakT")
StageFn = Callable[["torch.device"], object]


def rehearsal_changes(recipe: Recipe, layers: int | None) -> Changes:
    """Return the overrides of a rehearsal.

    Of the settings that decide a step's memory they change the number of layers, and two that a stand-in cannot have:
    a vLLM server, and the flash-attn package, for which torch's own attention stands.
    """
    architecture = recipe.model.architecture
    assert architecture
    _check_depth(recipe)
    shallow = _shallow(architecture, layers or architecture.num_hidden_layers)
    changes = few_steps(recipe, REHEARSED_STEPS, "longest") | shallow
    if recipe.model.attention == "flash_attention_2":
        changes["model.attention"] = "sdpa"
    for stage, options in recipe.online().items():
        changes[f"{stage}.{options.passes_key}"] = 1
        changes[f"{stage}.normalize_scores"] = options.normalize_scores
        changes[f"{stage}.norm_responses"] = 2  # one batch of rollouts
    for stage, supervised in recipe.dialogues().items():
        changes[f"{stage}.gradient_accumulation_steps"] = min(MOST_REPEATS, supervised.gradient_accumulation_steps)
    return changes


def _check_depth(recipe: Recipe) -> None:
    """Raise UserError for a type that is not predicted, and where the first layers do not stand for the others.

    A sliding layer takes other memory than a full one where rows exceed the window, in proportion to their number, and
    all of them share one mask, which must be there at both depths. Of layers with experts all but the first are alike.
    """
    from rlhf.models.architecture import config_of

    architecture = recipe.model.architecture
    assert architecture
    if architecture.model_type not in TESTED:
        raise UserError(
            f"memory of {architecture.model_type} models is not predicted: transformers' own generate samples from "
            "them, on any device alike; run the stages without a prediction"
        )
    config, (low, high) = config_of(architecture), DEPTHS
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or []
    sliding = [kind == "sliding_attention" for kind in kinds]
    stands = True
    if window is not None and recipe.longest() > window and len(kinds) > high and any(sliding):
        stands = any(sliding[:low]) and abs(mean(sliding[low:high]) - mean(sliding[low:])) <= MOST_UNLIKE
    if hasattr(config, "mlp_only_layers"):
        later = range(1, config.num_hidden_layers)
        dense = [n for n in later if n in config.mlp_only_layers or (n + 1) % config.decoder_sparse_step]
        stands &= len(dense) in (0, len(later))
    if not stands:
        raise UserError(
            f"memory is predicted from the first {high} layers, and here they do not stand for all (layer_types, "
            f"sliding_window {window}, mlp_only_layers): shorten rows, or run the stages without a prediction"
        )


def _shallow(architecture: Architecture, layers: int) -> Changes:
    """Return the overrides that give an architecture its first `layers` layers; a list with a value for each is cut."""
    per_layer = {
        key: value[:layers]
        for key, value in architecture.others().items()
        if isinstance(value, list) and len(value) == architecture.num_hidden_layers
    }
    changes: Changes = {"num_hidden_layers": layers, **per_layer}
    return {f"model.architecture.{key}": value for key, value in changes.items()}


def few_steps(recipe: Recipe, steps: int, shape: LengthsShape, supervised_steps: int | None = None) -> Changes:
    """Return the overrides by which every stage takes `steps` steps on random weights.

    Each step is logged, with little around it. `shape` as in `data.lengths`. Scores are not normalised: that would
    sample for a while before the first step. `supervised_steps`: those of stages that do not sample, if others.
    """
    sampled = min(recipe.evaluate.max_samples, recipe.evaluate.batch_size)
    taken = supervised_steps or steps
    changes: Changes = {
        **few_steps_changes(recipe, steps, taken),
        "data.heldout_fraction": 0.5,
        "data.validation_fraction": 0.25 if recipe.data.validation_fraction else None,
        "evaluate.max_samples": sampled,
    }
    rows = [sampled]
    for stage, options in recipe.online().items():
        changes |= _little_around(stage, options)
        rows += [options.batch_size, _evaluated(options)]
    for stage, supervised in recipe.dialogues().items():
        changes |= _few_rows(stage, supervised, taken, shape)
        rows.append(taken * supervised.per_device_train_batch_size * supervised.gradient_accumulation_steps)
    most = max(rows)
    if most > MOST_ROWS:
        raise UserError(f"{most} rows in {taken} steps are more than any card holds: lower the batch sizes")
    # Half of the pairs are held out, and as many prompts as are decoded together must be among them.
    return random_weights_changes(recipe, 3 * most, shape) | changes


def _little_around(stage: StageName, options: OnlineOptions) -> Changes:
    section: Changes = {
        "warmup_steps": 0,
        "normalize_scores": False,
        "adapter": "last",
        "max_eval_samples": _evaluated(options),
        "max_samples": None,
        # stand-in prompts have no answers; functions take no memory
        "reward_funcs": ["model" if options.model_scores else "length(most=1)"],
        "reward_weights": None,
    }
    if not isinstance(options, GroupOptions):
        section["value_warmup_steps"] = 0
    return {f"{stage}.{key}": value for key, value in section.items()}


def _evaluated(options: OnlineOptions) -> int:
    """Return the prompts of an evaluation in a short run: one batch of rollouts at most."""
    return min(options.max_eval_samples, options.rollout_batch_size)


def _few_rows(stage: StageName, options: Dialogues, steps: int, shape: LengthsShape) -> Changes:
    batch = options.per_device_train_batch_size * options.gradient_accumulation_steps
    section: Changes = {
        # Batches of similar rows differ much in length: of real lengths a run has as many rows as it takes.
        "max_samples": steps * batch if shape == "hh" else None,
        "max_eval_samples": min(options.max_eval_samples, MOST_REPEATS * options.per_device_train_batch_size),
        "eval_steps": None,  # held-out rows take less memory than a training step, and are not part of one
        "adapter": "last",
    }
    return {f"{stage}.{key}": value for key, value in section.items()}


class ShortRun(StageRun):
    """A stage's directory in which nothing is kept but what the next stage reads."""

    def seal_checkpoint(self, step: int, folder: Path) -> None:
        """Keep no checkpoint."""


class ShortRuns(ABC, Generic[PeakT]):
    """Runs stages at one depth (None: the recipe's), each for STEPS steps, in a temporary folder.

    A subclass says on which device a stage runs, how its peaks are counted, and how its parents' adapters are made.
    """

    def __init__(self, layers: int | None):
        self.layers = layers
        self._folder = tempfile.TemporaryDirectory(prefix="rlhf-plan-")

    @abstractmethod
    def measure(self, recipe: Recipe, run_stage: StageFn) -> dict[str, PeakT]:
        """Call `run_stage` with a device. Return the peak of each phase by its name."""

    @abstractmethod
    def make_parents(self, changed: PinnedRecipe, stages: Sequence[StageName], folder: Path) -> None:
        """Make the results of the stages in the run directory below `folder`."""

    def __call__(self, loaded: PinnedRecipe, stage: StageName) -> dict[str, PeakT]:
        """Return the peaks of every phase of a stage."""
        changed = loaded.with_changes(rehearsal_changes(loaded.recipe, self.layers))
        shape = changed.recipe.model_dump(mode="json", include={"model", "lora"})
        # A folder for each recipe and shape of adapters.
        folder = Path(self._folder.name) / content_hash([changed.name, changed.version, shape])[:12]
        policies = changed.recipe.policies() if stage == EVALUATE else []  # it measures all that are there
        needed = dict.fromkeys((*recipes.parents(changed.recipe, stage_name(stage)), *policies))
        finished = ShortRun(folder, changed, stage).run_directory
        missing = [name for name in needed if not (finished / name / SUMMARY).is_file()]
        if missing:
            self.make_parents(changed, missing, folder)
        return self.run(changed, stage, folder)

    def run(self, changed: PinnedRecipe, stage: StageName, folder: Path) -> dict[str, PeakT]:
        """Run one stage, whose parents are there, and return its peaks."""
        run = ShortRun(folder, changed, stage)
        shutil.rmtree(run.path, ignore_errors=True)
        (run.path / "checkpoints").mkdir(parents=True)
        run_stage = import_stage(run.stage)
        gc.freeze()  # events of earlier rehearsals, a million objects, at which every trainer's collection would look
        peaks = self.measure(changed.recipe, lambda device: run_stage(run, device))
        (run.path / SUMMARY).write_text("{}")
        return peaks
