"""The stages that a stage builds on: checked before anything is trained, then run one after another."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from rlhf import recipe as recipes
from rlhf.plan import cache
from rlhf.plan.own_rows import read_rows
from rlhf.plan.phases import PredictedStage, PredictionError
from rlhf.plan.plan import plan_of
from rlhf.plan.predict import Predictor
from rlhf.plan.preflight import require_fit
from rlhf.process import distributed, endings
from rlhf.process.task import Task, run_child
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import EVALUATE, TRAINING_STAGES
from rlhf.run.directory import StageRun
from rlhf.stages import runner
from rlhf.terminal import screen
from rlhf.terminal.progress import working


def stages_before(run: StageRun) -> list[StageName]:
    """Return the stages to run before one, in order.

    These are its parents; before an evaluation also the policies that it compares alone, or the first if none is there.
    """
    recipe, policies = run.loaded.recipe, run.only
    if run.stage == EVALUATE and not policies and not run.trained_policies():
        policies = recipe.policies()[:1]
    return [*recipes.parents(recipe, run.stage), *policies]


def check_chain(chain: Sequence[StageRun], preflight: bool) -> None:
    """Raise UserError, before any stage is trained, for one that would be refused later.

    That is a stage with settings that cannot run, one for which the data have no rows, one that is finished with other
    settings, and with `preflight` one that is predicted not to fit the card.
    """
    for run in chain:
        run.loaded.require(run.stage)
    unfinished = [run for run in chain if run.done() is None]
    for run in unfinished:
        runner.check_settings(run.loaded, run.stage)
    if unfinished:
        runner.check_device(unfinished[0].loaded)  # without a GPU no prediction is needed
    if unfinished and distributed.rank() == 0:
        with working("reading data"):
            from rlhf.data.load import check_rows  # imports torch

            check_rows(unfinished[0].loaded.recipe, [run.stage for run in unfinished])
        for run in unfinished if preflight else ():
            forecast(run.loaded, run.stage, timed=False)


def run_parents(task: Task, parents: Sequence[StageRun]) -> None:
    """Run the unfinished stages before a task's, each in a process of its own. Exits with the code of a failed one."""
    number = 0
    for number, parent in enumerate(parents, 1):
        if report_done(parent):
            continue
        screen.OUT.print(f"stage {number} of {len(parents) + 1}: {parent.stage}", style="bold")
        with endings.reporting_progress(partial(runner.progress, parent)):
            code = run_child(task.of(parent.stage, if_needed=False))
            if code < 0 or code - 128 in endings.SIGNALS:  # a signal that only the child received
                raise endings.stop_for(-code if code < 0 else code - 128)
        if code:
            sys.exit(code)
    screen.OUT.print(f"stage {number + 1} of {number + 1}: {task.stage}", style="bold")


def report_done(run: StageRun) -> bool:
    """Return whether a stage is finished; print where."""
    done = run.done() is not None
    if done:
        screen.OUT.print(f"{run.stage}: done ({run.path})")
    return done


def forecast(loaded: PinnedRecipe, stage: StageName, timed: bool = True) -> runner.Forecast:
    """Return the predicted peak and, if `timed`, the projected time, as far as they are known.

    On a CPU the time is projected where the stage was rehearsed before, as by `rlhf plan` and `rlhf new`. Raises
    UserError if the stage does not fit.
    """
    with working(f"{stage}: predicting its memory"), Predictor() as predictor:
        peak, time = require_fit(predictor.predict, loaded, stage), None
        if timed and stage in TRAINING_STAGES and (peak is not None or cache.file_of(loaded, stage).is_file()):
            with suppress(PredictionError):
                predicted: dict[StageName, PredictedStage] = {stage: predictor.predict(loaded, stage)}
                time = plan_of(loaded, predicted, None, read_rows(loaded.recipe, [stage])).stages[stage].time
    if time is None:
        return runner.Forecast(peak)
    hours = (time.projected_hours, *time.projected_hours_range)
    unit, scale = ("hours", 1) if hours[0] >= 2 else ("minutes", 60)
    middle, low, high = (f"{scale * number:.2g}" for number in hours)
    return runner.Forecast(peak, f"projected {middle} {unit} ({low} to {high})", time.projected_hours)
