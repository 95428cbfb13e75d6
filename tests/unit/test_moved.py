"""Keys of earlier versions: an old recipe is told the new key, an old run is read past them."""

from pathlib import Path

import pytest
import yaml

from rlhf.errors import UserError
from rlhf.recipe import load, moved
from tests.records import manifest_of

PPO = Path("recipes/cpu-tiny/v2/recipe.yaml")


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "MOVED", {"ppo.kl_weight": "ppo.kl_coef", "data.rename": None, "ppo.extras": None})


def test_the_table_has_keys_and_sections() -> None:
    assert "ppo.kl_coef" in (moved.way_out("ppo.kl_weight") or "")
    assert moved.way_out("ppo.extras.first") and moved.way_out("ppo.kl_coef") is None


def test_old_settings_are_read_past() -> None:
    settings = {
        "seed": 0,
        "ppo": {"kl_weight": 0.1, "extras": {"a": 1}},
        "data": {"source": "files", "heldout_fraction": 0.5, "rename": None},
    }
    read = manifest_of(settings=settings).settings
    assert read == {"seed": 0, "ppo": {}, "data": {"source": "files", "heldout_fraction": 0.5}}


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
