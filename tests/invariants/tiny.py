"""The CPU recipe with random weights, at sizes at which memory is predicted within a second."""

from rlhf import recipe
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.rehearsal import random_weights_changes
from tests.helpers import RECIPE

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, SIZE = 64, 192, 4, 2, 16
VOCAB, RANK, PROMPT, RESPONSE = 2000, 2, 40, 8
TINY = {
    "hardware.threads": 1,
    "model.architecture.hidden_size": HIDDEN,
    "model.architecture.intermediate_size": INTERMEDIATE,
    "model.architecture.num_attention_heads": HEADS,
    "model.architecture.num_key_value_heads": KV_HEADS,
    "lora.r": RANK,
    **{
        f"{stage}.{key}": value
        for stage in ("sft", "rm", "dpo")
        for key, value in {
            "max_length": 64,
            "max_prompt_length": 40,
            "per_device_train_batch_size": 4,
            "max_eval_samples": 4,
        }.items()
    },
    "ppo.max_prompt_length": PROMPT,
    "ppo.response_length": RESPONSE,
    "ppo.batch_size": 8,
    "ppo.per_device_train_batch_size": 4,
    "ppo.rollout_batch_size": 8,
    "ppo.max_eval_samples": 4,
    "evaluate.max_prompt_length": PROMPT,
    "evaluate.response_length": RESPONSE,
    "evaluate.batch_size": 4,
    "evaluate.max_samples": 4,
}


def tiny(layers: int, vocab: int = VOCAB, **changes) -> PinnedRecipe:
    """The CPU recipe with random weights; `changes` name keys with double underscores."""
    base = recipe.load(RECIPE, {"model.architecture.vocab_size": vocab}).recipe
    overrides = random_weights_changes(base, 50, "longest") | TINY
    overrides |= {key.replace("__", "."): value for key, value in changes.items()}
    return recipe.load(RECIPE, overrides | {"model.architecture.num_hidden_layers": layers})
