"""The stages that a stage builds on: checked before anything is trained, then run one after another."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf import recipe as recipes
from rlhf.cli.typed import NAMES_RECIPE, typed_options
from rlhf.data.needs import check_rows
from rlhf.memory.predict import Predictor
from rlhf.memory.preflight import require_fit
from rlhf.process import children, distributed, endings
from rlhf.process.guest.host import ended_afterwards
from rlhf.recipe import EVALUATE, PinnedRecipe, StageName
from rlhf.run.directory import StageRun
from rlhf.stages import runner
from rlhf.terminal import screen
from rlhf.terminal.progress import working

OF_A_CHAIN = ("with_parents", "if_needed")  # options of `rlhf run` that its parents do not get


def check_chain(chain: Sequence[StageRun], preflight: bool) -> None:
    """Raise UserError, before any stage is trained, for one that would be refused later.

    That is a stage with settings that cannot run, one for which the data have no rows, one that is finished with other
    settings, and with `preflight` one that is predicted not to fit the card.
    """
    for run in chain:
        runner.check_section(run.loaded, run.stage)
    unfinished = [run for run in chain if _where_finished(run) is None]
    with ended_afterwards():
        for run in unfinished:
            runner.check_settings(run.loaded, run.stage)
    if unfinished:
        runner.check_device(unfinished[0].loaded)  # without a GPU no prediction is needed
    if unfinished and distributed.rank() == 0:
        with working("reading data"):
            check_rows(unfinished[0].loaded.recipe, [run.stage for run in unfinished])
    if preflight and distributed.rank() == 0:
        for run in unfinished:
            predict_peak(run.loaded, run.stage)


def stages_before(loaded: PinnedRecipe, stage: StageName, out: Path, reuse: Path | None) -> list[StageName]:
    """Return the stages to run before `stage`; before an evaluation no policy where one is trained already."""
    if stage == EVALUATE and StageRun(out, loaded, stage, reuse).parents.trained_policies():
        return recipes.parents(loaded.recipe, stage)
    return recipes.stages_before(loaded.recipe, stage)


def run_parents(
    loaded: PinnedRecipe, stage: StageName, out: Path, reuse: Path | None, more_data: Sequence[str]
) -> None:
    """Run the unfinished stages before `stage`, each in a process of its own. Exits if one fails."""
    before = stages_before(loaded, stage, out, reuse)
    any_ran = False
    for number, parent in enumerate(before, 1):
        unfinished = StageRun(out, loaded, parent, reuse)
        if report_done(unfinished):
            continue
        any_ran = True
        _announce(number, len(before) + 1, parent)
        if other := unfinished.parents.settings_elsewhere(parent):
            screen.OUT.print(f"{parent}: {other}; it is run anew")
        _run_parent(unfinished, more_data)
    if any_ran:
        _announce(len(before) + 1, len(before) + 1, stage)


def _announce(number: int, total: int, stage: StageName) -> None:
    """Print which stage of a chain begins."""
    screen.OUT.print(f"stage {number} of {total}: {stage}", style="bold")


def _run_parent(unfinished: StageRun, more_data: Sequence[str]) -> None:
    """Run a stage in a process of its own. Exits with its exit code if it fails."""
    # what these options chose is already announced
    options = stage_command(unfinished.stage, more_data, "hw", "directory", "guide")
    command_line = [sys.executable, "-P", "-m", "rlhf.cli", *options, "--recipe", str(unfinished.loaded.directory)]
    with endings.reporting_progress(lambda: runner.progress(unfinished)):
        code = children.run_child(command_line)
        if code < 0 or code - 128 in endings.SIGNALS:  # a signal that only the child received
            raise endings.stop_for(-code if code < 0 else code - 128)
    if code:
        sys.exit(code)


def report_done(run: StageRun) -> bool:
    """Return whether a stage is finished, here or in another root; print where."""
    path = _where_finished(run)
    if path:
        screen.OUT.print(f"{run.stage}: done ({path})")
    return path is not None


def _where_finished(run: StageRun) -> Path | None:
    """Return where a stage is finished, here or in another root; None if it is not."""
    return run.parents.elsewhere(run.stage) or (run.path if run.done() is not None else None)


def stage_command(stage: StageName, more_data: Sequence[str], *leave_out: str) -> list[str]:
    """Return the command that runs another stage with the options that were typed, except `leave_out`."""
    files = [word for file in more_data for word in ("--data", file)]
    return ["run", stage, *typed_options({*leave_out, *OF_A_CHAIN}), *files]


def predict_peak(loaded: PinnedRecipe, stage: StageName) -> int | None:
    """Return the predicted peak in bytes, None without a prediction. Raises UserError if it does not fit."""
    with working(f"{stage}: predicting its memory"), Predictor() as predictor:
        return require_fit(predictor.predict, loaded, stage, shlex.join(typed_options(only=NAMES_RECIPE)))
