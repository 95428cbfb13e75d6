"""`rlhf recipes` and `fetch`: commands that list the recipes and download what one needs."""

from pathlib import Path

import click
import yaml

from rlhf import recipe as recipes
from rlhf.cli.choice import Choice, recipes_root
from rlhf.cli.recipe_options import RECIPES, SET_HELP, chooses_recipe
from rlhf.errors import OptionError, UserError
from rlhf.models import fetch as fetching
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe.folders import is_default, no_recipes
from rlhf.terminal import screen
from rlhf.terminal.tables import rows_table


@click.command("recipes")
@RECIPES
@click.option("--show", type=click.Path(path_type=Path), metavar="DIR", help="Print every value of one, defaults too.")
@click.option("--all", "drafts", is_flag=True, help="List drafts too, of which nothing was measured.")
def list_recipes(show: Path | None, drafts: bool) -> None:
    """List the released recipes, and those that --hw takes, with their hardware and status."""
    if show is not None:
        values = recipes.load(show).recipe.model_dump(mode="json")
        click.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)
        return
    rows: list[tuple[str, ...]] = []
    root = recipes_root()
    if not recipes.available(root):
        raise OptionError(no_recipes(root))
    for directory in recipes.available(root):
        try:
            loaded = recipes.load(directory)
            keys = loaded.recipe
            status = "edited" if loaded.released_sha256 else keys.status
            default = "default" if is_default(directory, root) else ""
            rows.append((str(directory), keys.hardware.name, status, default, keys.description))
        except UserError as error:  # a mistake in one recipe does not hide the others
            rows.append((str(directory), "", "wrong", "", str(error)))
    rows.sort(key=lambda row: row[2] != "released")
    shown = [row for row in rows if drafts or row[2] != "draft" or row[3]]
    rows_table("recipes", ("folder", "hardware", "status", "for --hw", "description"), shown)
    if len(shown) < len(rows):
        screen.OUT.print(f"{len(rows) - len(shown)} drafts more: --all", style="dim")


@click.command()
@chooses_recipe(changes=SET_HELP, on_device=True)
def fetch(choice: Choice) -> None:
    """Download and check a recipe's pinned model and data.

    They go to the caches of the hub and of this program. Stages then need no network.
    """
    loaded = choice.load()
    if fetching.needs_nothing(loaded.recipe):
        screen.OUT.print(f"{loaded.name} {loaded.version} takes nothing from elsewhere: there is nothing to fetch")
        return
    with quiet_libraries():
        _show(list(fetching.fetch(loaded.recipe)))


def _show(downloads: list[fetching.Download]) -> None:
    """Print what was downloaded."""
    rows = [
        (
            download.repository.kind,
            download.repository.name + (f"/{download.repository.data_dir}" if download.repository.data_dir else ""),
            download.repository.revision[:12],
            f"{download.files} files, {download.bytes / 1e9:.2f} GB"
            + (f", {download.rows:,} rows" if download.rows is not None else ""),
            download.licence + (", gated" if download.gated else ""),
        )
        for download in downloads
    ]
    rows_table("fetched and checked", ("", "name", "revision", "size", "licence"), rows)
    for download in downloads:
        screen.OUT.print(f"{download.repository.name}: {download.folder}", soft_wrap=True)
