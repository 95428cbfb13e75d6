"""Reads `recipes/<name>/v<N>/` into a frozen recipe with its hash, its overrides and its figures to compare with."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rlhf.errors import UserError
from rlhf.files import JsonValue
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.recipe.published import Figure
from rlhf.recipe.released import difference, released_sha256
from rlhf.recipe.schema import Recipe
from rlhf.recipe.shared import spread
from rlhf.recipe.strict import Changes, validate, with_overrides, without_overlap


class PinnedRecipe(NamedTuple):
    """A recipe with its folder, its hash, the overrides applied to it and the figures it is compared with."""

    recipe: Recipe
    directory: Path
    sha256: str  # of the file's content, without overrides
    overrides: Changes
    figures: tuple[Figure, ...]  # published ones, or targets of our own

    @property
    def name(self) -> str:
        """Return the recipe's name, the folder above its version."""
        return Path(os.path.abspath(self.directory)).parent.name

    @property
    def version(self) -> str:
        """Return the recipe's version, such as v1."""
        return Path(os.path.abspath(self.directory)).name

    @property
    def modified(self) -> bool:
        """Return whether overrides changed the recipe, or its file was edited after its release."""
        return bool(self.overrides) or self.released_sha256 is not None

    @property
    def released_sha256(self) -> str | None:
        """Return the sha256 that the recipe was released with if its file was edited since; else None."""
        return released_sha256(self.name, self.version, self.sha256)

    @property
    def status(self) -> str:
        """Return draft or released, or how the file differs from its released version."""
        return difference(self.sha256, self.released_sha256) or self.recipe.status

    def with_changes(self, changes: Mapping[str, JsonValue]) -> "PinnedRecipe":
        """Return the recipe with further overrides."""
        seed = None if "seed" in changes else self.recipe.seed
        return load(self.directory, {**self.overrides, **changes}, seed)


def load(directory: Path, overrides: Mapping[str, JsonValue] | None = None, seed: int | None = None) -> PinnedRecipe:
    """Read `directory/recipe.yaml`, apply `overrides` ({"ppo.kl_coef": 0.1}) and check the result.

    `directory` may also name the file itself. Another `seed` is not a modification: a released recipe is meant to be
    run with several. The figures of a file that was edited after its release are shown and not compared. Raises
    UserError, one line, for anything that is wrong with the file, a key or a combination of values.
    """
    directory = directory.parent if directory.name == "recipe.yaml" else directory
    absolute = Path(os.path.abspath(directory))  # `v1`, `.` and `a/../v1` also have a name and a version
    file = directory / "recipe.yaml"
    if file.exists() and not (re.fullmatch(r"v[0-9]+", absolute.name) and absolute.parent.name):
        raise UserError(f"{directory}: a recipe lives in <name>/v<N>/recipe.yaml; rename the folder, for example to v1")
    content = read_yaml(file)
    overrides = without_overlap(overrides or {})
    changes = overrides if seed is None else {**overrides, "seed": seed}
    recipe = validate(Recipe, with_overrides(spread(content, file), changes), file, changes)
    loaded = PinnedRecipe(recipe, directory, content_hash(content), overrides, _figures(directory / "published.yaml"))
    if loaded.released_sha256:
        loaded = loaded._replace(figures=tuple(map(_of_released, loaded.figures)))
    return loaded


def _of_released(figure: Figure) -> Figure:
    """Return a figure of a released recipe as one that its edited file is not compared with."""
    reason = figure.not_comparable or f"{'published figure' if figure.guide else 'target'} of the released recipe"
    return figure.model_copy(update={"not_comparable": reason})


def _figures(file: Path) -> tuple[Figure, ...]:
    """Return the figures of a published.yaml; () if there is no such file. Raises UserError.

    The file names its `guide` once for all figures. Targets of our own have no guide.
    """
    if not (file.exists() or file.is_symlink()):  # a broken link is an error, not a recipe without figures
        return ()
    content = read_yaml(file)
    rows, guide = content.pop("targets", None), content.pop("guide", None)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: needs a key 'targets' with a list of figures")
    if content:
        raise UserError(f"{file}: unknown key '{next(iter(content))}'; the keys are guide and targets")
    return tuple(validate(Figure, {"guide": guide} | row, file, {}, f"targets.{i}.") for i, row in enumerate(rows))


def content_hash(content: object) -> str:
    """Return the sha256 of parsed YAML: every value counts, comments and layout do not."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
