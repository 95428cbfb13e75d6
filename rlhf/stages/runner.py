"""Runs one stage: locks its directory, predicts its memory, starts trackers and explains errors."""

import importlib
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf import files
from rlhf.errors import Interrupted, UserError
from rlhf.models.folders import check_encoder
from rlhf.observe import tracking
from rlhf.observe.watch import LiveChecks
from rlhf.process import children, cuda, distributed, endings, environment, exhaustion, launching
from rlhf.process.libraries import import_bitsandbytes, quiet_libraries, without_collections
from rlhf.recipe import PinnedRecipe, StageName, parents, shape
from rlhf.recipe.folders import no_section
from rlhf.recipe.schema import Dialogues, Evaluate
from rlhf.recipe.schema_online import MODEL_REWARD, OnlineBase, OnlineOptions
from rlhf.recipe.stages import EVALUATE, ONLINE, PRETRAIN, REWARD_MODELS, STAGE_TABLE, PolicyName
from rlhf.run import card
from rlhf.run.checkpoints import checkpoint_step
from rlhf.run.directory import StageRun
from rlhf.run.evidence import CHOSEN_AMONG
from rlhf.run.finished import read_summary, verified
from rlhf.run.layout import SUMMARY
from rlhf.run.records import Summary
from rlhf.stages.online import rewards
from rlhf.stages.result import Result
from rlhf.terminal import say

if TYPE_CHECKING:
    import torch

StageFn = Callable[[StageRun, "torch.device"], Result]  # a stage's own code
FULL_DISK_BYTES = 1_000_000
LONGEST_COMMAND = 500  # characters of a command in a message
# Classes of errors that libraries raise when they cannot write: Python and Arrow, torch.save, safetensors, SQLite.
WRITE_ERRORS = ("OSError", "RuntimeError", "SafetensorError", "OperationalError")
# Bytes of address space. With a limit of 1.0e9 importing the libraries aborted, with 2.1e9 one run of many did not end
# within five minutes, with 2.6e9 SFT ran.


class Forecast(NamedTuple):
    """What is predicted of a stage before it starts."""

    peak_bytes: int | None = None
    time: str = ""  # projected, in words
    hours: float | None = None  # the same as a number


class Executed(NamedTuple):
    """A stage that is finished, and its directory."""

    summary: Summary | None  # None on a rank that did not write it
    result: Result | None  # None if the stage was done before
    path: Path


def execute(
    stage: StageName,
    loaded: PinnedRecipe,
    out: Path,
    *,
    resume: bool | None = None,
    report_to: Sequence[str] = (),
    preflight: Callable[[], Forecast] = Forecast,
    stop_on: Sequence[str] = (),
    only: Sequence[PolicyName] = (),
) -> Executed:
    """Run one stage unless it is done already.

    `resume`: continue an unfinished run from its newest checkpoint (True), or set it aside and begin anew (False); for
    None such a run is refused. `preflight` predicts the stage's peak and time, or raises UserError, before anything is
    loaded. `stop_on`: names of checks (rlhf/observe/watch.py) whose findings end the stage; `all` for any.
    `only`: the policies that an evaluation compares, instead of all that are trained.
    """
    cuda.set_environment(loaded.recipe)
    run = StageRun(out, loaded, stage, is_main=not distributed.rank(), only=only)
    check_section(loaded, stage)
    with endings.reporting_progress(partial(progress, run)), _explained_errors(run), run.locked():
        summary = run.done()
        if summary is not None:
            if run.is_main:
                card.write(run.run_directory)
            return Executed(summary, None, run.path)
        check_settings(loaded, stage)
        if resume is None:
            run.check_nothing_lost()
        with launching.joined(loaded, stage):
            _check_parents(run)
            tracking.check(report_to)
            with quiet_libraries():
                result, predicted = _prepare_and_run(run, bool(resume), report_to, preflight, stop_on)
            summary = run.finish(
                result.metrics | _chosen_among(run), result.costs, predicted.peak_bytes, predicted.hours
            )
            if run.is_main:
                card.write(run.run_directory)
            return Executed(summary, result, run.path)


def _chosen_among(run: StageRun) -> dict[str, float]:
    """Return the metric that says that the rows of the figures chose the result, where they did, among how many.

    Without `data.validation_fraction` the held-out rows that `adapter: best` compares checkpoints on are those of the
    figures: the largest of several noisy numbers is too large. Those of an evaluation are of the same rows.
    """
    recipe = run.loaded.recipe
    if run.stage == EVALUATE:
        policies = {label: read_summary(run.parents.folder(label)) for label in run.parents.trained_policies()}
        return {
            f"{label}/{CHOSEN_AMONG}": among
            for label, summary in policies.items()
            if summary and (among := summary.metrics.get(CHOSEN_AMONG))
        }
    options = recipe.section(run.stage)
    if not isinstance(options, Dialogues | OnlineBase) or options.adapter != "best":
        return {}
    among = math.ceil(run.total_steps / options.save_steps)
    return {CHOSEN_AMONG: among} if among > 1 and recipe.data.validation_fraction is None else {}


def check_section(loaded: PinnedRecipe, stage: StageName) -> None:
    """Raise UserError for a stage that the recipe does not have."""
    if loaded.recipe.section(stage) is None:
        raise UserError(no_section(stage, loaded))


def check_settings(loaded: PinnedRecipe, stage: StageName) -> None:
    """Raise UserError where an unfinished stage needs a function, a judge, an encoder or a file that is not there.

    Also for sequences beyond the model's context.
    """
    shape.check_context(loaded.recipe)
    options = loaded.recipe.section(stage)
    if isinstance(options, OnlineOptions):
        for name in options.reward_funcs:
            if name != MODEL_REWARD:
                rewards.find(name, f"{stage}.reward_funcs")
    elif isinstance(options, Evaluate) and options.bertscore_model is not None:
        check_encoder(Path(options.bertscore_model))


def check_device(loaded: PinnedRecipe) -> None:
    """Raise UserError if the recipe needs a GPU and there is none that it can use."""
    if loaded.recipe.hardware.device == "cuda":
        import_bitsandbytes()  # the libraries below would import it with its notices
        from rlhf.process.torch_setup import device_of  # imports torch

        device_of(loaded.recipe)


def _check_parents(run: StageRun) -> None:
    """Raise UserError unless all stages that this one reads are finished, unchanged and from the same settings."""
    needed = parents(run.loaded.recipe, run.stage)
    if run.stage == EVALUATE:
        needed = _without_untrained_rewards(run, needed)
    for parent in needed:
        run.parents.require(parent)
    policies = run.parents.require_policies() if run.stage == EVALUATE else []
    for policy in policies:
        verified(run.run_directory, policy)


def _without_untrained_rewards(run: StageRun, needed: Sequence[StageName]) -> list[StageName]:
    """Return the stages that an evaluation reads: a reward model only if it is trained, or a policy learned from it."""
    learned_from = {name for policy in run.parents.trained_policies() for name in parents(run.loaded.recipe, policy)}
    spared = [
        name
        for name in needed
        if name in REWARD_MODELS and name not in learned_from and not (run.parents.folder(name) / SUMMARY).exists()
    ]
    if spared:
        say(f"evaluate: no scores, for this run has not trained {', '.join(spared)}")
    return [name for name in needed if name not in spared]


def _prepare_and_run(
    run: StageRun, resume: bool, report_to: Sequence[str], preflight: Callable[[], Forecast], stop_on: Sequence[str]
) -> tuple[Result, Forecast]:
    """Run the stage's own code. Return its result and what was predicted of it."""
    run_stage = import_stage(run.stage)
    from rlhf.models import loading
    from rlhf.models.random_state import kept_random_state
    from rlhf.observe.device import device_facts
    from rlhf.process.torch_setup import set_up_torch

    loaded = run.loaded
    check_device(loaded)  # without a GPU no prediction is needed
    predicted = distributed.from_main(preflight)
    run.expected = predicted.time
    device = set_up_torch(loaded.recipe)
    devices = {"processes": distributed.world(), "engine": loaded.recipe.hardware.engine}
    nothing_there = resume and not run.checkpoints.steps()
    run.start(resume, sys.argv, device_facts(device) | (devices if distributed.world() > 1 else {}))
    run.describe(taken_out=environment.taken_out())
    if nothing_there and run.is_main and not children.part_of_command():
        say(f"{run.stage}: there was no checkpoint in {run.path} to continue from; it begins at its first step")
    run.resumed_from, run.resumed_data = distributed.from_main(lambda: (run.resumed_from, run.resumed_data))
    project = f"{loaded.name}-{loaded.version}"
    reporters = report_to if run.is_main else ()
    name = f"{project}-{run.stage}-seed{loaded.recipe.seed}"
    first_step = checkpoint_step(run.resumed_from) + 1 if run.resumed_from else None
    with ExitStack() as opened:
        with kept_random_state():  # a tracker may draw from the generators of training, or seed them
            trackers = tracking.trackers(reporters, run.path, project, name, first_step)
            logs = [kept_random_state()(log) for log in opened.enter_context(trackers)]
        checks = LiveChecks(run, stop_on)
        run.logs.on_metrics = [*logs, checks.on_metrics]
        if run.stage != PRETRAIN and (record := loading.conversion_of(run.base)):
            run.describe(base=record)
        result = run_stage(run, device)
    return result, predicted


def import_stage(stage: StageName) -> StageFn:
    """Import the module of a stage, with all libraries that it needs. Return its `run_stage`, which reads its data."""
    name = f"rlhf.stages.{STAGE_TABLE[stage].module or stage}"
    if name not in sys.modules:
        with without_collections():
            import_bitsandbytes()
            importlib.import_module(name)
    from rlhf.stages.corpus import stage_input

    run_stage = sys.modules[name].run_stage
    if stage in ONLINE:
        from rlhf.stages.online.session import begin

        return lambda run, device: run_stage(begin(run, device, *stage_input(run)))
    return lambda run, device: run_stage(run, device, *stage_input(run))


def progress(run: StageRun) -> str:
    """Describe what a stopped stage leaves, and the command that continues from it."""
    try:
        if (run.path / SUMMARY).exists():
            return f"{run.stage} is finished"
        steps = run.checkpoints.steps()
    except (OSError, ValueError):
        steps = []
    if not steps:
        first = getattr(run.loaded.recipe.section(run.stage), "save_steps", None)
        due = f" (the first is due at step {first})" if first else ""
        return f"{run.stage} has no checkpoint yet{due}: the same command begins it anew"
    return f"{run.checkpoints.of(steps[-1])} is kept: {resume_command()} continues from it"


def resume_command() -> str:
    """Return this command line with --resume; a description of it if it is long or not `rlhf run`."""
    others = (word for word in sys.argv[1:] if word not in ("--resume", "--restart"))
    words = shlex.join(["rlhf", *others, "--resume"])
    if sys.argv[1:2] != ["run"] or len(words) > LONGEST_COMMAND:
        return "the same command with --resume"
    return f"`{words}`"


@contextmanager
def _explained_errors(run: StageRun) -> Iterator[None]:
    """Turn a full disk, a limit on files and exhausted memory into a UserError; libraries report them in many ways.

    Adds to Interrupted how the stage goes on.
    """
    try:
        yield
    except Interrupted as error:
        raise UserError(f"{error.lines[0]}. {progress(run)}", *error.lines[1:]) from error
    except UserError:
        raise
    except Exception as error:
        if (file := _limited_file(run.run_directory, error)) is not None:
            limit = f" (ulimit -f: {files.file_limit():,} bytes)" if files.file_limit() else ""
            raise UserError(
                f"{file}: larger than a file may be here{limit}; allow more and continue with --resume"
            ) from error
        if _disk_is_full(run.run_directory, error):
            raise UserError(f"{run.path}: the disk is full; make room and continue with --resume") from error
        if exhaustion.out_of_memory(error):
            raise UserError(f"{run.stage}: out of memory{_way_out(run, error)}. {progress(run)}") from error
        raise


def _limited_file(folder: Path, error: Exception) -> Path | None:
    """Return the file that reached the limit of a file's size, if that is what an error means."""
    return files.limited_file(folder, error) if _may_be_of_writing(error) else None


def _may_be_of_writing(error: Exception) -> bool:
    return any(kind.__name__ in WRITE_ERRORS for kind in type(error).__mro__)


def _disk_is_full(folder: Path, error: Exception) -> bool:
    """Return whether an error means that the disk is full. Libraries do not say so, thus free space decides."""
    if files.disk_is_full(error):
        return True
    if not _may_be_of_writing(error):
        return False
    try:
        return shutil.disk_usage(folder).free < FULL_DISK_BYTES
    except OSError:
        return False


def _way_out(run: StageRun, error: BaseException) -> str:
    """Describe where memory ran out and which settings need less."""
    if type(error).__name__ == "OutOfMemoryError":  # CUDA's, named without importing torch
        return (
            f" on the GPU; `rlhf plan --recipe {run.loaded.directory} --fastest`, with the same --set, looks for "
            "settings that fit, and nvidia-smi shows who else is on the card"
        )
    options = run.loaded.recipe.section(run.stage)
    keys = ("batch_size",) if run.stage == EVALUATE else ("per_device_train_batch_size", "rollout_batch_size")
    values = {key: getattr(options, key, None) for key in keys}
    sizes = [f"{run.stage}.{key} (now {value})" for key, value in values.items() if value]
    smaller = f", or try a smaller {' and '.join(sizes)}" if sizes else ""
    return f": free some, or allow more{smaller}"
