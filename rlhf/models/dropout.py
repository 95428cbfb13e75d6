"""No dropout in a base: its forward pass in training is the one that evaluates and samples.

A ratio of new to old probabilities, DPO's step from its reference and a critic's error compare two passes: dropout in
the base would make them noise before the first update. The only dropout is that of SFT's adapters, `lora.lora_dropout`.
`check_training` in rlhf/models/support.py refuses a model with noise that is not found here by its name.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

# In the names of settings that act in training alone: attention_dropout, embd_pdrop, layerdrop, router_jitter_noise.
IN_NAMES = ("drop", "jitter")


def is_dropout(key: str) -> bool:
    """Return whether a key of a configuration sets dropout or another noise of training."""
    return any(part in key for part in IN_NAMES)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set every dropout of a configuration and of those inside it to 0, in place; return the configuration."""
    for key, value in list(vars(config).items()):
        if (without := _without(key, value)) != value:
            setattr(config, key, without)
    return config


def _without(key: str, value: Any) -> Any:
    """Return the value of a key without dropout: numbers of such a key are 0, and so are those in a list."""
    if isinstance(value, PreTrainedConfig):
        return without_dropout(value)
    if isinstance(value, Mapping):
        return {name: _without(str(name), part) for name, part in value.items()}
    if not is_dropout(key) or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_without(key, part) for part in value)
    return type(value)(0) if isinstance(value, int | float) else value
