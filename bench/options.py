"""The options that name a recipe, which several benchmarks share."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from rlhf import recipe
from rlhf.recipe import PinnedRecipe, StageName

HW = click.option("--hw", metavar="NAME", default="cpu", show_default=True, help="Hardware: its default recipe.")
RECIPE = click.option(
    "--recipe",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of a recipe, used instead of --hw.",
)
SET = click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key. May be repeated.")
STEPS = click.option(
    "--steps", "count", default=4, show_default=True, type=click.IntRange(min=2), help="Steps after warm-up."
)

StagesOption = Callable[[Callable[..., None]], Callable[..., None]]  # what adds the option to a command


def stages(choices: Sequence[StageName], default: str = "all") -> StagesOption:
    """Return the option that names some of the stages in `choices`; without it a program takes its `default`."""
    text = f"Measure only this stage; may be repeated. [default: {default}]"
    return click.option("--stage", "stages", multiple=True, type=click.Choice(choices), help=text)


def load(hw: str, directory: Path | None, changes: tuple[str, ...]) -> PinnedRecipe:
    """Return the recipe that the options name. Raises UserError where there is none, or a change does not fit it."""
    folder = directory or recipe.resolve(hw, recipe.default_root())
    return recipe.load(folder, recipe.parse_overrides(changes))
