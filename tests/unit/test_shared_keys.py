"""The block `training` of a recipe: keys that training sections share."""

from pathlib import Path

import pytest
import yaml

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.recipe.pinned import content_hash
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.recipe.schema import Sft
from rlhf.recipe.shared import BLOCK, spread
from tests.helpers import one_line_of, rlhf

ROOT = Path(__file__).parents[2]
CPU = ROOT / "recipes/cpu-tiny/v2"
DRAFTS = [d for d in recipe.available(ROOT / "recipes") if recipe.load(d).recipe.status == "draft"]


def written(tmp_path: Path, block: object, **sections: dict[str, object]) -> Path:
    """A copy of the CPU recipe with a block and with other keys in some sections; None takes a key away."""
    content = read_yaml(CPU / "recipe.yaml") | {BLOCK: block}
    for name, changes in sections.items():
        values = content[name] | changes
        content[name] = {key: value for key, value in values.items() if value != "away"}
    folder = tmp_path / "mine/v1"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder


def test_sections_that_lack_a_key_have_the_block_s(tmp_path):
    folder = written(
        tmp_path,
        {"learning_rate": 0.25, "warmup_ratio": 0.5},
        sft={"learning_rate": "away", "warmup_ratio": "away"},
        ppo={"learning_rate": "away"},
        dpo={"warmup_ratio": "away"},
    )
    loaded, own = recipe.load(folder).recipe, recipe.load(CPU).recipe
    sft = loaded.options(Sft)
    assert sft.learning_rate == 0.25 and sft.warmup_ratio == 0.5
    assert loaded.ppo and loaded.ppo.learning_rate == 0.25
    assert loaded.dpo and own.dpo and loaded.dpo.warmup_ratio == 0.5
    assert loaded.dpo.learning_rate == own.dpo.learning_rate, "its own comes first"
    assert loaded.evaluate == own.evaluate and loaded.rm == own.rm


def test_a_change_of_a_section_comes_before_the_block(tmp_path):
    folder = written(tmp_path, {"warmup_ratio": 0.5}, sft={"warmup_ratio": "away"})
    assert recipe.load(folder, {"sft.warmup_ratio": 0.25}).recipe.options(Sft).warmup_ratio == 0.25
    with pytest.raises(UserError, match=r"unknown key 'training"):
        recipe.load(folder, {"training.warmup_ratio": 0.25})


def test_the_hash_covers_the_block(tmp_path):
    folders = [written(tmp_path / str(ratio), {"warmup_ratio": ratio}) for ratio in (0.25, 0.5)]
    assert recipe.load(folders[0]).sha256 != recipe.load(folders[1]).sha256


@pytest.mark.parametrize(
    ("block", "problem"),
    [({"warmup_ration": 0.1}, r"recipe\.yaml:\d+: unknown key 'training.warmup_ration'"), (3, "is a section")],
)
def test_a_block_that_no_section_can_use_is_refused(tmp_path, block, problem):
    with pytest.raises(UserError, match=problem) as caught:
        recipe.load(written(tmp_path, block))
    one_line_of(caught)


@pytest.mark.parametrize("folder", DRAFTS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_recipes_that_are_not_frozen_are_short_and_read_in_full(folder, monkeypatch, capsys):
    assert len((folder / "recipe.yaml").read_text().splitlines()) <= 120, "see docs/recipes.md: Shared keys"
    code, out, _ = rlhf(monkeypatch, capsys, "recipes", "--show", folder)
    values = yaml.safe_load(out)
    assert code == 0 and BLOCK not in values
    assert content_hash(values) == content_hash(recipe.load(folder).recipe.model_dump(mode="json"))


def test_without_a_block_a_recipe_stays_as_it_is():
    content = read_yaml(CPU / "recipe.yaml")
    assert spread(content, CPU / "recipe.yaml") is content
