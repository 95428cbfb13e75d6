"""What each strategy against a lack of memory changes in a recipe."""

import pytest

from rlhf import recipe
from rlhf.plan import strategies
from rlhf.recipe.stages import TRAINING_STAGES
from tests.helpers import RECIPE
from tests.unit.plans import global_batch

RECIPES = recipe.available(RECIPE.parents[1])


@pytest.mark.parametrize("directory", RECIPES, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_a_strategy_is_switched_on_once_and_changes_no_batch(directory):
    """And with none of them, the batches are as before."""
    loaded = recipe.load(directory)
    for stage in (name for name in TRAINING_STAGES if getattr(loaded.recipe, name) is not None):
        off = loaded.with_changes(strategies.switched_off(loaded, stage))
        for start in (loaded, off):
            assert global_batch(start, stage) == global_batch(loaded, stage)
            for strategy in strategies.STRATEGIES:
                changes = strategies.switched_on(start, stage, strategy.name)
                if changes is None:
                    continue
                after = start.with_changes(changes)
                assert after.recipe != start.recipe, strategy.name
                assert global_batch(after, stage) == global_batch(loaded, stage), strategy.name
                if strategy.name not in ("batch_size", "context_length"):
                    assert strategies.switched_on(after, stage, strategy.name) is None


def test_what_is_on_already_is_not_switched_on():
    loaded = recipe.load(RECIPE, {"sft.gradient_checkpointing": True, "sft.per_device_train_batch_size": 1})
    names = {s.name for s in strategies.STRATEGIES if strategies.switched_on(loaded, "sft", s.name) is not None}
    assert names == {"quantization", "context_length"}
    eager = loaded.with_changes(strategies.switched_off(loaded, "sft"))
    assert strategies.switched_on(eager, "sft", "flash_attention") == {"model.attention": "auto"}
    assert strategies.switched_on(eager, "sft", "distributed") is None


def test_half_the_micro_batch_is_twice_the_accumulation():
    loaded = recipe.load(RECIPE, {"sft.per_device_train_batch_size": 8, "sft.gradient_accumulation_steps": 3})
    assert strategies.switched_on(loaded, "sft", "batch_size") == {
        "sft.per_device_train_batch_size": 4,
        "sft.gradient_accumulation_steps": 6,
    }


def test_an_odd_micro_batch_keeps_its_global_batch():
    loaded = recipe.load(RECIPE, {"sft.per_device_train_batch_size": 5, "sft.gradient_accumulation_steps": 1})
    assert strategies.switched_on(loaded, "sft", "batch_size") == {
        "sft.per_device_train_batch_size": 1,
        "sft.gradient_accumulation_steps": 5,
    }
