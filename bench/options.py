"""Options that the benchmarks share: the recipe, its changes, its stages, the file for the record."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from bench.records import RESULTS
from rlhf.cli import container
from rlhf.cli.choice import Choice
from rlhf.errors import UserError
from rlhf.recipe import PinnedRecipe, StageName

OUT = click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Also write the record there.")
SAVE = click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the record to this new JSON file; needs committed code.",
)


def recipe(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --hw, --guide, --recipe, --set and --runtime, of which `load` makes a recipe."""
    for option in (
        click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key. May be repeated."),
        click.option("--recipe", "directory", type=click.Path(path_type=Path), metavar="DIR", help="Instead of --hw."),
        click.option("--guide", is_flag=True, help="The version with a published guide's settings."),
        container.OPTION,
        click.option("--hw", metavar="NAME", default="cpu", show_default=True, help="Hardware: its default recipe."),
    ):
        command = option(command)
    return command


def load(
    hw: str, guide: bool, directory: Path | None, changes: tuple[str, ...], on_device: bool = False
) -> PinnedRecipe:
    """Return the recipe that the options name; raises what `rlhf.cli.choice.Choice.load` does.

    `on_device`: a recipe for a GPU is measured in the container image, as it is trained there; then this never returns.
    """
    loaded = Choice(None if directory else hw, directory, guide, changes=changes).load()
    if on_device:
        container.enter(loaded, RESULTS)
    return loaded


def stages(choices: Sequence[StageName]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option that names some of the stages in `choices`."""
    text = "Measure only this stage; may be repeated. [default: all]"
    return click.option("--stage", "stages", multiple=True, type=click.Choice(choices), help=text)


def stages_of(loaded: PinnedRecipe, chosen: Sequence[StageName], measurable: Sequence[StageName]) -> list[StageName]:
    """Return the chosen stages, or all `measurable` ones of the recipe. Raises UserError for one that it lacks."""
    for stage in chosen:
        if loaded.recipe.section(stage) is None:
            raise UserError(f"--stage {stage}: {loaded.directory} has no section {stage}")
    return [s for s in measurable if loaded.recipe.section(s) is not None and s in (chosen or measurable)]
