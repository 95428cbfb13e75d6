"""The recipes' predictions against what is pinned: one comparison of all numbers."""

import pytest

from bench import memory
from rlhf import recipe
from rlhf.plan import prediction_file
from tests.helpers import RECIPE

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("as_in_a_worker"),
]

RECIPES = RECIPE.parents[1]


def test_every_recipe_for_a_card_has_its_peaks_pinned():
    pinned = [d for d in recipe.available(RECIPES) if (d / prediction_file.PREDICTION_FILE).exists()]
    assert memory.pinned_recipes() == pinned and len(pinned) >= 6


# The guides' two recipes; `make budgets`, a job of its own, looks at all.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["4090-llama2-7b/v3", "h100-mistral-7b/v6"])
def test_no_number_of_a_recipe_has_changed(predictor, name):
    loaded = recipe.load(RECIPES / name)
    if loaded.recipe.model.quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    before = prediction_file.read(loaded.directory)
    assert before and not [*memory.changed(before.plain(), memory.predict_all(predictor, loaded).plain())]
