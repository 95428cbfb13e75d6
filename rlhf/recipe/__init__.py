"""Recipes: `recipes/<name>/v<N>/recipe.yaml`, read into frozen, strictly typed objects.

A recipe decides a run's outcome together with the defaults of keys that it leaves out, which never change.
rlhf/recipe/schema.py and its neighbours have the keys.
"""

from rlhf.recipe.chain import changed_settings, comparable, deciding_settings, differences, parents, stages_before
from rlhf.recipe.folders import (
    available,
    check_directory,
    default_root,
    is_default,
    no_recipes,
    no_section,
    resolve,
    root_for_new,
)
from rlhf.recipe.names import (
    GROUPS,
    ONLINE,
    POLICIES,
    STAGES,
    TRAINING_STAGES,
    GroupName,
    OnlineName,
    PolicyLabel,
    PolicyName,
    Role,
    SharedRole,
    StageName,
    TrainingName,
    stage_name,
)
from rlhf.recipe.pinned import PinnedRecipe, content_hash, load
from rlhf.recipe.published import Figure
from rlhf.recipe.random_weights import random_weights_changes
from rlhf.recipe.schema import (
    Dialogues,
    Dpo,
    Evaluate,
    Merge,
    Optimization,
    Pretrain,
    Recipe,
    Rm,
    Sft,
    StageOptions,
)
from rlhf.recipe.schema_data import Additions, Data, Flaw, Lengths, Sums, Toy
from rlhf.recipe.schema_model import Architecture, Hardware, Lora, Model, Tokenizer
from rlhf.recipe.schema_online import MODEL_REWARD, GroupOptions, Grpo, OnlineBase, OnlineOptions, Ppo, Rloo
from rlhf.recipe.strict import Changes, as_yaml, parse_overrides

__all__ = [
    "GROUPS",
    "MODEL_REWARD",
    "ONLINE",
    "POLICIES",
    "STAGES",
    "TRAINING_STAGES",
    "Additions",
    "Architecture",
    "Changes",
    "Data",
    "Dialogues",
    "Dpo",
    "Evaluate",
    "Figure",
    "Flaw",
    "GroupName",
    "GroupOptions",
    "Grpo",
    "Hardware",
    "Lengths",
    "Lora",
    "Merge",
    "Model",
    "OnlineBase",
    "OnlineName",
    "OnlineOptions",
    "Optimization",
    "PinnedRecipe",
    "PolicyLabel",
    "PolicyName",
    "Ppo",
    "Pretrain",
    "Recipe",
    "Rloo",
    "Rm",
    "Role",
    "Sft",
    "SharedRole",
    "StageName",
    "StageOptions",
    "Sums",
    "Tokenizer",
    "Toy",
    "TrainingName",
    "as_yaml",
    "available",
    "changed_settings",
    "check_directory",
    "comparable",
    "content_hash",
    "deciding_settings",
    "default_root",
    "differences",
    "is_default",
    "load",
    "no_recipes",
    "no_section",
    "parents",
    "parse_overrides",
    "random_weights_changes",
    "resolve",
    "root_for_new",
    "stage_name",
    "stages_before",
]
