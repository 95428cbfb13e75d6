"""A recipe's model.architecture beside the config.json of the model that it names."""

import json

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.recipe import shape
from rlhf.recipe.folders import default_root
from tests.helpers import rlhf

FOLDER = default_root() / "4090-llama2-7b" / "v3"


def of_folder(tmp_path, **config):
    """The 7B recipe with a local model whose config.json holds `config`."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    changes = {"model.source": "local", "model.name": str(tmp_path), "model.revision": None}
    return recipe.load(FOLDER, changes)


def test_the_recipes_own_shape_passes(tmp_path):
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000}
    assert shape.check(of_folder(tmp_path, **config, sliding_window=7)) is None  # of which Llama knows nothing


def test_another_shape_is_refused_with_the_keys_to_set(tmp_path):
    loaded = of_folder(tmp_path, model_type="llama", hidden_size=2048, num_hidden_layers=32, vocab_size=128256)
    with pytest.raises(UserError) as caught:
        shape.check(loaded)
    assert "--set model.architecture.hidden_size=2048" in str(caught.value)
    assert "num_hidden_layers" not in str(caught.value)


def test_a_model_of_another_type_is_refused_with_the_way_that_works(tmp_path):
    with pytest.raises(UserError, match=r"is a qwen3 model: .*--set model\.architecture=null"):
        shape.check(of_folder(tmp_path, model_type="qwen3", hidden_size=4096))


def test_a_name_that_is_not_known_here_is_warned_of(monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    renamed = {"model.name": "Qwen/Qwen3-8B"}
    assert "not for Qwen/Qwen3-8B" in (shape.check(recipe.load(FOLDER, renamed)) or "")
    assert shape.check(recipe.load(FOLDER)) is None
    assert shape.check(recipe.load(FOLDER, renamed | {"model.architecture.hidden_size": 5120})) is None


def test_a_cached_model_is_compared(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 80}))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    with pytest.raises(UserError, match=r"add --set model\.architecture\.num_hidden_layers=80$"):
        shape.check(recipe.load(FOLDER, {"model.name": "meta-llama/Llama-2-70b-hf"}))


def test_plan_asks_before_it_predicts(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    sets = ("model.source=local", f"model.name={tmp_path}", "model.revision=null")
    options = [word for change in sets for word in ("--set", change)]
    code, out, err = rlhf(monkeypatch, capsys, "plan", "--recipe", str(FOLDER), *options)
    assert code == 1 and not out
    assert "is a gemma3_text model" in err


def test_the_settings_that_are_named_can_be_pasted_into_a_shell(tmp_path):
    """The folder may be anyone's."""
    with pytest.raises(UserError) as error:
        shape.check(of_folder(tmp_path, hidden_size="$(touch x) y"))
    assert "--set 'model.architecture.hidden_size=\"$(touch x) y\"'" in str(error.value)


def test_a_config_that_nests_too_deeply_is_unknown(tmp_path):
    loaded = of_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' + "[" * 200_000)
    assert "still the shape of the recipe's own model" in (shape.check(loaded) or "")
