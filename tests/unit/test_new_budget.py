"""How much of a new recipe a budget of minutes allows."""

from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.new import budget
from rlhf.new.content import Content, Online, size_in_words, supervised
from rlhf.new.data import DATA_SETS


def content(steps: int = 100) -> Content:
    fields: dict[str, Any] = dict.fromkeys(Content._fields) | Content._field_defaults
    rows = {name: supervised(1600, None) for name in ("sft", "rm", "dpo", "kto")}
    online = {name: Online() for name in ("ppo", "rloo", "grpo")}
    whole = {"steps": steps, "trained": ("grpo",), "data": DATA_SETS["hh"]}
    return Content(**{**fields, **rows, **online, **whole})


def times(minutes: float, each: float = 0.01) -> Any:
    """A step takes `minutes`, and the evaluation of a held-out prompt `each`."""
    return lambda tried: budget.Times(
        minutes * tried.steps + each * tried.heldout * tried.evaluations, each * tried.heldout * tried.evaluations
    )


@pytest.mark.parametrize("minutes", [7, 15, 37.5, 90])
def test_the_longest_recipe_within_the_minutes_is_chosen_with_little_evaluation(minutes):
    chosen = budget.within(minutes, content(), times(0.5))
    assert chosen.minutes <= minutes and (minutes == 90 or minutes < 1.15 * chosen.minutes + 1)
    assert 10 <= chosen.content.steps <= 100
    projected = times(0.5)(chosen.content)
    assert projected.evaluating <= budget.EVALUATED * projected.total
    assert (chosen.longer is None) == (chosen.content.steps == 100)
    if chosen.longer:
        assert f"{chosen.content.steps} of 100 steps" in chosen.longer
        again = budget.within(float(chosen.longer.rpartition(" ")[2]), content(), times(0.5))
        assert again.content.steps == 100, "the minutes that it names are enough"
    assert chosen.content.sft.max_samples in (None, round(chosen.content.steps / 100 * 1600 / 16) * 16)


def test_minutes_that_are_too_few_are_refused_with_what_would_do():
    with pytest.raises(UserError, match=r"5 minutes are too few: 10 steps are projected to take 10 minutes here") as e:
        budget.within(5, content(), times(1.0, 0.0))
    enough = float(str(e.value).split("--minutes ")[1].split()[0])
    assert budget.within(enough, content(), times(1.2, 0.0)).content.steps >= 10, "also at rates a fifth slower"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (134_515_008, "135 million"),
        (8.19e9, "8.19 billion"),
        (70.6e9, "70.6 billion"),
        (3_000, "3 thousand"),
        (12, "12"),
    ],
)
def test_small_models_have_a_size_too(parameters, words):
    assert size_in_words(int(parameters)) == words
