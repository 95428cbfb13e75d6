"""A recipe's model.architecture beside the config.json of the model that it names."""

import json

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.recipe import shape
from rlhf.recipe.folders import default_root

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
