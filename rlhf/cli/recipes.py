"""`rlhf recipes` and `fetch`: commands that list the recipes and download what one needs."""

import click

from rlhf import recipe as recipes
from rlhf.cli.choice import RUN, Choice, chooses_recipe
from rlhf.errors import OptionError, UserError
from rlhf.models import fetch as fetching
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe.folders import default_root, is_default, no_recipes
from rlhf.terminal import screen
from rlhf.terminal.tables import rows_table


@click.command("recipes")
def list_recipes() -> None:
    """List the recipes with their hardware and status: the released ones first, then drafts, which nobody measured.

    They are those in the folder that RLHF_RECIPES names, in recipes/ here, or the installed ones.
    """
    rows: list[tuple[str, ...]] = []
    root = default_root()
    if not recipes.available(root):
        raise OptionError(no_recipes(root))
    for directory in recipes.available(root):
        try:
            loaded = recipes.load(directory)
            keys, default = loaded.recipe, "default" if is_default(directory, root) else ""
            rows.append((str(directory), keys.hardware.name, loaded.status, default, keys.description))
        except UserError as error:  # a mistake in one recipe does not hide the others
            rows.append((str(directory), "", "wrong", "", str(error)))
    rows.sort(key=lambda row: row[2] != "released")
    rows_table("recipes", ("folder", "hardware", "status", "for --hw", "description"), rows)


@click.command()
@RUN
@chooses_recipe
def fetch(choice: Choice) -> None:
    """Download and check a recipe's pinned model and data.

    They go to the caches of the hub and of this program. Stages then need no network.
    """
    loaded = choice.load(on_device=True)
    with quiet_libraries():
        for line in fetching.fetch(loaded.recipe):
            screen.OUT.print(line, soft_wrap=True)
