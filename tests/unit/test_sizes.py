"""How large a model fits a card: the chart and the table of docs/memory.md are those of the predictions."""

from pathlib import Path

import pytest

from bench.memory import chart, sizes
from rlhf import recipe
from rlhf.plan.predict import Predictor, card_needed_bytes
from rlhf.recipe import StageName
from rlhf.recipe.schema_online import Ppo

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_file_has_what_is_predicted_today():
    """One of its 28 numbers, the one that changed code moves most: `python -m bench.memory sizes` writes all anew."""
    size = sizes.MODEL_SIZES[0]
    with Predictor() as predictor:
        loaded = recipe.load(ROOT / "recipes" / sizes.BASED_ON, sizes.changes(size))
        need = card_needed_bytes(predictor.predict(loaded, "ppo").whole)
    assert sizes.content()["needed"][size.name]["ppo"] == pytest.approx(need, rel=0.01)


def test_the_page_and_the_chart_are_made_from_the_file():
    assert sizes.table(sizes.content()) in (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert chart.chart(sizes.content()) == (ROOT / "docs/images/memory.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", sizes.MODEL_SIZES, ids=lambda size: size.name)
def test_every_size_is_trained_with_one_batch(size):
    trained = recipe.load(ROOT / "recipes" / sizes.BASED_ON, sizes.changes(size)).recipe
    ppo = trained.options(Ppo)
    assert trained.model.quantization == "nf4" and ppo.value_model == "adapter", "four roles on one 4-bit base"
    assert ppo.batch_size == 16 and ppo.max_prompt_length + ppo.response_length == 512
    for stage in trained.dialogues().values():
        assert stage.per_device_train_batch_size * stage.gradient_accumulation_steps == 16 and stage.max_length == 512
    shape = trained.model.architecture
    assert shape and shape.vocab_size
    embedded = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    keys = shape.hidden_size * shape.num_key_value_heads // shape.num_attention_heads
    layer = 2 * shape.hidden_size**2 + 2 * shape.hidden_size * keys + 3 * shape.hidden_size * shape.intermediate_size
    assert (embedded + shape.num_hidden_layers * layer) / 1e9 == pytest.approx(size.billions, rel=0.01)


def test_the_largest_model_may_fill_the_card_exactly():
    needs: dict[str, dict[StageName, int]] = {
        size.name: {"ppo": at * 2**30} for at, size in enumerate(sizes.MODEL_SIZES, 1)
    }
    assert sizes.largest(needs, "ppo", 3 * 1024) == sizes.MODEL_SIZES[2], "exactly full is full enough"
    assert sizes.largest(needs, "ppo", 3 * 1024 - 1) == sizes.MODEL_SIZES[1]
    assert sizes.largest(needs, "ppo", 1) is None
