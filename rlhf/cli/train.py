"""`rlhf run`: one stage of a recipe."""

import shlex
import sys
from pathlib import Path

import click

from rlhf import terminal
from rlhf.cli import chain, report
from rlhf.cli.choice import Choice
from rlhf.cli.options import PRICE
from rlhf.cli.recipe_options import RUN, TRAINING_HELP, chooses_recipe
from rlhf.cli.summary_tables import summary_table, targets_table
from rlhf.errors import OptionError
from rlhf.observe import tracking, watch
from rlhf.process import children, cuda, distributed, endings, launching
from rlhf.process import task as tasks
from rlhf.process.task import Task
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.stages import EVALUATE, MERGE, POLICIES, PRETRAIN, SFT, STAGES, PolicyName
from rlhf.run.directory import StageRun
from rlhf.run.finished import read_summary
from rlhf.run.records import Summary
from rlhf.stages import runner
from rlhf.stages.result import Result
from rlhf.terminal import screen
from rlhf.terminal.tables import show_sample

TRIAL_NOTE = (
    "pretrain: this recipe trains a tiny model from scratch on your rows: a trial of every step, not an assistant; "
    "recipes with a pretrained base make one (`rlhf recipes`)"
)


HELP = f"""Run one stage of a recipe.

STAGE is {", ".join(STAGES[:-1])} or {STAGES[-1]}. The stages that it builds on must be finished; the option
--with-parents runs them first. RUN is a run directory, <out>/<recipe>/<version>, or a stage's folder in it: this stage
is run there, with that run's settings.
"""


def _run_resolved(context: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    """Run the task in a file and end the command. No other argument is read."""
    if file is not None:
        task = tasks.read(file)
        sys.argv[:] = task.argv  # what records and messages name
        run_task(task, task.load())
        context.exit()


@click.command(help=HELP)
@click.option(
    "--resolved",
    type=click.Path(path_type=Path),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_run_resolved,
    help="Run what this file says and nothing else; other commands write it for a stage's own process.",
)
@click.argument("stage", type=click.Choice(STAGES), metavar="STAGE")
@RUN
@chooses_recipe(**TRAINING_HELP, seed="Seed to use instead of the recipe's.", out=True, on_device=True)
@click.option(
    "--with-parents", is_flag=True, help="First run the stages that this one builds on, unless they are finished."
)
@click.option(
    "--resume/--restart",
    default=None,
    help="Continue an unfinished run from its newest checkpoint, or set it aside and begin anew.",
)
@click.option(
    "--report-to",
    multiple=True,
    type=click.Choice(tracking.TRACKERS),
    help="Also send the metrics to this tracker. May be repeated.",
)
@click.option(
    "--if-needed", is_flag=True, help="Do nothing, and succeed, if the stage is finished or not part of the recipe."
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(POLICIES),
    help="Evaluate this policy instead of all that are trained. May be repeated.",
)
@click.option(
    "--stop-on",
    multiple=True,
    type=click.Choice([*watch.CHECK_NAMES, "all"]),
    metavar="CHECK",
    help=f"End the stage when this check finds something: {', '.join(watch.CHECK_NAMES)}, or all. May be repeated.",
)
@click.option(
    "--preflight/--no-preflight",
    default=True,
    help="Refuse a stage that is predicted not to fit the card. [default: on]",
)
@PRICE
def run(
    choice: Choice,
    stage: StageName,
    out: Path,
    resume: bool | None,
    report_to: tuple[str, ...],
    with_parents: bool,
    if_needed: bool,
    only: tuple[PolicyName, ...],
    stop_on: tuple[str, ...],
    preflight: bool,
    price: float | None,
) -> None:
    """Run one stage; `HELP` says how."""
    if only and stage != EVALUATE:
        raise OptionError(f"--only: it names policies to evaluate, and {stage} evaluates none; leave it out")
    loaded = choice.load(merging=stage == MERGE, stage=None if if_needed else stage)
    task = tasks.task_of(
        loaded,
        stage,
        out,
        resume=resume,
        report_to=list(report_to),
        stop_on=list(stop_on),
        only=list(only),
        preflight=preflight,
        if_needed=if_needed,
    )
    if with_parents and (not if_needed or loaded.recipe.section(stage) is not None):
        cuda.set_environment(loaded.recipe)  # the checks of the chain import torch
        this_run = StageRun(out, loaded, stage, only=only)
        parents = [StageRun(out, loaded, name) for name in chain.stages_before(this_run)]
        chain.check_chain([*parents, this_run], preflight)
        chain.run_parents(task, parents)
    path = run_task(task, loaded)
    if path is not None and not children.part_of_command():
        targets_table([s for name in STAGES if (s := read_summary(path.parent / name))], price)
        _show_next(stage, path, loaded.recipe)
        report.after_run(path.parent, price)


def _show_next(stage: StageName, path: Path, recipe: Recipe) -> None:
    """Print what may follow a finished stage in `path`: commands on its run, which has all settings."""
    of_run, of_stage = shlex.quote(str(path.parent)), shlex.quote(str(path))
    if stage in (SFT, MERGE, *POLICIES):
        screen.OUT.print(f"next: rlhf chat {of_stage}", style="dim", soft_wrap=True)
    if stage in POLICIES:
        screen.OUT.print(f"next: rlhf run {EVALUATE} {of_run}", style="dim", soft_wrap=True)
    if stage == EVALUATE and recipe.merge:
        screen.OUT.print(f"next: rlhf run {MERGE} {of_run}", style="dim", soft_wrap=True)
    if stage == MERGE:
        screen.OUT.print(f"next: rlhf serve {of_run}", style="dim", soft_wrap=True)


def run_task(task: Task, loaded: PinnedRecipe) -> Path | None:
    """Run a stage and print what came of it. Return its folder; None where this process has nothing to say of it."""
    stage, out = task.stage, Path(task.out)
    if task.if_needed and loaded.recipe.section(stage) is None:
        screen.OUT.print(f"{stage}: not part of {loaded.name} {loaded.version}")
        return None
    cuda.set_environment(loaded.recipe)
    this_run = StageRun(out, loaded, stage, only=task.only)
    if task.if_needed and chain.report_done(this_run):
        return None
    if launching.needs_launch(loaded.recipe, stage) and this_run.done() is None:
        with endings.reporting_progress(lambda: runner.progress(this_run)):
            launching.launch(loaded, task)
        return None
    summary, result, path = runner.execute(
        stage,
        loaded,
        out,
        resume=task.resume,
        report_to=task.report_to,
        preflight=lambda: chain.forecast(loaded, stage) if task.preflight else runner.Forecast(),
        stop_on=task.stop_on,
        only=task.only,
    )
    if summary is None or distributed.rank():
        return None
    _show_outcome(summary, result, path, restart=task.resume is False)
    if stage == PRETRAIN and "data.files" in loaded.overrides:
        terminal.say(TRIAL_NOTE)
    return path


def _show_outcome(summary: Summary, result: Result | None, path: Path, *, restart: bool) -> None:
    """Print the figures of a finished stage in `path`, and a sample; `result` is None if it was done before."""
    if result is None:
        screen.OUT.print(f"{summary.stage}: done before ({path}); nothing was run")
        if restart:
            way_out = "to run it again, move that folder away, or choose another --out"
            terminal.say(f"--restart is for unfinished runs; {way_out}")
    summary_table(summary)
    if result is not None:
        screen.OUT.print(f"written to {path}", style="dim")
        if result.examples:
            title = f"held-out prompts, {result.examples.rule}"
            for number, example in enumerate(result.examples.shown):
                show_sample("" if number else title, *example)
