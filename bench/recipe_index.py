"""recipes/README.md, made from the recipes: what `rlhf recipes` lists, one line for each folder."""

from itertools import groupby
from pathlib import Path

from bench.memory import budgets
from rlhf import recipe as recipes
from rlhf.plan import prediction_file
from rlhf.recipe import Recipe
from rlhf.recipe.stages import STAGES
from rlhf.terminal.wording import GB

GATED = ("meta-llama/",)

HEAD = """# Recipes

Each folder has one recipe in numbered versions. A *released* version never changes and has
[records](../results/README.md) of what it learns. A *draft* has none; those pages also have what a GPU measured of
some drafts, whose other figures are predictions. The version in bold is the one that `HW=` (or `--hw`) takes for its
hardware; others are named by their folder, such as `RECIPE=recipes/h100-mistral-7b/v1`. Each link leads to the page of
a version. The columns after the versions describe the one in bold, or the newest where none is.
[docs/recipes.md](../docs/recipes.md) explains the keys of a recipe. This page is made by `make results-index` and
checked by the tests.

*Needs* is predicted: the GB of the card that the stage in brackets needs, which is the stage that needs most
([docs/memory.md](../docs/memory.md#what-the-numbers-mean)). *Gated* weights are downloaded after you accept the licence
on the model's page and set `HF_TOKEN`. Mistral's page may ask for the same.

| folder | versions | hardware | needs, GB | model | data | stages | what |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def page(root: Path) -> str:
    """Return the page: one line for each folder of `root`."""
    folders = groupby(recipes.available(root), key=lambda directory: directory.parent)
    return HEAD + "".join(_line(folder, list(versions)) for folder, versions in folders)


def _line(folder: Path, versions: list[Path]) -> str:
    """Return the line of a folder. All but the versions is that of the one that HW= takes, or else of the newest."""
    taken = [version for version in versions if _is_taken(version)]
    directory = (taken or versions)[-1]
    shown = recipes.load(directory).recipe
    cells = (
        folder.name,
        ", ".join(_version(version, version in taken) for version in versions),
        shown.hardware.name,
        _needs(directory, shown.hardware.memory_gb),
        _model(shown),
        _data(shown),
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


def _needs(directory: Path, card_gb: float | None) -> str:
    """Return what the recipe needs of its card by predicted.json, and the stage that needs it; "–" without a card."""
    if card_gb is None:
        return "–"
    needs = prediction_file.card_needs(budgets.pinned_needs(directory))
    most = max(needs, key=needs.__getitem__)
    return f"{needs[most] / GB:.1f} of {card_gb:g} ({most})"


def _model(keys: Recipe) -> str:
    """Return the base's name on the hub, the type of its weights and whether they are gated."""
    if keys.model.source == "pretrain":
        return "trained from scratch by `pretrain`"
    weights = "NF4" if keys.model.quantization == "nf4" else keys.model.dtype
    return f"{keys.model.origin}, {weights}{', gated' if keys.model.origin.startswith(GATED) else ''}"


def _data(keys: Recipe) -> str:
    """Return the name of the data on the hub, or of the generated data."""
    return keys.data.name or f"generated: {keys.data.source}"
