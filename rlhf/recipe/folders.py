"""Where recipes are: the folder of recipes, the versions in it, and the default of a kind of hardware."""

import difflib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.errors import OptionError, UserError
from rlhf.recipe.pinned import load
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.recipe.stages import POLICIES, StageName


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


def available(root: Path) -> list[Path]:
    """Return every recipe directory below `root`, ordered by name, then version."""
    folders = [file.parent for file in root.glob("*/v*/recipe.yaml") if re.fullmatch(r"v[0-9]+", file.parent.name)]
    return sorted(folders, key=lambda d: (d.parent.name, int(d.name[1:])))


def resolve(hardware: str, root: Path, stage: StageName | None = None, own: bool = False) -> Path:
    """Return the default recipe of `hardware`: its newest released version, or its newest draft if none is released.

    own: for a stage that trains on files of the user's the recipe with `default: own_data` comes first. Where the
    default does not train the policy of `stage`, another recipe for this hardware that does takes its place: of several
    the newest version of the one whose name is most alike.

    Mistakes in other recipes do not count. Raises OptionError if there is no default recipe, and UserError if there is
    more than one or if the one that is taken is wrong.
    """
    contents = {directory: _content(directory) for directory in available(root)}
    names = {directory: str(content["hardware"].get("name", "")) for directory, content in contents.items()}
    of_hardware = {directory: contents[directory] for directory, name in names.items() if name == hardware}
    suited = [d for d, content in of_hardware.items() if stage is None or content.get(stage)]
    own_data = [d for d in suited if own and of_hardware[d].get("default") == "own_data"]
    defaults = [d for d, content in of_hardware.items() if content.get("default") is True]
    released = [d for d in defaults if of_hardware[d].get("status") == "released"]
    if len(several := sorted({d.parent.name for d in defaults})) > 1:
        raise UserError(f"--hw {hardware}: {' and '.join(several)} are both its default; set default: false in one")
    if candidates := own_data or released or defaults:
        chosen = candidates[-1]
        if stage in POLICIES and chosen not in suited:
            alike = difflib.get_close_matches(chosen.parent.name, [d.parent.name for d in suited], 1, 0.0)
            chosen = next((d for d in reversed(suited) if d.parent.name in alike), chosen)
        load(chosen)
        return chosen
    near = difflib.get_close_matches(hardware.lower(), names.values(), 3, 0.4) or sorted({*names.values()} - {""})
    if not near:
        raise OptionError(no_recipes(root))
    raise OptionError(f"--hw {hardware or repr('')}: no default recipe for it in {root}; nearest: {', '.join(near)}")


def _content(directory: Path) -> dict[str, Any]:
    """Return the content of a recipe's file, with a section `hardware`; that alone for a file that cannot be read."""
    with suppress(UserError):
        content = read_yaml(directory / "recipe.yaml")
        return content if isinstance(content.get("hardware"), dict) else content | {"hardware": {}}
    return {"hardware": {}}


def guide_of(directory: Path) -> Path | None:
    """Return the version of a recipe that keeps the settings of a published guide.

    It is the first version, if its published figures are a guide's: later ones change its settings. None without one.
    """
    first = next(version for version in available(directory.parents[1]) if version.parent == directory.parent)
    return first if any(figure.guide for figure in load(first).figures) else None


def is_default(directory: Path, root: Path) -> bool:
    """Return whether `resolve` takes a recipe for its hardware."""
    try:
        return resolve(load(directory).recipe.hardware.name, root) == directory
    except UserError:
        return False


def no_recipes(root: Path) -> str:
    """Return the message for a folder without recipes."""
    return f"{root}: no recipes there; RLHF_RECIPES names a folder with <name>/v<N>/recipe.yaml in it"
