"""The recipes' predicted memory against what is pinned: no phase of a recipe may have grown."""

import pytest

from bench.memory import budgets
from rlhf import recipe
from rlhf.plan import prediction_file as pins
from tests.helpers import RECIPE

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("as_in_a_worker"),
]

PINNED = [d for d in recipe.available(RECIPE.parents[1]) if (d / pins.PREDICTION_FILE).exists()]
# The guides' two recipes; `make budgets`, a job of its own in CI, looks at all.
WATCHED = [RECIPE.parents[1] / name for name in ("4090-llama2-7b/v2", "h100-mistral-7b/v2")]


def test_every_recipe_for_a_card_has_its_peaks_pinned():
    assert budgets.pinned_recipes(RECIPE.parents[1]) == PINNED
    assert len(PINNED) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("directory", WATCHED, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_no_phase_of_a_recipe_has_grown(predictor, directory):
    loaded = recipe.load(directory)
    optimizers = {section.optim for section in (loaded.recipe.dialogues() | loaded.recipe.online()).values()}
    if loaded.recipe.model.quantization == "nf4" or any("8bit" in name or "paged" in name for name in optimizers):
        pytest.importorskip("bitsandbytes")
    now = pins.peaks(predictor, loaded)
    assert list(budgets.changed_peaks(budgets.pinned(directory), now)) == []
    assert list(budgets.changed_needs(budgets.pinned_needs(directory), pins.needs(predictor, loaded))) == []
    assert list(budgets.changed_work(budgets.pinned_work(directory), pins.work(predictor, loaded))) == []
