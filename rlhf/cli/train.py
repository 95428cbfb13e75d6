"""`rlhf run`: one stage of a recipe."""

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from rlhf.cli import chain, report
from rlhf.cli.choice import PATH, RUN, Choice, chooses_recipe
from rlhf.cli.outcome import show_chain, show_samples, show_stage
from rlhf.errors import OptionError
from rlhf.observe import tracking, watch
from rlhf.process import children, distributed, endings, environment, launching
from rlhf.process import task as tasks
from rlhf.process.task import Task
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import EVALUATE, MERGE, POLICIES, SFT, STAGES, PolicyName
from rlhf.run.directory import StageRun
from rlhf.run.finished import read_summary
from rlhf.stages import runner
from rlhf.terminal import screen


def _run_resolved(context: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    """Run the task in a file and end the command. No other argument is read."""
    if file is not None:
        task = tasks.read(file)
        run_task(task, task.load())
        context.exit()


@click.command()
@click.option(
    "--resolved",
    type=PATH,
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_run_resolved,
    help="Run what this file says and nothing else; other commands write it for a stage's own process.",
)
@click.argument("stage", type=click.Choice(STAGES))
@RUN
@chooses_recipe
@click.option("--with-parents", is_flag=True, help="First run the stages that this one builds on, unless finished.")
@click.option("--resume/--restart", default=None, help="Continue an unfinished stage, or set it aside and begin anew.")
@click.option(
    "--report-to", multiple=True, type=click.Choice(tracking.TRACKERS), help="Also send the metrics to this tracker."
)
@click.option("--if-needed", is_flag=True, help="Succeed at once if the stage is finished, or not in the recipe.")
@click.option("--only", multiple=True, type=click.Choice(POLICIES), help="Evaluate this policy, not all.")
@click.option(
    "--stop-on",
    multiple=True,
    type=click.Choice([*watch.CHECK_NAMES, "all"]),
    help="End the stage when this check finds something.",
)
@click.option("--preflight/--no-preflight", default=True, help="Refuse a stage that is predicted not to fit the card.")
def run(
    choice: Choice, stage: StageName, with_parents: bool, if_needed: bool, only: tuple[PolicyName, ...], **others: Any
) -> None:
    """Run one stage of a recipe.

    The stages that it builds on must be finished; --with-parents runs them first. With RUN the stage is run there.
    --report-to, --only and --stop-on may be repeated.
    """
    if only and stage != EVALUATE:
        raise OptionError(f"--only: it names policies to evaluate, and {stage} evaluates none; leave it out")
    loaded = choice.load(stage, others=not if_needed, on_device=True)
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in others.items()}
    task = tasks.task_of(loaded, stage, choice.root, if_needed=if_needed, only=list(only), **options)
    if with_parents and (not if_needed or loaded.recipe.section(stage) is not None):
        environment.prepare(loaded.recipe)  # the checks of the chain import torch
        this_run = _stage_run(task, loaded)
        parents = [_stage_run(task.of(name, only=[]), loaded) for name in chain.stages_before(this_run)]
        chain.check_chain([*parents, this_run], task.preflight)
        chain.run_parents(task, parents)
    path = run_task(task, loaded)
    if path is not None and not children.part_of_command():
        show_chain({name: s for name in STAGES if (s := read_summary(path.parent / name))})
        for command in _next(stage, path, loaded):
            screen.OUT.print(f"next: rlhf {command}", style="dim", soft_wrap=True)
        report.after_run(path.parent)


def _next(stage: StageName, path: Path, loaded: PinnedRecipe) -> Iterator[str]:
    """Yield the commands that may follow a finished stage in `path`; its run has all settings."""
    of_run = shlex.quote(str(path.parent))
    if stage in (SFT, MERGE, *POLICIES):
        yield f"chat {of_run}/{stage}"
    if stage in POLICIES:
        yield f"run {EVALUATE} {of_run}"
    if stage == EVALUATE and loaded.recipe.merge:
        yield f"run {MERGE} {of_run}"
    if stage == MERGE:
        yield f"serve {of_run}"


def _stage_run(task: Task, loaded: PinnedRecipe) -> StageRun:
    return StageRun(Path(task.out), loaded, task.stage, only=task.only)


def run_task(task: Task, loaded: PinnedRecipe) -> Path | None:
    """Run a stage and print what came of it. Return its folder; None where this process has nothing to say of it."""
    stage = task.stage
    if task.if_needed and loaded.recipe.section(stage) is None:
        screen.OUT.print(f"{stage}: not part of {loaded.name} {loaded.version}")
        return None
    environment.prepare(loaded.recipe)
    this_run = _stage_run(task, loaded)
    if task.if_needed and chain.report_done(this_run):
        return None
    if loaded.recipe.processes(stage) > 1 and not distributed.launched() and this_run.done() is None:
        with endings.reporting_progress(lambda: runner.progress(this_run)):
            launching.launch(loaded, task)
        return None
    preflight = partial(chain.forecast, loaded, stage) if task.preflight else runner.Forecast
    summary, is_new = runner.execute(task, loaded, preflight)
    if summary is None or distributed.rank():
        return None
    if not is_new:
        screen.OUT.print(f"{stage}: done before ({this_run.path}); nothing was run")
    show_stage(summary)
    if is_new:
        screen.OUT.print(f"written to {this_run.path}", style="dim")
        if stage in (SFT, *POLICIES, EVALUATE):
            show_samples(this_run.path)
    return this_run.path
