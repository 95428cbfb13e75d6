"""Runs one stage: locks its directory, checks what it builds on, predicts its memory, and explains how it ended."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf.errors import Interrupted, UserError
from rlhf.observe import tracking
from rlhf.observe.watch import LiveChecks
from rlhf.process import distributed, endings, environment, exhaustion, launching
from rlhf.process.libraries import import_bitsandbytes, quiet_libraries, without_collections
from rlhf.process.task import Task
from rlhf.recipe import PinnedRecipe, StageName, parents
from rlhf.recipe.schema import Evaluate
from rlhf.recipe.schema_online import MODEL_REWARD, OnlineOptions
from rlhf.recipe.stages import EVALUATE, ONLINE, PRETRAIN, REWARD_MODELS, STAGE_TABLE
from rlhf.run import card
from rlhf.run.checkpoints import checkpoint_step
from rlhf.run.directory import StageRun
from rlhf.run.finished import verified
from rlhf.run.layout import SUMMARY
from rlhf.run.records import Costs, Summary
from rlhf.stages.online import rewards
from rlhf.terminal import message_of, say

if TYPE_CHECKING:
    import torch

# a stage's own code: its metrics and costs
StageFn = Callable[[StageRun, "torch.device"], tuple[dict[str, float], Costs]]


class Forecast(NamedTuple):
    """What is predicted of a stage before it starts."""

    peak_bytes: int | None = None
    time: str = ""  # projected, in words
    hours: float | None = None  # the same as a number


def execute(
    task: Task, loaded: PinnedRecipe, preflight: Callable[[], Forecast] = Forecast
) -> tuple[Summary | None, bool]:
    """Run the stage of a task of the recipe that is loaded, unless it is done already.

    Return its summary, None on a rank that did not write it, and whether it was run: not if it was done before.
    `preflight` predicts the stage's peak and time, or raises UserError, before anything is loaded.
    """
    environment.prepare(loaded.recipe)
    stage = task.stage
    run = StageRun(Path(task.out), loaded, stage, is_main=not distributed.rank(), only=task.only)
    loaded.require(stage)
    with endings.reporting_progress(partial(progress, run)), _explained_errors(run), run.locked():
        summary = run.done()
        is_new = summary is None
        if is_new:
            check_settings(loaded, stage)
            if task.resume is None:
                run.check_nothing_lost()
            with launching.joined(loaded, stage):
                _check_parents(run)
                tracking.check(task.report_to)
                with quiet_libraries():
                    (metrics, costs), forecast = _train(run, task, preflight)
                summary = run.finish(metrics, costs, forecast.peak_bytes, forecast.hours)
        if run.is_main:
            card.write(run.run_directory)
        return summary, is_new


# -- before anything is loaded -----------------------------------------------------------------------------------------


def check_settings(loaded: PinnedRecipe, stage: StageName) -> None:
    """Raise UserError where an unfinished stage needs a function, a judge, an encoder or a file that is not there."""
    options = loaded.recipe.section(stage)
    if isinstance(options, OnlineOptions):
        for name in options.reward_funcs:
            if name != MODEL_REWARD:
                rewards.find(name, f"{stage}.reward_funcs")
    encoder = options.bertscore_model if isinstance(options, Evaluate) else None
    if encoder is not None and not Path(encoder, "config.json").is_file():
        raise UserError(f"evaluate.bertscore_model: {encoder} is not a folder with a model (it has no config.json)")


def check_device(loaded: PinnedRecipe) -> None:
    """Raise UserError if the recipe needs a GPU and there is none that it can use."""
    if loaded.recipe.hardware.device == "cuda":
        import_bitsandbytes()  # the libraries below would import it with its notices
        from rlhf.process.torch_setup import device_of  # imports torch

        device_of(loaded.recipe)


def _check_parents(run: StageRun) -> None:
    """Raise UserError unless all stages that this one reads are finished, unchanged and from the same settings.

    An evaluation does without a reward model that is not trained.
    """
    evaluates = run.stage == EVALUATE
    for parent in parents(run.loaded.recipe, run.stage):
        if evaluates and parent in REWARD_MODELS and not (run.folder(parent) / SUMMARY).exists():
            say(f"evaluate: no scores of {parent}, for this run has not trained it")
        else:
            run.require(parent)
    for policy in run.require_policies() if evaluates else ():
        verified(run.run_directory, policy)


# -- the stage ---------------------------------------------------------------------------------------------------------


def _train(
    run: StageRun, task: Task, preflight: Callable[[], Forecast]
) -> tuple[tuple[dict[str, float], Costs], Forecast]:
    """Run the stage's own code. Return its metrics and costs, and what was predicted of it."""
    run_stage = import_stage(run.stage)
    from rlhf.models import loading
    from rlhf.models.random_state import kept_random_state
    from rlhf.observe.device import device_facts
    from rlhf.process.torch_setup import set_up_torch

    loaded = run.loaded
    check_device(loaded)  # without a GPU no prediction is needed
    forecast = distributed.from_main(preflight)
    run.expected = forecast.time
    device = set_up_torch(loaded.recipe)
    facts = device_facts(device)
    if distributed.world() > 1:
        facts |= {"processes": distributed.world(), "engine": loaded.recipe.hardware.engine}
    run.start(bool(task.resume), task.argv, facts)
    run.resumed_from, run.resumed_data = distributed.from_main(lambda: (run.resumed_from, run.resumed_data))
    if task.resume and run.resumed_from is None:
        say(f"{run.stage}: there was no checkpoint in {run.path} to continue from; it begins at its first step")
    project = f"{loaded.name}-{loaded.version}"
    name = f"{project}-{run.stage}-seed{loaded.recipe.seed}"
    first_step = checkpoint_step(run.resumed_from) + 1 if run.resumed_from else None
    with ExitStack() as opened:
        with kept_random_state():  # a tracker may draw from the generators of training, or seed them
            trackers = tracking.trackers(task.report_to if run.is_main else (), run.path, project, name, first_step)
            logs = [kept_random_state()(log) for log in opened.enter_context(trackers)]
        run.logs.on_metrics = [*logs, LiveChecks(run, task.stop_on).on_metrics]
        if run.stage != PRETRAIN and (record := loading.conversion_of(run.base)):
            run.describe(base=record)
        return run_stage(run, device), forecast


def import_stage(stage: StageName) -> StageFn:
    """Import the module of a stage, with all libraries that it needs. Return what reads its data and runs it."""
    name = f"rlhf.stages.{STAGE_TABLE[stage].module or stage}"
    if name not in sys.modules:
        with without_collections():
            import_bitsandbytes()
            importlib.import_module(name)
    import torch

    from rlhf.observe.telemetry import Telemetry
    from rlhf.stages.corpus import stage_input

    if stage in ONLINE:
        from rlhf.stages.online.session import Session

    def measured(run: StageRun, device: torch.device) -> tuple[dict[str, float], Costs]:
        run_stage, given = sys.modules[name].run_stage, stage_input(run)
        if STAGE_TABLE[stage].on_host and device.type == "cuda":
            device = torch.device("cpu")  # in full precision the base may not fit the card; a CPU is fast enough
        telemetry = Telemetry(device)
        metrics = run_stage(Session(run, telemetry, *given)) if stage in ONLINE else run_stage(run, telemetry, *given)
        return metrics, telemetry.costs()

    return measured


# -- how it ended ------------------------------------------------------------------------------------------------------


def progress(run: StageRun) -> str:
    """Describe what a stopped stage leaves, and the command that continues from it."""
    if (run.path / SUMMARY).exists():
        return f"{run.stage} is finished"
    steps = run.checkpoints.steps()
    if not steps:
        return f"{run.stage} has no checkpoint yet: the same command begins it anew"
    return f"{run.checkpoints.of(steps[-1])} is kept: the same command with --resume continues from it"


@contextmanager
def _explained_errors(run: StageRun) -> Iterator[None]:
    """Raise UserError, one line, where the machine ran out of something. Add to it and to Interrupted how to go on."""
    try:
        yield
    except Interrupted as error:
        raise UserError(f"{error.lines[0]}. {progress(run)}", *error.lines[1:]) from error
    except UserError:
        raise
    except Exception as error:
        found = exhaustion.ran_out(error)
        if found is None:
            raise
        plan = f"rlhf plan --recipe {run.loaded.directory} --fit card"
        what = {
            "room": "a file cannot grow: make room, or allow larger files",
            "memory": f"out of memory: free some; `{plan}` looks for settings that need less",
        }[found]
        raise UserError(f"{run.path}: {what} ({message_of(error)}). {progress(run)}") from error
