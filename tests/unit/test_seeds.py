"""Seeds and orders that follow from a recipe's seed: no two that should differ are the same."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.data.formats import ParsedRows
from rlhf.data.load import divide_rows
from rlhf.data.rows import Message, PromptOnly
from rlhf.recipe.stages import HELDOUT_ANSWERS, SECOND_MODEL, derived_seed
from rlhf.stages.online.session import prompt_order
from rlhf.stages.supervised.row_order import LengthBuckets
from tests.helpers import small

SEEDS = range(51)
EPOCHS = range(12)


@pytest.mark.parametrize("seeds", [SEEDS, range(6_950, 7_000)])
def test_no_two_seeds_of_one_recipe_or_of_two_are_the_same(seeds):
    derived = [derived_seed(seed, offset) for seed in seeds for offset in (HELDOUT_ANSWERS, SECOND_MODEL)]
    assert len({*seeds, *derived}) == len(seeds) + len(derived)


def prompts_of(seed: int) -> Any:
    """Prompts of a stage with a seed, as `divide_rows` shuffles them."""
    rows = [PromptOnly((Message("user", f"Question {n}?"),), f"row {n}") for n in range(60)]
    recipe = small(data__validation_fraction=None).recipe.model_copy(update={"seed": seed})
    corpus = divide_rows(ParsedRows(tuple(rows)), recipe)
    return SimpleNamespace(train=corpus.prompts("ppo").train, seed=seed)


def test_no_two_epochs_of_prompts_have_one_order_whatever_the_seed():
    orders = set()
    for prompts in map(prompts_of, SEEDS):
        count = len(prompts.train)
        for epoch in EPOCHS:
            order = [prompts.train[i] for i in prompt_order(count, epoch, count, prompts.seed)]
            assert {*order} == {*prompts.train}
            orders.add(tuple(order))
    assert len(orders) == len(SEEDS) * len(EPOCHS)


def test_no_two_epochs_of_a_supervised_stage_have_one_order_whatever_the_seed():
    orders = set()
    for seed in SEEDS:
        rows = LengthBuckets([1] * 40, 4, seed)
        for epoch in EPOCHS:
            rows.set_epoch(epoch)
            orders.add(tuple(rows))
    assert len(orders) == len(SEEDS) * len(EPOCHS)
