"""Options that several benchmarks share: of the recipe, of the steps, of the file for the record."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from bench.paths import RESULTS
from bench.provenance import require_committed_code, require_new_file
from rlhf.cli import container, recipe_options
from rlhf.cli.choice import Choice
from rlhf.cli.options import HELP_SETTINGS, OUTPUT, OneOf, StrictCommand, WholeNumber
from rlhf.errors import UserError
from rlhf.recipe import PinnedRecipe, StageName

command = partial(click.command, cls=StrictCommand, context_settings=HELP_SETTINGS)
_HW = click.option("--hw", metavar="NAME", default="cpu", show_default=True, help="Hardware: its default recipe.")
_GUIDE = "bench.guide"  # key of --guide in click's context, where `load` finds it


def _keep_guide(context: click.Context, parameter: click.Parameter, guide: bool) -> None:
    context.meta[_GUIDE] = guide


def HW(command: Callable[..., None]) -> Callable[..., None]:
    """Add --hw, and --guide, which no command takes without it."""
    guide = click.option("--guide", is_flag=True, expose_value=False, callback=_keep_guide, help=recipe_options.GUIDE)
    return container.OPTION(_HW(guide(command)))


RECIPE = click.option(
    "--recipe",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of a recipe, used instead of --hw.",
)
SET = click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key. May be repeated.")
STEPS = click.option(
    "--steps", "count", default=4, show_default=True, type=WholeNumber(min=2), help="Steps after warm-up."
)


def _record_file(context: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    """Return the file for a record. Raises UserError before anything is measured if none could be kept there."""
    if file is not None:
        require_committed_code()
        require_new_file(file)
    return file


SAVE = click.option(
    "--save",
    type=OUTPUT,
    callback=_record_file,
    metavar="FILE",
    help="Write the record to this new JSON file; needs committed code.",
)

StagesOption = Callable[[Callable[..., None]], Callable[..., None]]  # what adds the option to a command


def stages(choices: Sequence[StageName], default: str = "all") -> StagesOption:
    """Return the option that names some of the stages in `choices`; without it a program takes its `default`."""
    text = f"Measure only this stage; may be repeated. [default: {default}]"
    return click.option("--stage", "stages", multiple=True, type=OneOf(choices), help=text)


def stages_of(loaded: PinnedRecipe, chosen: Sequence[StageName], measurable: Sequence[StageName]) -> list[StageName]:
    """Return the chosen stages, or all `measurable` ones of the recipe. Raises UserError for one that it lacks."""
    lacking = [stage for stage in chosen if loaded.recipe.section(stage) is None]
    if lacking:
        raise UserError(f"--stage {lacking[0]}: {loaded.directory} has no section {lacking[0]}")
    return [
        stage for stage in measurable if loaded.recipe.section(stage) is not None and stage in (chosen or measurable)
    ]


def load(hw: str, directory: Path | None, changes: tuple[str, ...], on_device: bool = False) -> PinnedRecipe:
    """Return the recipe that the options name, with --guide; raises what `rlhf.cli.choice.Choice.load` does.

    `on_device`: a recipe for a GPU is measured in the container image, as it is trained there; then this never returns.
    """
    context = click.get_current_context()
    typed = context.get_parameter_source("hw") is ParameterSource.COMMANDLINE
    guide = context.meta.get(_GUIDE, False)
    loaded = Choice(hw if typed or not directory else None, directory, guide, changes=changes).load()
    if on_device:
        container.enter(loaded, [RESULTS], [])
    return loaded
