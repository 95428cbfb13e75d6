"""Architectures: `model.architecture` of a recipe as a configuration of transformers, and what the engine assumes.

The engine samples with its own key-value cache, and computes log-probabilities from final hidden states and the
output matrix, without ever making all logits. That is exact for a decoder of plain attention layers whose logits are
one product with the output matrix, times a constant. `unsupported` refuses what is known to be otherwise; `check_model`
compares the parts with the model's own forward pass.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from rlhf.errors import UserError
from rlhf.files import JsonObject
from rlhf.recipe import Architecture
from rlhf.terminal import message_of

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
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
    "transformers_version",
    "architectures",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "dtype",
    "torch_dtype",
    "id2label",
    "label2id",
    "problem_type",
    "use_cache",
    "is_encoder_decoder",
    "chunk_size_feed_forward",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "pretraining_tp",
    "initializer_range",
    "auto_map",
    "_name_or_path",
    "attention_dropout",
    "model_type",
}


def config_of(architecture: Architecture, **changes: Any) -> PreTrainedConfig:
    """Return transformers' configuration of an architecture; `changes` are further keys of it.

    Raises UserError for a type that transformers does not know, a key that this type does not have, a value that it
    refuses, and an architecture that is not supported.
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
    if why := unsupported(config):
        raise UserError(f"model.architecture.model_type: {kind} {why}")
    return config


def architecture_of(config: Mapping[str, Any]) -> JsonObject:
    """Return the section `model.architecture` for the content of a config.json.

    It has the keys that every architecture needs, and those others whose value is not the default of transformers'
    class for the type. Raises UserError for a configuration that cannot be read or is not supported.
    """
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UserError(f"config.json: transformers knows no model_type {kind}")
    content = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        actual = AutoConfig.for_model(**content)
    except Exception as error:
        raise UserError(f"config.json: {message_of(error)}") from error
    if why := unsupported(actual):
        raise UserError(f"config.json: {kind} {why}")
    required = {key: getattr(actual, key, None) for key in Architecture.required_keys() if key != "model_type"}
    required["num_key_value_heads"] = required["num_key_value_heads"] or required["num_attention_heads"]
    known = _keys_of(kind)
    missing = sorted(key for key, value in required.items() if value is None or key not in known)
    if missing:
        raise UserError(f"config.json: model.architecture cannot describe a {kind} model, which has no {missing[0]}")
    plain = AutoConfig.for_model(kind, **required).to_dict()
    others = {
        key: value
        for key, value in actual.to_dict().items()
        if key not in IRRELEVANT | required.keys() and key in known and value != plain.get(key)
    }
    return {"model_type": kind, **required, **others}


def shape_differences(architecture: Architecture, config: PreTrainedConfig) -> dict[str, object]:
    """Return the keys of an architecture whose value a model's configuration does not have, with the model's values."""
    expected = config_of(architecture)
    keys = architecture.config_keys().keys() - {"model_type"}
    if config.model_type != expected.model_type:
        return {"model_type": config.model_type}
    actual = {key: getattr(config, key, None) for key in sorted(keys)}
    if actual.get("num_key_value_heads", 0) is None:  # as many as there are heads of queries
        actual["num_key_value_heads"] = config.num_attention_heads
    return {key: value for key, value in actual.items() if value != getattr(expected, key, None)}


def unsupported(config: PreTrainedConfig) -> str | None:
    """Return what keeps the engine from computing with models of a configuration; None if nothing is known to.

    The answer reads well after the type's name: "has recurrent layers (…)".
    """
    if getattr(config, "text_config", None) is not None and config.get_text_config() is not config:
        return "reads more than text; use a checkpoint of its text model alone"
    if config.is_encoder_decoder:
        return "is an encoder with a decoder; a decoder alone is needed"
    if getattr(config, "is_decoder", True) is False and not config.model_type.startswith("gpt_neox"):
        return "is not a decoder"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "is not a causal language model of transformers"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if others:
        return f"has layers of {others[0]}, whose state is not a plain key-value cache"
    if getattr(config, "final_logit_softcapping", None):
        return "caps its logits (final_logit_softcapping), which are not made whole here"
    return None


def add_classifier(config: PreTrainedConfig) -> None:
    """Give `AutoModelForSequenceClassification` a class for a type that transformers has none for, such as Granite.

    It is made as transformers makes the others: the decoder with a linear head.
    """
    if config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = next(kind for kind in causal.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = causal.__name__.replace("ForCausalLM", "ForSequenceClassification")
    classifier = type(name, (GenericForSequenceClassification, family), {"__module__": __name__})
    AutoModelForSequenceClassification.register(type(config), classifier, exist_ok=True)


def logit_scale(config: PreTrainedConfig) -> float:
    """Return the constant by which a model multiplies the product of hidden states and output matrix."""
    if getattr(config, "logits_scaling", None):  # Granite divides, HyperCLOVA X multiplies
        scaling = float(config.logits_scaling)
        return scaling if config.model_type == "hyperclovax" else 1.0 / scaling
    return float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the length of the sliding window of attention layers, in tokens; None where no layer has one."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    return window if kinds is None or "sliding_attention" in kinds else None


def check_lengths(config: PreTrainedConfig, longest: int, name: str) -> None:
    """Raise UserError where sequences of `longest` tokens would change the rotary frequencies.

    With these ropes they depend on the longest row of a batch, so that a response would depend on its neighbours, and
    keys that are cached would keep other frequencies than new ones.
    """
    rope: Any = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if kind.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limit = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            if longest > limit:
                raise UserError(
                    f"{name}: with a rope of type {kind['rope_type']} a sequence may have {limit} tokens, and the "
                    f"recipe admits {longest}: lower max_length, max_prompt_length or response_length"
                )


def check_layers(config: PreTrainedConfig) -> None:
    """Raise UserError where the layers after the first are not alike, as memory is predicted from the first ones.

    Nothing is allocated.
    """
    with torch.device("meta"):
        layers: Any = AutoModelForCausalLM.from_config(config).get_decoder().layers
    shapes = [sorted((name, tuple(weight.shape)) for name, weight in layer.named_parameters()) for layer in layers]
    other = next((number for number, shape in enumerate(shapes) if number > 1 and shape != shapes[1]), None)
    if other is not None:
        raise UserError(f"memory of {config.model_type} models is not predicted where layers differ (1 and {other})")


def has_fused_experts(model: PreTrainedModel) -> bool:
    """Return whether a model keeps the weights of many experts in one tensor (experts, out, in)."""
    return any(weight.dim() == 3 for weight in model.parameters())


@torch.no_grad()
def check_model(model: PreTrainedModel, name: str) -> None:
    """Compare the parts that the engine uses with the model's own forward pass, on eight tokens.

    Raises UserError where the output layer has a bias, attention has sinks, a token changes what comes before it, or
    the logits are not the scaled product of hidden states and output matrix. Nothing is computed on the device meta.
    """
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UserError(f"{name}: an output layer with a bias is not supported")
    if any(key.endswith(".sinks") for key, _ in model.named_parameters()):
        raise UserError(f"{name}: attention with sinks is not supported")
    if model.device.type == "meta":
        return
    ids = torch.arange(1, 9, device=model.device)[None] % int(head.weight.shape[0])
    logits = model(input_ids=ids, use_cache=False).logits
    logits_type, logits = logits.dtype, logits.float()
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    product = head(hidden).float() * logit_scale(model.config)
    shorter = model(input_ids=ids[:, :4], use_cache=False).logits.float()
    # far above rounding, far below another formula
    bound = (1e-3 if logits_type == torch.float32 else 0.05) * float(logits.abs().max()) + 1e-4
    for other, what in (
        (product, "its logits are not its hidden states times the output matrix"),
        (shorter, "its output for a token depends on later tokens"),
    ):
        if float((logits[:, : other.shape[1]] - other).abs().max()) > bound:
            raise UserError(f"{name}: {what}, which is not supported")


def _keys_of(kind: str) -> set[str]:
    """Return the keys that transformers' configuration of a type reads."""
    configuration = CONFIG_MAPPING[kind]
    fields: set[str] = set(configuration.__dataclass_fields__)
    aliases = configuration.attribute_map
    return fields | set(aliases) | set(aliases.values()) | UNDECLARED
