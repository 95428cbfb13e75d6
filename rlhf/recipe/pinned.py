"""Reads `recipes/<name>/v<N>/` into a frozen recipe with its hash, its overrides and its figures to compare with.

A recipe file may have a block `training` with keys of its training sections, written once. A section that lacks a key
of the block has the block's value. The hash of the file covers the block, and `Recipe` has every value in its place.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rlhf.errors import UserError
from rlhf.files import JsonObject, JsonValue
from rlhf.recipe import moved
from rlhf.recipe.plain_yaml import line_of, read_yaml
from rlhf.recipe.published import Figure
from rlhf.recipe.schema import Recipe
from rlhf.recipe.stages import StageName
from rlhf.recipe.strict import Changes, joined, section_types, validate, with_overrides

BLOCK = "training"
EDITED = "edited since its release"  # the status of such a recipe
# The sha256 of each released recipe, by name and version, as `content_hash` has it. An entry never changes.
RELEASED = {
    "cpu-tiny/v1": "f2f085fb36b0e023e5e86cf8ab4e6ab139943b02ec2d7b529d04124455b04d80",
    "cpu-tiny/v2": "70ca0700b0dba784f86e5bf9334fe763ed35e6c91584cc01c787c9767d60d3d3",
    "cpu-tiny-groups/v1": "5da68ce4bd117fe17008c8c0857b7ace09aab8f1c3b6b869677ff0a9f0f9e3aa",
    "cpu-tiny-sums/v1": "513caf7103993936a204a09c050a5cb1087956c74f59a05de00bb2352688e700",
    "cpu-smollm2-sums/v1": "2790725e68d95091df1bbca63b636f85082c270647738ba181b564ff0f8e713e",
    "cpu-smollm2-chain-sum/v1": "032e79c917ccbb596dd4c5df1e5147ca514513ad8e67166c92aa4711429b4004",
}


class PinnedRecipe(NamedTuple):
    """A recipe with its folder, its hash, the overrides applied to it and the figures it is compared with."""

    recipe: Recipe
    directory: Path
    sha256: str  # of the file's content, without overrides
    overrides: Changes  # in the order in which they are applied
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
        released = RELEASED.get(f"{self.name}/{self.version}")
        return None if released == self.sha256 else released

    @property
    def status(self) -> str:
        """Return draft or released, or that the file was edited since its release."""
        return EDITED if self.released_sha256 else self.recipe.status

    def require(self, stage: StageName) -> None:
        """Raise UserError for a stage that the recipe does not have."""
        if self.recipe.section(stage) is None:
            raise UserError(f"{stage}: {self.directory} has no such stage: add a section {stage} to a recipe of yours")

    def with_changes(self, changes: Mapping[str, JsonValue]) -> "PinnedRecipe":
        """Return the recipe with further overrides."""
        seed = None if "seed" in changes else self.recipe.seed
        return load(self.directory, joined(self.overrides, changes), seed)


def load(directory: Path, overrides: Mapping[str, JsonValue] | None = None, seed: int | None = None) -> PinnedRecipe:
    """Read `directory/recipe.yaml`, apply `overrides` ({"ppo.kl_coef": 0.1}) in their order and check the result.

    `directory` may also name the file itself. Another `seed` is not a modification: a released recipe is meant to be
    run with several. A file that was edited after its release has no figures. Raises UserError, one line, for anything
    that is wrong with the file, a key or a combination of values.
    """
    directory = directory.parent if directory.name == "recipe.yaml" else directory
    absolute = Path(os.path.abspath(directory))  # `v1`, `.` and `a/../v1` also have a name and a version
    file = directory / "recipe.yaml"
    if file.exists() and not (re.fullmatch(r"v[0-9]+", absolute.name) and absolute.parent.name):
        raise UserError(f"{directory}: a recipe lives in <name>/v<N>/recipe.yaml; rename the folder, for example to v1")
    content = read_yaml(file)
    overrides = dict(overrides or {})
    changes = overrides if seed is None else overrides | {"seed": seed}
    recipe = validate(Recipe, with_overrides(spread(content, file), changes), file, changes)
    loaded = PinnedRecipe(recipe, directory, content_hash(content), overrides, ())
    return loaded if loaded.released_sha256 else loaded._replace(figures=_figures(directory / "published.yaml"))


def content_hash(content: object) -> str:
    """Return the sha256 of parsed YAML: every value counts, comments and layout do not."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def spread(content: JsonObject, file: Path) -> JsonObject:
    """Return the content of a recipe file with the keys of its block in the training sections that lack them.

    Raises UserError if the block is no section, or has a key that no training section of a recipe knows.
    """
    block = content.get(BLOCK, {})
    if not isinstance(block, dict):
        raise UserError(f"{file}:{line_of(file, [BLOCK])}: {BLOCK} is a section: write its keys below it")
    known = {
        name: kind.model_fields.keys()
        for name, field in Recipe.model_fields.items()
        for kind in section_types(field.annotation)
        if "learning_rate" in kind.model_fields
    }
    for key in block:
        if not any(key in keys for keys in known.values()):
            way_out = next(filter(None, (moved.way_out(f"{name}.{key}") for name in known)), "no section has it")
            raise UserError(f"{file}:{line_of(file, [BLOCK, key])}: unknown key '{BLOCK}.{key}': {way_out}")
    spread: JsonObject = {}
    for name, section in content.items():
        if name in known and isinstance(section, dict):
            section = {key: value for key, value in block.items() if key in known[name]} | section
        if name != BLOCK:
            spread[name] = section
    return spread


def _figures(file: Path) -> tuple[Figure, ...]:
    """Return the figures of a published.yaml; () if there is no such file. Raises UserError.

    The file names its `guide` once for all figures. Targets of our own have no guide.
    """
    if not file.exists():
        return ()
    content = read_yaml(file)
    rows, guide = content.pop("targets", None), content.pop("guide", None)
    if content or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: has a key 'targets' with a list of figures, and may have a key 'guide'")
    return tuple(validate(Figure, {"guide": guide} | row, file, {}, f"targets.{i}.") for i, row in enumerate(rows))
