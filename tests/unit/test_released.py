"""A released recipe whose file was edited: each place that names it says so, and its targets get no verdict."""

import json
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from rlhf import recipe
from rlhf.files import sha256
from rlhf.recipe import PinnedRecipe, pinned, plain_yaml
from rlhf.recipe.moved import way_out
from tests.helpers import FIXTURES, RECIPE

ROOT = Path(__file__).parents[2]
ALL = [directory for root in (ROOT / "recipes", FIXTURES) for directory in recipe.available(root)]
RELEASED = [directory for directory in ALL if recipe.load(directory).recipe.status == "released"]


@pytest.fixture
def edited(tmp_path) -> PinnedRecipe:
    """The recipe cpu-tiny v1 with another learning rate in its file."""
    folder = copytree(RECIPE, tmp_path / "recipes" / "cpu-tiny" / "v1")
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(re.sub(r"(?m)^(ppo:\n(?:  .*\n)*?  steps: )\d+", r"\g<1>3", text))
    return recipe.load(folder)


def test_the_hashes_of_released_recipes_are_those_of_their_records_and_files():
    loaded = [recipe.load(directory) for directory in ALL]
    files = {f"{one.name}/{one.version}": one.sha256 for one in loaded if one.recipe.status == "released"}
    records = [json.loads(file.read_text()) for file in sorted((ROOT / "results").glob("*/v*/*/*.json"))]
    own_rows = [record for record in records if "rows" not in record]  # drafts alone have records of other rows
    hashes = {f"{r['recipe']}/{r['version']}": r["recipe_sha256"] for r in own_rows}
    assert {name: sha256 for name, sha256 in hashes.items() if name in files} == files == pinned.RELEASED


def test_an_edited_released_recipe_is_modified_and_no_longer_released(edited):
    assert (edited.modified, edited.status) == (True, pinned.EDITED)
    original = recipe.load(RECIPE)
    assert (original.modified, original.status, original.released_sha256) == (False, "released", None)
    assert original.figures and not edited.figures


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a recipe by their dotted keys."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        plain |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return plain


def test_the_defaults_of_released_recipes_never_change():
    """What their files leave out has the value that it had when they were released, or is gone."""
    defaults = json.loads((Path(__file__).parent / "released_defaults.json").read_text())
    there: set[str] = set()
    for directory in RELEASED:
        written = leaves(plain_yaml.read_yaml(directory / "recipe.yaml"))
        resolved = leaves(recipe.load(directory).recipe.model_dump(mode="json"))
        for key, value in defaults.items():
            if key in resolved and key not in written:
                assert resolved[key] == value, f"{directory}: {key}"
        there |= resolved.keys()
    assert [key for key in defaults if key not in there and not way_out(key)] == []


# Hashes of the released recipes' targets: they were set before the record, and are not moved after it.
TARGETS = {
    "cpu-tiny/v1": "3a75f2b9ab7be481",
    "cpu-tiny/v2": "bda85cb920d28a9c",
    "cpu-tiny-groups/v1": "f2a2c283b20c53b7",
    "cpu-tiny-sums/v1": "d526f9597a6e94b5",
    "cpu-smollm2-sums/v1": "474ee0172f85934e",
    "cpu-smollm2-chain-sum/v1": "59e923a5329642cd",
}


def test_the_targets_of_released_recipes_never_change():
    files = {f"{d.parent.name}/{d.name}": d / "published.yaml" for d in RELEASED}
    assert {name: sha256(file)[:16] for name, file in files.items()} == TARGETS
