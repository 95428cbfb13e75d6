"""`rlhf run`, `reproduce`, `results`, `recipes`, `fetch`: commands that make runs and list or fetch their inputs."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from rlhf import recipe, terminal
from rlhf.cli import next_steps
from rlhf.cli.choice import (
    CHANGES,
    NAMES_RECIPE,
    RECIPES,
    REUSE,
    TRAINING_HELP,
    Choice,
    chooses_recipe,
    recipes_root,
    typed_options,
)
from rlhf.cli.options import LARGEST_SEED, PRICE, Stage, StrictCommand
from rlhf.errors import OptionError, UserError
from rlhf.memory.predict import Predictor
from rlhf.memory.preflight import require_fit
from rlhf.observe import console, tracking, watch
from rlhf.process import distributed, endings, launching
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.run.directory import Run
from rlhf.run.finished import read_summary
from rlhf.run.parents import ParentMissing
from rlhf.run.reader import advising
from rlhf.run.records import Summary
from rlhf.stages import runner
from rlhf.stages.result import Result
from rlhf.use import fetch as fetching
from rlhf.use import reproduce as reproducing

OF_A_CHAIN = ("with_parents", "if_needed")  # options of `rlhf run` that its parents do not get
TRIAL_NOTE = (
    "pretrain: this recipe trains a tiny model from scratch on your rows: a trial of every step, not an assistant; "
    "recipes with a pretrained base make one (`rlhf recipes`)"
)


@click.command(cls=StrictCommand)
@click.argument("stage", type=Stage(), metavar="STAGE")
@click.argument("more_data", nargs=-1, metavar="")  # further files in `--data a.jsonl b.jsonl`
@chooses_recipe(**TRAINING_HELP, seed="Seed to use instead of the recipe's.", out=True)
@REUSE
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
@click.option("--with-parents", is_flag=True, help="First run the stages that this one builds on, unless finished.")
@click.option("--if-needed", is_flag=True, help="Succeed if the stage is finished, or not part of the recipe.")
@click.option(
    "--stop-on",
    multiple=True,
    metavar="CHECK",
    help="End the stage when this check of docs/watch.md finds something; all: any check. May be repeated.",
)
@click.option(
    "--preflight/--no-preflight",
    default=True,
    help="Refuse a stage that is predicted not to fit the card. [default: on]",
)
@PRICE
def run(
    choice: Choice,
    stage: recipe.StageName,
    more_data: tuple[str, ...],
    out: Path,
    reuse: Path | None,
    resume: bool | None,
    report_to: tuple[str, ...],
    with_parents: bool,
    if_needed: bool,
    stop_on: tuple[str, ...],
    preflight: bool,
    price: float | None,
) -> None:
    """Run one stage of a recipe.

    STAGE is pretrain, sft, rm, ppo, rloo, grpo, dpo, evaluate or merge. The stages that it builds on must be finished;
    the option --with-parents runs them first.
    """
    if more_data and not choice.data:
        raise click.UsageError(f"what is {more_data[0]!r}? Files to train on follow --data")
    _check_names(stop_on)
    loaded = choice.load(more_data)
    if if_needed and loaded.recipe.section(stage) is None:
        console.OUT.print(f"{stage}: not part of {loaded.name} {loaded.version}")
        return

    if with_parents:
        chain = (*recipe.stages_before(loaded.recipe, stage), stage)
        _check_chain([Run(out, loaded, name, reuse) for name in chain], preflight)
        _run_parents(loaded, stage, out, reuse, more_data)
    this_run = Run(out, loaded, stage, reuse)
    if if_needed and _report_done(this_run):
        return
    if launching.needs_launch(loaded.recipe, stage) and this_run.done() is None:
        with endings.reporting_progress(lambda: runner.progress(this_run)):
            launching.launch(loaded, stage)
        return
    try:
        summary, result, path = runner.execute(
            stage,
            loaded,
            out,
            resume=resume,
            report_to=report_to,
            preflight=lambda: _predict_peak(loaded, stage) if preflight else None,
            stop_on=stop_on,
            reuse_root=reuse,
        )
    except ParentMissing as error:
        resumed = ["--resume"] if error.begun else []
        command_line = shlex.join(["rlhf", *_command(error.parent, more_data, "resume"), *resumed])
        raise UserError(f"{error}: first run `{command_line}`, or add --with-parents") from error
    if summary is not None and not distributed.rank():
        _show_outcome(summary, result, path)
        if stage == "pretrain" and choice.data:
            terminal.say(TRIAL_NOTE)
        if not endings.part_of_command():
            finished = [s for name in recipe.STAGES if (s := read_summary(path.parent / name))]
            console.targets_table(finished, price)
            next_steps.show(stage, loaded.recipe, more_data)


def _show_outcome(summary: Summary, result: Result | None, path: Path) -> None:
    """Print the figures of a finished stage in `path`, and a sample; `result` is None if it was done before."""
    if result is None:
        console.OUT.print(f"{summary.stage}: done before ({path}); nothing was run", markup=False)
    console.summary_table(summary)
    if result is not None:
        console.OUT.print(f"written to {path}", style="dim", markup=False)
        if result.sample:
            console.show_sample("a held-out prompt", *result.sample)


def _check_names(stop_on: Sequence[str]) -> None:
    if unknown := [name for name in stop_on if name not in (*watch.CHECK_NAMES, "all")]:
        raise click.BadParameter(f"{unknown[0]} is none of {', '.join(watch.CHECK_NAMES)}, all", param_hint="--stop-on")


def _command(stage: StageName, more_data: Sequence[str], *leave_out: str) -> list[str]:
    """Return the command that runs another stage with the options that were typed, except `leave_out`."""
    files = [word for file in more_data for word in ("--data", file)]
    return ["run", stage, *typed_options({*leave_out, *OF_A_CHAIN}), *files]


def _finished(run: Run) -> Path | None:
    """Return where a stage is finished, here or in another root; None if it is not."""
    return run.parents.elsewhere(run.stage) or (run.path if run.done() is not None else None)


def _report_done(run: Run) -> bool:
    """Return whether a stage is finished, here or in another root; print where."""
    path = _finished(run)
    if path:
        console.OUT.print(f"{run.stage}: done ({path})", markup=False)
    return path is not None


def _check_chain(chain: Sequence[Run], preflight: bool) -> None:
    """Raise UserError, before any stage is trained, for one that would be refused later.

    That is a stage with settings that cannot run, one that is finished with other settings, and with `preflight` one
    that is predicted not to fit the card.
    """
    for run in chain:
        runner.check_section(run.loaded, run.stage)
    unfinished = [run for run in chain if _finished(run) is None]
    for run in unfinished:
        runner.check_settings(run.loaded, run.stage)
    if unfinished:
        runner.check_device(unfinished[0].loaded)  # without a GPU no prediction is needed
    if preflight and distributed.rank() == 0:
        for run in unfinished:
            _predict_peak(run.loaded, run.stage)


def _run_parents(
    loaded: PinnedRecipe, stage: recipe.StageName, out: Path, reuse: Path | None, more_data: Sequence[str]
) -> None:
    """Run the unfinished stages before `stage`, each in a process of its own. Exits if one fails."""
    before = recipe.stages_before(loaded.recipe, stage)
    several = False
    for number, parent in enumerate(before, 1):
        unfinished = Run(out, loaded, parent, reuse)
        if _report_done(unfinished):
            continue
        several = True
        _announce(number, len(before) + 1, parent)
        if other := unfinished.parents.settings_elsewhere(parent):
            console.OUT.print(f"{parent}: {other}; it is run anew", markup=False)
        _run_parent(unfinished, more_data)
    if several:
        _announce(len(before) + 1, len(before) + 1, stage)


def _announce(number: int, total: int, stage: StageName) -> None:
    """Print which stage of a chain begins."""
    console.OUT.print(f"stage {number} of {total}: {stage}", style="bold")


def _run_parent(unfinished: Run, more_data: Sequence[str]) -> None:
    """Run a stage in a process of its own. Exits with its exit code if it fails."""
    options = _command(unfinished.stage, more_data, "hw", "directory")  # what these chose is already announced
    command_line = [sys.executable, "-m", "rlhf.cli", *options, "--recipe", str(unfinished.loaded.directory)]
    with endings.reporting_progress(lambda: runner.progress(unfinished)):
        code = endings.run_child(command_line)
        if code < 0 or code - 128 in endings.SIGNALS:  # a signal that only the child received
            raise endings.stopped(-code if code < 0 else code - 128)
    if code:
        sys.exit(code)


def _predict_peak(loaded: PinnedRecipe, stage: StageName) -> int | None:
    """Return the predicted peak in bytes, None without a prediction. Raises UserError if it does not fit."""
    with console.working(f"{stage}: predicting its memory"), Predictor() as predictor:
        return require_fit(predictor.predict, loaded, stage, shlex.join(typed_options(only=NAMES_RECIPE)))


@click.command(cls=StrictCommand)
@chooses_recipe(**TRAINING_HELP, out=True)
@click.option("--seeds", metavar="LIST", default="0 1 2", show_default=True, help="Seeds, separated by spaces.")
@click.option(
    "--until",
    metavar="LIST",
    help="Last stages, separated by spaces. [default: ppo dpo, and evaluate if a target needs it]",
)
@PRICE
def reproduce(choice: Choice, out: Path, seeds: str, until: str | None, price: float | None) -> None:
    """Run a recipe's stages with several seeds and print mean ± sd.

    The table has a row for each target. Finished stages are kept, interrupted ones are resumed.
    """
    loaded = choice.load()
    for word in seeds.split() or [""]:
        if not word.isdecimal() or len(word) > 10 or int(word) > LARGEST_SEED:
            raise click.BadParameter(f"{seeds!r}: whole numbers below 2^32, separated by spaces", param_hint="--seeds")
    numbers = [int(seed) for seed in seeds.split()]
    if len(set(numbers)) < len(numbers):
        raise click.BadParameter(f"{seeds!r} names a seed twice, whose spread would be 0", param_hint="--seeds")
    try:
        named = None if until is None else [recipe.stage_name(word) for word in until.split() or [""]]
    except UserError as error:
        raise click.BadParameter(str(error), param_hint="--until") from None
    chain = reproducing.chain(loaded, named or reproducing.final_stages(loaded))
    options = ["--recipe", str(loaded.directory), *typed_options(only=TRAINING_HELP)]
    reproducing.run_seeds(chain, numbers, out, options)
    reproducing.show(reproducing.record(loaded, chain, numbers, out, price), out)


@click.command(cls=StrictCommand)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def results(file: Path) -> None:
    """Print the record of a reproduction as a Markdown table.

    FILE is the record that `rlhf reproduce` wrote below its --out.
    """
    with advising("name the record that `rlhf reproduce` wrote, such as runs/seeds/cpu-tiny-v2.json"):
        click.echo(terminal.harmless(reproducing.table_of(file)))


@click.command("recipes", cls=StrictCommand)
@RECIPES
def list_recipes() -> None:
    """List the recipes, with their hardware and status."""
    rows = []
    root = recipes_root()
    if not recipe.available(root):
        raise OptionError(recipe.no_recipes(root))
    for directory in recipe.available(root):
        keys = recipe.load(directory).recipe
        default = "default" if keys.default and recipe.resolve(keys.hardware.name, root) == directory else ""
        rows.append((str(directory), keys.hardware.name, keys.status, default, keys.description))
    console.rows_table("recipes", ("folder", "hardware", "status", "", "description"), rows)


@click.command(cls=StrictCommand)
@chooses_recipe(changes=CHANGES)
def fetch(choice: Choice) -> None:
    """Download and check a recipe's pinned model and data.

    They go to the hub's cache. Stages then need no network.
    """
    loaded = choice.load()
    if not fetching.sources(loaded.recipe):
        console.OUT.print(f"{loaded.name} {loaded.version} takes nothing from the hub: there is nothing to fetch")
        return
    with console.quiet_libraries():
        fetching.show(list(fetching.fetch(loaded.recipe)))
