"""Keys of earlier recipes and runs: what took their place.

`rlhf run` on a recipe with one of them says so. A finished run is read past them, as if it had none.
"""

from typing import Any


def _of_online(*keys: str) -> dict[str, None]:
    """Return these keys of PPO, RLOO and GRPO as keys that are gone."""
    return {f"{stage}.{key}": None for stage in ("ppo", "rloo", "grpo") for key in keys}


# Old dotted key -> the key to use, or None where the setting is gone. A section stands for all of its keys.
MOVED: dict[str, str | None] = {
    "merge.base": None,
    "grpo.multi_objective_aggregation": None,
    "rm.ensemble": None,
    "second_rm.ensemble": None,
    **_of_online("combine_scores", "variance_coef", "old_logprobs", "reward_retries", "resample_groups"),
    **_of_online("rollout_weights", "rollout_4bit", "update_4bit", "best_by", "max_update_kl", "score_clip"),
    "ppo.whiten_rewards": None,
    "rloo.overlong_buffer": None,
    "grpo.overlong_buffer": None,
    "grpo.use_bias_correction_kl": None,  # the KL in GRPO's loss is always multiplied by the token's ratio
    "data.rename": "data.columns",  # which is the other way round: name of the type -> name in the file
    "data.rated": None,
    "data.rating": None,
    "data.drop": None,
    "sft.train_on": None,  # now data.turns, which decides nothing about rows with one answer
    "lora.layers": None,
    "evaluate.unrelated": None,
    "hardware.update_graphs": None,
    "hardware.deterministic": None,
}


def way_out(key: str) -> str | None:
    """Return what a message says about a key of an earlier version, or of such a section; None for any other key."""
    while key and key not in MOVED:
        key = key.rpartition(".")[0]
    if not key:
        return None
    new = MOVED[key]
    return f"use {new} (since 0.3.0)" if new else "remove it (the setting is gone since 0.3.0)"


def read_past(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the nested settings of a manifest without keys of an earlier version."""
    return {
        key: read_past(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in settings.items()
        if prefix + key not in MOVED
    }
