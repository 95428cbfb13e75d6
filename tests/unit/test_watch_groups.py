"""What the live checks see in the logs of RLOO and GRPO, and that recipes accept their remedies."""

import pytest

from rlhf import recipe
from rlhf.observe import watch
from rlhf.observe.history import FEW, History
from tests.conftest import RECIPE, grouped

ROWS = 2 * FEW


def rising(first: float, last: float) -> list[float]:
    return [first] * FEW + [last] * FEW


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
@pytest.mark.parametrize(
    ("check", "planted", "healthy", "remedies"),
    [
        (
            "entropy_collapse",
            {"policy/entropy_avg": rising(2.0, 0.5)},
            {"policy/entropy_avg": rising(2.0, 0.7)},
            {"beta", "entropy_coef"},
        ),
        (
            "longer",
            {"response/length": rising(100, 160), "objective/scores": rising(0.0, 1.0)},
            {"response/length": rising(100, 160), "objective/scores": rising(1.0, 0.0)},
            {"beta", "learning_rate", "num_mini_batches"},
        ),
        (
            "no_signal",
            {"groups/no_signal": [0.8] * ROWS},
            {"groups/no_signal": [0.6] * ROWS},
            {"num_generations", "resample_groups"},
        ),
        (
            "clipping",
            {"policy/clipfrac_avg": [0.4] * ROWS},
            {"policy/clipfrac_avg": [0.2] * ROWS},
            {"learning_rate", "num_mini_batches"},
        ),
    ],
)
def test_a_check_sees_what_is_planted_and_names_keys_of_the_stage(stage, check, planted, healthy, remedies):
    def seen(logged: dict[str, list[float]]) -> dict[str, watch.Finding]:
        history = History(grouped(stage).recipe, stage)
        history.rows = [dict(zip(logged, values, strict=True)) for values in zip(*logged.values(), strict=True)]
        return {finding.check: finding for finding in watch.findings(history, ROWS)}

    assert set(seen(planted)[check].remedies) == {f"{stage}.{key}" for key in remedies}
    assert check not in seen(healthy)


@pytest.mark.parametrize("directory", recipe.available(RECIPE.parents[1]), ids=lambda d: f"{d.parent.name}-{d.name}")
def test_every_recipe_accepts_every_remedy(directory):
    loaded = recipe.load(directory)
    for check in watch.CHECKS:
        for stage in check.stages:
            if loaded.recipe.section(stage) is not None:
                for key, value in check.remedies(History(loaded.recipe, stage)).items():
                    changed = recipe.load(directory, {key: value})
                    assert changed.recipe != loaded.recipe, f"{check.name} of {stage}: {key} is {value} already"
