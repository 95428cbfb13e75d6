"""recipes/README.md, made from the recipes: what `rlhf recipes` lists, one line for each folder."""

from itertools import groupby
from pathlib import Path

from rlhf import recipe as recipes
from rlhf.recipe import STAGES, Recipe

HEAD = """# Recipes

Each folder has one recipe in numbered versions. A *released* version never changes and has
[records](../results/README.md). A *draft* may change and has none: no GPU has run the recipes for GPUs yet, so their
figures are predictions. The version in bold is the one that `HW=` (or `--hw`) takes for its hardware; others are named
by their folder, such as `RECIPE=recipes/h100-mistral-7b/v1`. Each link leads to the page of a version. The columns
after the versions describe the one in bold, or the newest where none is. [docs/recipes.md](../docs/recipes.md) explains
the keys of a recipe. This page is made by `make results-index` and checked by the tests.

| folder | versions | hardware | model | stages | what |
| --- | --- | --- | --- | --- | --- |
"""


def page(root: Path) -> str:
    """Return the page: one line for each folder of `root`."""
    folders = groupby(recipes.available(root), key=lambda directory: directory.parent)
    return HEAD + "".join(_line(folder, list(versions)) for folder, versions in folders)


def _line(folder: Path, versions: list[Path]) -> str:
    """Return the line of a folder. All but the versions is that of the one that HW= takes, or else of the newest."""
    taken = [version for version in versions if _is_taken(version)]
    shown = recipes.load((taken or versions)[-1]).recipe
    cells = (
        folder.name,
        ", ".join(_version(version, version in taken) for version in versions),
        shown.hardware.name,
        _model(shown),
        ", ".join(stage for stage in STAGES if shown.section(stage) is not None),
        shown.description,
    )
    return f"| {' | '.join(cells)} |\n"


def _is_taken(directory: Path) -> bool:
    """Return whether HW= takes this version."""
    keys = recipes.load(directory).recipe
    return keys.default and recipes.resolve(keys.hardware.name, directory.parents[1]) == directory


def _version(directory: Path, taken: bool) -> str:
    """Return a version's link and status, in bold where HW= takes it."""
    link = f"[{directory.name}]({directory.parent.name}/{directory.name}/README.md)"
    return f"{f'**{link}**' if taken else link} ({recipes.load(directory).recipe.status})"


def _model(keys: Recipe) -> str:
    """Return the base's name on the hub and the type of its weights."""
    if keys.model.name is None:
        return "trained from scratch by `pretrain`"
    return f"{keys.model.name}, {'NF4' if keys.model.quantization == 'nf4' else keys.model.dtype}"
