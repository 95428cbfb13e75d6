"""Recipes: `recipes/<name>/v<N>/recipe.yaml`, read into frozen, strictly typed objects.

A recipe decides a run's outcome together with the defaults of keys that it leaves out, which never change.
rlhf/recipe/schema.py and its neighbours have the keys. Sections and names of stages are imported from their modules.
"""

from rlhf.recipe.chain import deciding_settings, parents
from rlhf.recipe.folders import available, resolve
from rlhf.recipe.pinned import PinnedRecipe, load
from rlhf.recipe.schema import Recipe
from rlhf.recipe.stages import StageName, TrainingName
from rlhf.recipe.strict import Changes, as_yaml, parse_overrides

__all__ = [
    "Changes",
    "PinnedRecipe",
    "Recipe",
    "StageName",
    "TrainingName",
    "as_yaml",
    "available",
    "deciding_settings",
    "load",
    "parents",
    "parse_overrides",
    "resolve",
]
