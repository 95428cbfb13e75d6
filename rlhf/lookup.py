"""How a command finds a recipe and earlier runs: --hw, --recipes, --parents, and which version of a recipe it takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rlhf import distributed, recipe
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
    help="Folder of recipes. [RLHF_RECIPES, or recipes/ here, or the ones that came along]",
)


PARENTS = click.option(
    "--parents",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="ROOT",
    help="Another root of runs, whose finished stages are used where --out has none.",
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
        help="Hardware: its default recipe, newest released version (a draft if none is).",
    )
    return option(RECIPES(command))


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
