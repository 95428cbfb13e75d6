"""`--hw` with a stage that the default recipe lacks takes the recipe of that hardware that has it."""

import pytest

from rlhf.recipe.folders import having, resolve
from tests.helpers import RECIPE

ROOT = RECIPE.parents[1]


@pytest.mark.parametrize(
    ("hardware", "stage", "taken"),
    [
        ("cpu", "ppo", "cpu-tiny/v2"),
        ("cpu", "grpo", "cpu-tiny-groups/v1"),
        ("cpu", "rloo", "cpu-tiny-groups/v1"),
        ("cpu", "kto", "cpu-tiny-kto/v1"),
        ("4090", "ppo", "4090-llama2-7b/v3"),
        ("4090", "grpo", "4090-qwen3-8b/v2"),
        ("4090", "kto", "4090-llama2-7b/v3"),  # none has it: the command then says so
        ("cpu", "second_rm", "cpu-tiny/v2"),  # no policy
    ],
)
def test_a_stage_is_found_in_the_recipe_named_most_alike(hardware, stage, taken):
    assert having(stage, resolve(hardware, ROOT), ROOT) == ROOT / taken
