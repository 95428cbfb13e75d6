"""Where recipes are: the folder of recipes, the versions in it, and the default of a kind of hardware."""

import difflib
import os
import re
from contextlib import suppress
from pathlib import Path

from rlhf.errors import OptionError, UserError
from rlhf.recipe.pinned import PinnedRecipe, load
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.recipe.stages import POLICIES, PRETRAIN, StageName

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


def resolve(hardware: str, root: Path, own: str | None = None) -> Path:
    """Return the newest released version of the default recipe of `hardware`; its newest draft if none is released.

    own: a stage that trains on files of the user's, for which the recipe with `default: own_data` comes first.

    Mistakes in other recipes do not count. Raises OptionError if there is no default recipe, and UserError if there is
    more than one or if a default one is wrong.
    """
    names: set[str] = set()
    defaults: set[str] = set()
    found: dict[str, Path] = {}  # by status
    for directory in available(root):
        with suppress(UserError):  # a file that cannot be read names no hardware
            content = read_yaml(directory / "recipe.yaml")
            section = content.get("hardware")
            name = str(section.get("name")) if isinstance(section, dict) else ""
            names.add(name)
            if name == hardware and content.get("default") == "own_data" and own in content:
                found["own data"] = directory
            if name == hardware and content.get("default") is True:
                found[str(content.get("status"))] = directory  # available() puts the newest version last
                defaults.add(directory.parent.name)
    if len(defaults) > 1:
        raise UserError(
            f"--hw {hardware}: {' and '.join(sorted(defaults))} are both its default; set default: false in one"
        )
    if found:
        chosen = found.get("own data") or found.get("released") or next(iter(found.values()))
        load(chosen)
        return chosen
    near = difflib.get_close_matches(hardware.lower(), names, 3, 0.4) or sorted(names - {""})
    if not near:
        raise OptionError(no_recipes(root))
    raise OptionError(f"--hw {hardware or repr('')}: no default recipe for it in {root}; nearest: {', '.join(near)}")


def having(stage: StageName, default: Path, root: Path) -> Path:
    """Return `default` if it trains a policy by `stage`, or else the recipe for its hardware that does.

    Of several the newest version of the one whose name is most alike; `default` itself where none does.
    """
    hardware = load(default).recipe.hardware.name
    found = [default]
    for directory in available(root):
        with suppress(UserError):  # a mistake in another recipe does not count
            recipe = load(directory).recipe
            if recipe.hardware.name == hardware and recipe.section(stage) is not None:
                found.append(directory)
    if stage not in POLICIES or default in found[1:]:
        return default
    return max(reversed(found[1:]), key=lambda d: _alike(d.parent.name, default.parent.name), default=default)


def _alike(name: str, other: str) -> int:
    """Return with how many equal characters two names begin."""
    return next((i for i, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), min(len(name), len(other)))


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


def check_directory(directory: Path, root: Path) -> None:
    """Raise OptionError if `directory` is no recipe; it names the versions in it, or similar recipes of `root`."""
    if directory.name == "recipe.yaml" or os.path.lexists(directory / "recipe.yaml"):
        return
    inside = [str(v) for v in available(directory.parent) if v.parent == directory] if directory.is_dir() else []
    known = {"/".join(folder.parts[-2:]): str(folder) for folder in (*available(root), *available(OWN))}
    near = difflib.get_close_matches("/".join(directory.parts[-2:]), known, 3)
    hint = " or ".join(inside or [known[name] for name in near]) or "a folder that `rlhf recipes` lists"
    raise OptionError(f"--recipe {directory}: no recipe.yaml there; name {hint}")


def no_recipes(root: Path) -> str:
    """Return the message for a folder without recipes."""
    return f"{root}: no recipes there; --recipe-root or RLHF_RECIPES names a folder with <name>/v<N>/recipe.yaml in it"


def no_section(stage: StageName, loaded: PinnedRecipe) -> str:
    """Return the message for a stage that a recipe does not have. It names recipes beside this one that have it."""
    if stage == PRETRAIN:
        return f"{stage}: {loaded.directory} has no such stage; it starts from {loaded.recipe.model.origin}"
    above = loaded.directory.parents
    having = []
    for directory in available(above[1] if len(above) > 1 else default_root()):
        with suppress(UserError):
            having += [str(directory)] * (load(directory).recipe.section(stage) is not None)
    named = " or ".join(having[:MOST_NAMED])
    return f"{stage}: {loaded.directory} has no such stage; add a section {stage}" + (
        f", or use --recipe {named}" if having else ""
    )
