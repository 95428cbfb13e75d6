"""Where recipes are: the folder of recipes, the versions in it, and the default of a kind of hardware."""

import difflib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlhf.errors import OptionError, UserError
from rlhf.recipe.pinned import PinnedRecipe, load
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.recipe.stages import GROUPS, PRETRAIN, StageName

OWN = Path("my-recipes")  # in the current folder: a user's own recipes, which git ignores
MOST_NAMED = 4  # recipes that have a stage, in the message about one that lacks it


def default_root() -> Path:
    """Return the folder of recipes.

    It is RLHF_RECIPES if that is set, or else the first that holds recipes: recipes/ in the current folder, that of the
    checkout that this file belongs to, or that of the installed wheel.
    """
    if root := os.environ.get("RLHF_RECIPES"):
        return Path(root)
    package = Path(__file__).parents[1]
    candidates = (Path("recipes"), package.parent / "recipes", package / "recipes")
    return next((candidate for candidate in candidates if available(candidate)), candidates[0])


def root_for_new() -> Path:
    """Return the folder that new recipes are written into: RLHF_RECIPES if that is set, or else `my-recipes/` here.

    They are not written into recipes/: what is there belongs to the project, in its indexes, budgets and tests.
    """
    return Path(os.environ.get("RLHF_RECIPES") or OWN)


def available(root: Path) -> list[Path]:
    """Return every recipe directory below `root`, ordered by name, then version."""
    folders = [file.parent for file in root.glob("*/v*/recipe.yaml") if re.fullmatch(r"v[0-9]+", file.parent.name)]
    return sorted(folders, key=lambda d: (d.parent.name, int(d.name[1:])))


def resolve(hardware: str, root: Path) -> Path:
    """Return the newest released version of the default recipe of `hardware`; its newest draft if none is released.

    Mistakes in other recipes do not count. Raises OptionError if there is no default recipe, and UserError if there is
    more than one or if a default one is wrong.
    """
    names: set[str] = set()
    defaults: set[str] = set()
    by_status: dict[str, Path] = {}
    unreadable: list[UserError] = []
    for directory in available(root):
        try:
            content = read_yaml(directory / "recipe.yaml")
        except UserError as error:
            unreadable.append(error)
            continue
        name = _hardware_name(content)
        names |= {name} - {""}
        if name == hardware and content.get("default") is True:
            by_status[load(directory).recipe.status] = directory  # available() puts the newest version last
            defaults.add(directory.parent.name)
    if len(defaults) > 1:
        listing = " and ".join(sorted(defaults))
        raise UserError(f"--hw {hardware}: {listing} are both its default; set default: false in one, or use --recipe")
    if not by_status:
        if unreadable:  # it may be the one that is asked for
            raise unreadable[0]
        if not names:
            raise OptionError(no_recipes(root))
        if hardware in names:
            raise OptionError(f"--hw {hardware}: no default recipe in {root}; name the folder of one with --recipe")
        nearest = difflib.get_close_matches(hardware.lower(), names, 3, 0.4)
        hint = f"nearest: {', '.join(nearest)}" if nearest else f"hardware there: {', '.join(sorted(names))}"
        raise OptionError(f"--hw {hardware or repr('')}: no recipe for such hardware in {root}; {hint}")
    return by_status.get("released") or by_status["draft"]


def guide_of(directory: Path) -> tuple[Path, str] | None:
    """Return the version of a recipe that keeps the settings of a published guide, with the guide's name.

    It is the first version, if its published figures are a guide's: later ones change its settings. None without one.
    """
    first = next(version for version in available(directory.parents[1]) if version.parent == directory.parent)
    guide = next((figure.guide for figure in load(first).figures if figure.guide), None)
    return (first, guide) if guide else None


def is_default(directory: Path, root: Path) -> bool:
    """Return whether `resolve` takes a recipe for its hardware."""
    try:
        return resolve(load(directory).recipe.hardware.name, root) == directory
    except UserError:
        return False


def _hardware_name(content: Mapping[str, object]) -> str:
    """Return the hardware that a recipe's file names, "" for none; the recipe is not checked."""
    section = content.get("hardware")
    name = section.get("name") if isinstance(section, dict) else None
    return str(name) if isinstance(name, str | int) else ""  # `name: 4090` is refused later, as a number


def _with_stage(stage: StageName, root: Path, hardware: str) -> list[str]:
    """Return the folders of the recipes that have a stage, those for `hardware` first; wrong recipes are left out."""
    folders: dict[bool, list[str]] = {True: [], False: []}
    for directory in available(root):
        with suppress(UserError):
            recipe = load(directory).recipe
            if recipe.section(stage) is not None:
                folders[recipe.hardware.name == hardware].append(str(directory))
    return folders[True] + folders[False]


def check_directory(directory: Path, root: Path) -> None:
    """Raise OptionError if `directory` is no recipe; it names the versions in it, or similar recipes of `root`."""
    if directory.name == "recipe.yaml" or os.path.lexists(directory / "recipe.yaml"):
        return
    versions = available(directory.parent) if directory.is_dir() else []
    if inside := [str(version) for version in versions if version.parent == directory]:
        raise OptionError(f"--recipe {directory}: a recipe with versions; name one: {' or '.join(inside)}")
    depth = 2 if re.fullmatch(r"v[0-9]+", directory.name) else 1
    names = {"/".join(folder.parts[-2:][:depth]): str(folder) for folder in (*available(root), *available(OWN))}
    nearest = difflib.get_close_matches("/".join(directory.parts[-depth:]), names, 3)
    hint = f"nearest: {', '.join(names[name] for name in nearest)}" if nearest else "`rlhf recipes` lists the recipes"
    raise OptionError(f"--recipe {directory}: no recipe.yaml there; {hint}")


def no_recipes(root: Path) -> str:
    """Return the message for a folder without recipes."""
    return f"{root}: no recipes there; --recipe-root or RLHF_RECIPES names a folder with <name>/v<N>/recipe.yaml in it"


def no_section(stage: StageName, loaded: PinnedRecipe) -> str:
    """Return the message for a stage that a recipe does not have. It names the recipes beside this one that have it."""
    if stage == PRETRAIN:
        origin = loaded.recipe.model.origin
        return f"{stage}: {loaded.directory} has no such stage; it starts from {origin}"
    page = "docs/groups.md" if stage in GROUPS else "docs/recipes.md"
    above = loaded.directory.parents
    root = above[1] if len(above) > 1 else default_root()
    alternatives = _with_stage(stage, root, loaded.recipe.hardware.name)
    more = f" or {len(alternatives) - MOST_NAMED} others" if len(alternatives) > MOST_NAMED else ""
    named = " or ".join(alternatives[:MOST_NAMED])
    hint = f", or use --recipe {named}{more}" if alternatives else ""
    return f"{stage}: {loaded.directory} has no such stage; add a section {stage} ({page}){hint}"
