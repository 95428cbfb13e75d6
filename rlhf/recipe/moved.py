"""Keys of earlier recipes and runs: where each of them went.

`rlhf run` on a recipe with one of them names its new key. A finished run is read past them: it has each value at its
new key, and none at a key that is gone.
"""

import copy
from typing import Any


def _of_online(*keys: str) -> dict[str, None]:
    """Return these keys of PPO, RLOO and GRPO as keys that are gone."""
    return {f"{stage}.{key}": None for stage in ("ppo", "rloo", "grpo") for key in keys}


# Old dotted key -> new dotted key, or None where the setting is gone. A section stands for all of its keys.
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


def is_moved(key: str) -> bool:
    """Return whether a dotted key, or the section around it, was one of an earlier version."""
    return _entry(key) is not None


def new_key(key: str) -> str | None:
    """Return where a moved key is now; None where it is gone. A key that was not moved stays."""
    entry = _entry(key)
    if entry is None:
        return key
    new = MOVED[entry]
    return None if new is None else new + key.removeprefix(entry)


def in_words(key: str) -> str:
    """Return what a message says about a moved key: the key to use, or that there is none."""
    new = new_key(key)
    return f"use {new} (renamed in 0.3.0)" if new else "remove it (the setting is gone since 0.3.0)"


def renamed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes of a recipe, by dotted key, under their new names; a change of a setting that is gone stays.

    It decided something once, so the recipe's reader has to refuse it.
    """
    return {new_key(key) or key: value for key, value in changes.items()}


def read_past(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the nested settings of a manifest with moved values at their new keys, and without those that are gone."""
    settings = copy.deepcopy(settings)
    for old, new in MOVED.items():
        *path, last = old.split(".")
        section = _section(settings, path)
        if section is None or last not in section:
            continue
        value = section.pop(last)
        if new is not None:
            *path, last = new.split(".")
            if (target := _section(settings, path)) is not None:
                target.setdefault(last, value)
    return settings


def _entry(key: str) -> str | None:
    """Return the entry of MOVED for a key: the key itself, or the nearest section around it."""
    while key and key not in MOVED:
        key = key.rpartition(".")[0]
    return key or None


def _section(settings: dict[str, Any], path: list[str]) -> dict[str, Any] | None:
    """Return the section at `path` of nested settings; None where there is none."""
    for name in path:
        inner = settings.get(name)
        if not isinstance(inner, dict):
            return None
        settings = inner
    return settings
