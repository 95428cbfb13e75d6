"""Keys of earlier versions: an old recipe is told the new key, an old run is read past them."""

from pathlib import Path

import pytest
import yaml

from rlhf.errors import UserError
from rlhf.recipe import load, moved
from rlhf.run.records import Settings

PPO = Path("recipes/cpu-tiny/v2/recipe.yaml")


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "MOVED", {"ppo.kl_weight": "ppo.kl_coef", "data.rename": None, "ppo.extras": None})


def test_the_table_names_keys_that_are_gone_and_new_ones_that_exist() -> None:
    assert moved.new_key("ppo.kl_weight") == "ppo.kl_coef" and moved.is_moved("ppo.extras.first")
    assert moved.new_key("ppo.kl_coef") == "ppo.kl_coef" and not moved.is_moved("ppo.kl_coef")
    assert moved.new_key("ppo.extras.first") is None


def test_old_settings_are_read_with_their_values_at_the_new_keys() -> None:
    settings = {
        "seed": 0,
        "ppo": {"kl_weight": 0.1, "extras": {"a": 1}},
        "data": {"source": "files", "heldout_fraction": 0.5, "rename": None},
    }
    read = Settings.model_validate(settings)
    assert read.plain() == {"seed": 0, "ppo": {"kl_coef": 0.1}, "data": {"source": "files", "heldout_fraction": 0.5}}


def test_changes_are_renamed_and_those_of_settings_that_are_gone_stay() -> None:
    assert moved.renamed({"ppo.kl_weight": 0.1, "data.rename": {"a": "b"}}) == {
        "ppo.kl_coef": 0.1,
        "data.rename": {"a": "b"},
    }


@pytest.mark.parametrize(("old", "new"), [("ppo.kl_weight", "ppo.kl_coef"), ("ppo.extras", None)])
def test_an_old_recipe_is_told_the_new_key(tmp_path: Path, old: str, new: str | None) -> None:
    section, key = old.split(".")
    content = yaml.safe_load(PPO.read_text())
    content[section][key] = 0.1
    file = tmp_path / "mine" / "v1" / "recipe.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(content))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if text.strip().startswith(f"{key}:"))
    with pytest.raises(UserError) as refusal:
        load(file.parent)
    assert (
        f"{file}:{line}" in str(refusal.value) and old in str(refusal.value) and (new or "remove") in str(refusal.value)
    )
