"""Architectures: `model.architecture` of a recipe as a configuration of transformers, and the other way round."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlhf.errors import UserError
from rlhf.files import JsonObject
from rlhf.recipe.schema_model import Architecture
from rlhf.terminal import message_of

# Keys that transformers reads though the class of a type does not declare them: the width of a head, and older names
# that it turns into `rope_parameters` or `layer_types`.
UNDECLARED = {
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
}
# Keys of a config.json that say nothing about the shape of a layer, or that this project decides itself.
IRRELEVANT = {
    *PreTrainedConfig().to_dict(),  # keys that every type has
    *("torch_dtype", "use_cache", "pretraining_tp", "initializer_range", "auto_map"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
# In the names of settings that act in training alone: attention_dropout, embd_pdrop, layerdrop, router_jitter_noise.
NOISE = ("drop", "jitter")


def config_of(architecture: Architecture, **changes: Any) -> PreTrainedConfig:
    """Return transformers' configuration of an architecture, without dropout; `changes` are further keys of it.

    Raises UserError for a type that transformers does not know, a key that this type does not have, and a value that it
    refuses.
    """
    kind = architecture.model_type
    if kind not in CONFIG_MAPPING:
        raise UserError(f"model.architecture.model_type: transformers knows no {kind}")
    keys = architecture.config_keys()
    known = _keys_of(kind)
    unknown = sorted(key for key in keys if key not in known and key != "model_type")
    if unknown:
        raise UserError(
            f"model.architecture.{unknown[0]}: {CONFIG_MAPPING[kind].__name__} of transformers has no such key"
        )
    try:
        config = AutoConfig.for_model(**{**keys, **changes})
    except Exception as error:  # whatever the class checks
        raise UserError(f"model.architecture: {message_of(error)}") from error
    return without_dropout(config)


def parameter_count(config: PreTrainedConfig) -> int:
    """Return the number of weights of a model. Raises UserError where it is no causal language model."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UserError(f"config.json: {config.model_type} is no causal language model: {message_of(error)}") from None
    return sum(weight.numel() for weight in model.parameters())


def architecture_of(config: PreTrainedConfig) -> JsonObject:
    """Return the section `model.architecture` for the configuration of a type in rlhf/recipe/model_types.py.

    It has the keys that every architecture needs, and those others whose value is not the default of transformers'
    class for the type.
    """
    kind = config.model_type
    required = {key: getattr(config, key) for key in Architecture.required_keys() if key != "model_type"}
    plain = AutoConfig.for_model(kind, **required).to_dict()
    known = _keys_of(kind) - IRRELEVANT - required.keys()
    others = {
        key: value
        for key, value in config.to_dict().items()
        if key in known and value != plain.get(key) and not _is_noise(key)
    }
    return {"model_type": kind, **required, **others}


def check_architecture(config: PreTrainedConfig, architecture: Architecture, name: str) -> None:
    """Raise UserError unless a loaded model has the shape that the recipe plans with."""
    expected, keys = config_of(architecture), architecture.config_keys()
    for key in ("model_type", *sorted(keys.keys() - {"model_type"})):
        actual = getattr(config, key, None)
        if actual != getattr(expected, key, None):
            way_out = f"`rlhf new --model {name}` writes a recipe for it"
            raise UserError(f"{name} has {key} {actual}, and model.architecture.{key} is {keys[key]}: {way_out}")


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set every dropout of a configuration and of those inside it to 0, in place; return the configuration.

    A forward pass in training is then the one that evaluates and samples. A ratio of new to old probabilities, DPO's
    step from its reference and a critic's error compare two passes: dropout in the base would make them noise before
    the first update. The only dropout is that of SFT's adapters, `lora.lora_dropout`.
    """
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif _is_noise(key) and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, type(value)(0))
    return config


def _is_noise(key: str) -> bool:
    return any(part in key for part in NOISE)


def _keys_of(kind: str) -> set[str]:
    """Return the keys that transformers' configuration of a type reads."""
    configuration = CONFIG_MAPPING[kind]
    fields: set[str] = set(configuration.__dataclass_fields__)
    aliases = configuration.attribute_map
    return fields | set(aliases) | set(aliases.values()) | UNDECLARED
