"""How large a model fits a card: the chart and the table of docs/memory.md are those of the predictions."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.memory import sizes
from rlhf import recipe
from rlhf.memory.predict import Predictor, needed

ROOT = Path(__file__).parents[2]


def content() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(sizes.FILE.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.slow
def test_the_file_has_what_is_predicted_today():
    """One of its 28 numbers, the one that changed code moves most: `python -m bench.memory sizes` writes all anew."""
    size = sizes.SIZES[0]
    with Predictor() as predict:
        need = needed(predict(recipe.load(ROOT / "recipes" / sizes.BASED_ON, sizes.changes(size)), "ppo")[""])
    assert content()["needed"][size.name]["ppo"] == pytest.approx(need, rel=0.01)


def test_the_page_and_the_chart_are_made_from_the_file():
    assert sizes.table(content()) in (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert sizes.chart(content()) == (ROOT / "docs/images/memory.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", sizes.SIZES, ids=lambda size: size.name)
def test_every_size_is_trained_with_one_batch(size):
    found = recipe.load(ROOT / "recipes" / sizes.BASED_ON, sizes.changes(size)).recipe
    assert found.model.quantization == "nf4" and found.ppo.value_model == "adapter", "four roles on one 4-bit base"
    assert found.ppo.batch_size == 16 and found.ppo.max_prompt_length + found.ppo.response_length == 512
    for stage in (found.sft, found.rm, found.dpo):
        assert stage.per_device_train_batch_size * stage.gradient_accumulation_steps == 16 and stage.max_length == 512
    shape = found.model.architecture
    assert shape and shape.vocab_size
    embedded = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    keys = shape.hidden_size * shape.num_key_value_heads // shape.num_attention_heads
    layer = 2 * shape.hidden_size**2 + 2 * shape.hidden_size * keys + 3 * shape.hidden_size * shape.intermediate_size
    assert (embedded + shape.num_hidden_layers * layer) / 1e9 == pytest.approx(size.billions, rel=0.01)


def test_the_largest_that_fits():
    needs = {size.name: {"ppo": at * 2**30} for at, size in enumerate(sizes.SIZES, 1)}
    assert sizes.largest(needs, "ppo", 3 * 1024) == sizes.SIZES[2], "exactly full is full enough"
    assert sizes.largest(needs, "ppo", 3 * 1024 - 1) == sizes.SIZES[1]
    assert sizes.largest(needs, "ppo", 1) is None
