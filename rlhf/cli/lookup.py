"""Options by which commands find a recipe and runs, and which version of a recipe --hw takes."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rlhf import recipe
from rlhf.options import SEED, RunsFolder
from rlhf.process import distributed
from rlhf.terminal import say

KEY = "rlhf.recipes"  # where a command's --recipes is kept, in click's context


def _keep(context: click.Context, parameter: click.Parameter, folder: Path | None) -> None:
    """Remember --recipes for `recipes_root`."""
    if folder is not None:
        context.meta[KEY] = folder


RECIPES = click.option(
    "--recipes",
    metavar="DIR",
    type=click.Path(path_type=Path),
    callback=_keep,
    expose_value=False,
    help="Folder of recipes. [default: RLHF_RECIPES, recipes/ here, or the installed ones]",
)


PARENTS = click.option(
    "--parents",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="ROOT",
    help="Another root of runs; its finished stages are used if --out has none.",
)


def _hardware_names(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Names that a shell may complete after --hw."""
    names = {recipe.load(directory).recipe.hardware.name for directory in recipe.available(recipes_root())}
    return sorted(name for name in names if name.startswith(typed))


def hardware_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --hw and --recipes to a command."""
    option = click.option(
        "--hw",
        metavar="NAME",
        shell_complete=_hardware_names,
        help="Hardware; takes its default recipe in the newest released version, or else a draft.",
    )
    return option(RECIPES(command))


FOLDER = click.option(
    "--recipe",
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder of a recipe, used instead of --hw.",
)
OUT = click.option(
    "--out", default="runs", type=RunsFolder(path_type=Path), show_default=True, help="Root of all run directories."
)

CHANGES = click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe.")
RUN_SEED = click.option("--seed", type=SEED, help="Seed that the run was started with, if any.")


def recipe_options(data: str, weights: str, changes: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options naming a recipe, its changes and its run directory.

    The arguments are the help texts of --data, --weights and --set.
    """
    options = (
        hardware_options,
        FOLDER,
        click.option("--data", multiple=True, metavar="FILE", help=data),
        click.option("--weights", metavar="random|DIR", help=weights),
        OUT,
        click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help=changes),
    )

    def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add_options


TRAINING_OPTIONS = recipe_options(
    data="Train on these files instead of the recipe's data.",
    weights="Start from random weights with stand-in data, or from a local checkpoint's folder.",
    changes="Change a key of the recipe; the run is marked modified.",
)
RUN_OPTIONS = recipe_options(
    data="Data files that the run was started with, if any.",
    weights="Weights that the run was started with, if any.",
    changes="Key of the recipe that was changed for the run.",
)


def pair_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name a finished evaluation and two of its policies."""
    options = (
        hardware_options,
        FOLDER,
        OUT,
        click.option("--a", metavar="POLICY", help="Policy to compare against. [default: sft]"),
        click.option("--b", metavar="POLICY", help="Policy whose wins are counted. [default: ppo, or dpo without ppo]"),
        click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Rate only the first N pairs."),
    )
    for option in reversed(options):
        command = option(command)
    return command


NAMES_RECIPE = ("hw", "directory", "changes")  # options, as a command's parameters


def typed_options(leave_out: Collection[str] = (), only: Collection[str] | None = None) -> list[str]:
    """Return the options of the running command as they were typed, for another command line.

    Those in `leave_out` are left out; `only`: all but these are.
    """
    words, context = recipes_given(), click.get_current_context()
    for option in context.command.params:
        name, typed = str(option.name), context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if not isinstance(option, click.Option) or not option.expose_value or not typed:
            continue
        if name in leave_out or (only is not None and name not in only):
            continue
        value = context.params[name]
        if option.is_flag:
            words.append((option.opts if value else option.secondary_opts)[-1])
        else:
            words += [word for one in (value if option.multiple else [value]) for word in (option.opts[0], str(one))]
    return words


def recipes_root() -> Path:
    """The folder in which --hw looks: --recipes, or the default."""
    context = click.get_current_context(silent=True)
    return (context.meta.get(KEY) if context else None) or recipe.default_root()


def recipes_given() -> list[str]:
    """--recipes as it was given, as words of a command line."""
    context = click.get_current_context(silent=True)
    return ["--recipes", str(context.meta[KEY])] if context and KEY in context.meta else []


def announce_version(hw: str, directory: Path) -> None:
    """Say on stderr, in one line, which of a recipe's versions `--hw` takes and what the first one is.

    Silent where there is only one version, and in a process that a launcher has started: its parent has said it.
    """
    versions = [d for d in recipe.available(recipes_root()) if d.parent == directory.parent]
    if len(versions) == 1 or distributed.launched():
        return
    line = f"--hw {hw} takes {directory.parent.name} {directory.name}"
    if directory != versions[0]:
        line += f'; --recipe {versions[0]} is "{recipe.load(versions[0]).recipe.description}"'
    say(line)
