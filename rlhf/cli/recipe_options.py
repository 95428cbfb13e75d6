"""Decorators for commands that work on a recipe: the options that name it and change it."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from rlhf import recipe as recipes
from rlhf.cli import container
from rlhf.cli.choice import RECIPE_ROOT, Choice, recipes_root
from rlhf.cli.options import SEED, OutputFile, RunsFolder, WholeNumber, existing_root, typed_options
from rlhf.cli.run_argument import AMONG_OTHERS, OF_THE_RUN, RUN, run_among
from rlhf.errors import OptionError
from rlhf.recipe import Recipe
from rlhf.recipe.stages import POLICIES
from rlhf.recipe.strict import dotted_keys
from rlhf.run.named import NamedRun

Command = Callable[..., None]
HARDWARE = "Take the default recipe of this hardware; `rlhf recipes` lists both. This or --recipe must be given."
GUIDE = "With --hw: take the version that keeps the settings of a published guide, where there is one."
OUT = "Root of all runs. [default: runs, or a folder in it where --weights, --data or --seed is given]"
SET_HELP = "Change a key of the recipe. May be repeated."
TRAINING_HELP = {
    "data": "Train on this file instead of the recipe's data. May be repeated.",
    "weights": "Start from random weights with stand-in data, or from a local checkpoint's folder.",
    "changes": "Change a key of the recipe; the run is marked modified. May be repeated.",
}
RUN_HELP = {
    "data": "Data file that the run was started with, if any. May be repeated.",
    "weights": "Weights that the run was started with, if any.",
    "changes": "Key of the recipe that was changed for the run. May be repeated.",
    "seed": "Seed that the run was started with, if any.",
}


def _keep(context: click.Context, parameter: click.Parameter, folder: Path | None) -> None:
    """Remember --recipe-root for `recipes_root`."""
    if folder is not None:
        context.meta[RECIPE_ROOT] = folder


def _hardware_names(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Return the names with which a shell may complete --hw."""
    names = {recipes.load(directory).recipe.hardware.name for directory in recipes.available(recipes_root())}
    return sorted(name for name in names if name.startswith(typed))


def _recipe_keys(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Return the keys with which a shell may complete --set."""
    return [f"{key}=" for key in dotted_keys(Recipe) if key.startswith(typed)]


RECIPES = click.option(
    "--recipe-root",
    metavar="DIR",
    type=click.Path(path_type=Path),
    callback=_keep,
    expose_value=False,
    help="Folder of recipes. [default: RLHF_RECIPES, recipes/ here, or the installed ones]",
)
REUSE = click.option(
    "--reuse",
    type=RunsFolder(path_type=Path),
    callback=existing_root,
    metavar="ROOT",
    help="Another root of runs; its finished stages are used if --out has none.",
)


def chooses_recipe(
    *,
    data: str | None = None,
    weights: str | None = None,
    changes: str | None = None,
    seed: str | None = None,
    hw: str = HARDWARE,
    out: bool = False,
    on_device: bool = False,
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options naming a recipe; the command gets them as one argument, `choice`.

    The arguments are the help texts of --data, --weights, --set, --seed and --hw; an option without a text is left out.
    `out` adds --out, which the command gets as an argument of its own; its default says what is not the recipe's.
    `on_device`: the command computes on the recipe's device, so that it may run in the container image.
    """
    options: list[Callable[[Command], Command]] = [
        click.option(
            "--hw",
            metavar="NAME",
            shell_complete=_hardware_names,
            help=hw,
        ),
        click.option(
            "--recipe",
            "directory",
            metavar="DIR",
            type=click.Path(path_type=Path),
            help="Folder of a recipe, used instead of --hw.",
        ),
        click.option("--guide", is_flag=True, help=GUIDE),
    ]
    if data:
        options.append(click.option("--data", multiple=True, metavar="FILE", help=data))
    if weights:
        options.append(click.option("--weights", metavar="random|DIR|FILE.gguf", help=weights))
    if out:
        root = RunsFolder(path_type=Path)
        options.append(click.option("--out", type=root, help=OUT))
    if changes:
        options.append(
            click.option(
                "--set", "changes", multiple=True, metavar="KEY=VALUE", shell_complete=_recipe_keys, help=changes
            )
        )
    if seed:
        options.append(click.option("--seed", type=SEED, metavar="N", help=seed))
    options += [RECIPES, container.OPTION] if on_device else [RECIPES]
    texts = {"data": data, "weights": weights, "changes": changes, "seed": seed}
    names = [field.name for field in fields(Choice) if texts.get(field.name, True) and field.name != "run"]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_choice(**values: Any) -> None:
            _call(command, names, values, on_device)

        decorated: Command = with_choice
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def _call(command: Command, names: Sequence[str], values: dict[str, Any], on_device: bool) -> None:
    """Call a command with its choice, whose parts have these `names`, and with the root of the run that was named."""
    choice = Choice(**{name: values.pop(name) for name in names})
    run, values = _run_of(values, alone=not (choice.hw or choice.directory or choice.data))
    if run is not None:
        _refuse_settings(run, [name for name in OF_THE_RUN if name in (*names, "out")])
        choice = replace(choice, run=run)
        values |= {"out": run.out} if "out" in values else {}
    elif values.get("out", "") is None:
        values["out"] = choice.root_of_runs()
    if on_device:
        written = [values["out"]] * ("out" in values) + _folders_of_outputs(values)
        named = [part for value in values.values() for part in (value if isinstance(value, tuple) else (value,))]
        read = [choice.directory, choice.weights, *choice.data, recipes_root(), *named]
        container.enter(choice.load(quiet=True), written, read, values.get("port"))
    command(choice=choice, **values)


def _folders_of_outputs(values: dict[str, Any]) -> list[Path]:
    """Return the folders of the files that the running command writes."""
    outputs = (p.name for p in click.get_current_context().command.params if isinstance(p.type, OutputFile))
    return [file.parent for name in outputs if name and (file := values.get(name))]


def _run_of(values: dict[str, Any], alone: bool) -> tuple[NamedRun | None, dict[str, Any]]:
    """Return the run directory among a command's arguments, and its other arguments. Raises what `run_among` does."""
    run, others = values.pop("run", None), dict(values)
    for name in AMONG_OTHERS:
        if name in values:
            run, others[name] = run_among(values[name], alone)
    return run, others


def _refuse_settings(run: NamedRun, names: Iterable[str]) -> None:
    """Raise OptionError if options were typed whose values the run has."""
    if taken := typed_options(*names):
        raise OptionError(f"{run}: a run with its own settings; leave out {' and '.join(taken)}")


def pair_options(command: Command) -> Command:
    """Add what names a finished evaluation and two of its policies."""
    options = (
        RUN,
        chooses_recipe(out=True),
        click.option(
            "--a",
            metavar="POLICY",
            help="Policy to compare against. [default: sft, or base]",
        ),
        click.option(
            "--b",
            metavar="POLICY",
            help=f"Policy whose wins are counted. [default: the first of {', '.join(POLICIES)} that was trained]",
        ),
        click.option("--limit", type=WholeNumber(min=1), metavar="N", help="Rate only the first N pairs."),
    )
    for option in reversed(options):
        command = option(command)
    return command
