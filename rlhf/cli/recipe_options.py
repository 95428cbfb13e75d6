"""Decorators for commands that work on a recipe: the options that name it and change it, or a run that has them all."""

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from rlhf.cli import container
from rlhf.cli.choice import RECIPE_ROOT, Choice, recipes_root
from rlhf.cli.options import SEED, OutputFile, typed_options
from rlhf.errors import OptionError
from rlhf.recipe.stages import POLICIES
from rlhf.run.named import is_run, named_run

Command = Callable[..., None]
AMONG_OTHERS = ("files", "rewards")  # parameters among whose words a run directory may be
OF_THE_RUN = (
    "hw",
    "directory",
    "guide",
    "out",
    "data",
    "weights",
    "seed",
)  # parameters whose values a run directory has
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
RUN = click.argument(
    "run",
    metavar="[RUN]",
    required=False,
    type=click.Path(path_type=Path),
    callback=lambda context, parameter, path: None if path is None else named_run(path),
)
RECIPES = click.option(
    "--recipe-root",
    metavar="DIR",
    type=click.Path(path_type=Path),
    callback=lambda context, parameter, folder: folder and context.meta.update({RECIPE_ROOT: folder}),
    expose_value=False,
    help="Folder of recipes. [default: RLHF_RECIPES, recipes/ here, or the installed ones]",
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
    `on_device`: the command computes on the recipe's device, so that it may run in the container image. A run that is
    named beside them has all these settings.
    """
    folder = click.Path(path_type=Path)
    options = [
        click.option("--hw", metavar="NAME", help=hw),
        click.option("--recipe", "directory", metavar="DIR", type=folder, help="Folder of a recipe, instead of --hw."),
        click.option("--guide", is_flag=True, help=GUIDE),
        data and click.option("--data", multiple=True, metavar="FILE", help=data),
        weights and click.option("--weights", metavar="random|DIR|FILE.gguf", help=weights),
        out and click.option("--out", type=folder, help=OUT),
        changes and click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help=changes),
        seed and click.option("--seed", type=SEED, metavar="N", help=seed),
        RECIPES,
        on_device and container.OPTION,
    ]
    texts = {"data": data, "weights": weights, "changes": changes, "seed": seed, "run": None}
    names = [field.name for field in fields(Choice) if texts.get(field.name, True)]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_choice(**values: Any) -> None:
            choice = _with_run(Choice(**{name: values.pop(name) for name in names}), values)
            if on_device:
                _enter_container(choice, values)
            command(choice=choice, **values)

        decorated: Command = with_choice
        for option in reversed(options):
            decorated = option(decorated) if callable(option) else decorated
        return decorated

    return decorate


def _with_run(choice: Choice, values: dict[str, Any]) -> Choice:
    """Take the run out of a command's arguments and put its root into them. Raises OptionError for settings beside it.

    A run may stand among files: the one word that is the folder of a run.
    """
    run = values.pop("run", None)
    for name in (name for name in AMONG_OTHERS if name in values):
        runs = [word for word in values[name] if is_run(Path(word))]
        values[name] = tuple(word for word in values[name] if word not in runs)
        if len(runs) > 1:
            raise click.UsageError(f"{' and '.join(map(str, runs))}: name one run")
        run = named_run(Path(runs[0])) if runs else None
    if run is not None:
        if taken := typed_options(*OF_THE_RUN):
            raise OptionError(f"{run}: a run with its own settings; leave out {' and '.join(taken)}")
        choice = replace(choice, run=run)
    if values.get("out", "") is None:
        values["out"] = run.out if run else choice.root_of_runs()
    return choice


def _enter_container(choice: Choice, values: dict[str, Any]) -> None:
    """Go on in the container image where the recipe's device asks for it, showing it what the command names."""
    outputs = [p.name for p in click.get_current_context().command.params if isinstance(p.type, OutputFile)]
    written = [file.parent for name in outputs if name and (file := values.get(name))]
    written += [values["out"]] if "out" in values else []
    named = [part for value in values.values() for part in (value if isinstance(value, tuple) else (value,))]
    read = [choice.directory, choice.weights, *choice.data, recipes_root(), *named]
    container.enter(choice.load(quiet=True), written, read, values.get("port"))


def pair_options(command: Command) -> Command:
    """Add what names a finished evaluation and two of its policies."""
    options = (
        RUN,
        chooses_recipe(out=True),
        click.option("--a", metavar="POLICY", help="Policy to compare against. [default: sft, or base]"),
        click.option(
            "--b",
            metavar="POLICY",
            help=f"Policy whose wins are counted. [default: the first of {', '.join(POLICIES)} that was trained]",
        ),
        click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Rate only the first N pairs."),
    )
    for option in reversed(options):
        command = option(command)
    return command
