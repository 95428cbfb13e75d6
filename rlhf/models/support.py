"""Which models are supported: what the engine assumes of a model, and the checks that refuse others.

The engine samples with its own key-value cache, and computes log-probabilities from final hidden states and the
output matrix, without ever making all logits. That is exact for a decoder of plain attention layers whose logits are
one product with the output matrix, times a constant. `unsupported` refuses what is known to be otherwise; `check_model`
compares the parts with the model's own forward pass, `check_training` that pass in training with the one in evaluation.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf.errors import UserError
from rlhf.models.traits import LENGTH_DEPENDENT_ROPE, logit_scale, ropes
from rlhf.recipe.context import context_length, too_long

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


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


def check_lengths(config: PreTrainedConfig, lengths: Mapping[str, int], name: str) -> None:
    """Raise UserError where sequences exceed the model's context, or would change the rotary frequencies.

    `lengths` are the longest sequences of the stages, by the keys of the recipe. Frequencies of some ropes depend on
    the longest row of a batch, so that a response would depend on its neighbours, and keys that are cached would keep
    other frequencies than new ones.
    """
    if problem := too_long(lengths, context_length(config.to_dict())):
        raise UserError(f"{problem} ({name})")
    longest = max(lengths.values(), default=0)
    for rope in ropes(config):
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limit = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            if longest > limit:
                raise UserError(
                    f"{name}: with a rope of type {rope['rope_type']} a sequence may have {limit} tokens, and the "
                    f"recipe admits {longest}: lower max_length, max_prompt_length or response_length"
                )


@torch.no_grad()
def check_model(model: PreTrainedModel, name: str) -> None:
    """Compare the parts that the engine uses with the model's own forward pass, on eight tokens.

    Raises UserError where the output layer has a bias, attention has sinks, a token changes what comes before it, or
    the logits are not the scaled product of hidden states and output matrix. Nothing is computed on the device meta.
    """
    output_layer = model.get_output_embeddings()
    if getattr(output_layer, "bias", None) is not None:
        raise UserError(f"{name}: an output layer with a bias is not supported")
    if any(key.endswith(".sinks") for key, _ in model.named_parameters()):
        raise UserError(f"{name}: attention with sinks is not supported")
    if model.device.type == "meta":
        return
    ids = _few_tokens(model)
    logits = model(input_ids=ids, use_cache=False).logits
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    product = output_layer(hidden).float() * logit_scale(model.config)
    shorter = model(input_ids=ids[:, :4], use_cache=False).logits.float()
    for other, what in (
        (product, "its logits are not its hidden states times the output matrix"),
        (shorter, "its output for a token depends on later tokens"),
    ):
        if _differ(other, logits[:, : other.shape[1]]):
            raise UserError(f"{name}: {what}, which is not supported")


@torch.no_grad()
def check_training(model: PreTrainedModel, name: str) -> None:
    """Compare the forward pass in training mode with that in evaluation mode, on eight tokens.

    Raises UserError where results differ or random numbers are drawn: noise that `without_dropout` does not know.
    Nothing is computed on the device meta.
    """
    if model.device.type == "meta":
        return
    mode, results = model.training, []
    before = _generator_state(model.device)
    try:
        for training in (True, False):
            results.append(model.train(training)(input_ids=_few_tokens(model), use_cache=False).logits)
    finally:
        model.train(mode)
    if _differ(*results) or not torch.equal(_generator_state(model.device), before):
        raise UserError(
            f"{name}: a {model.config.model_type} model adds dropout or other noise in training that its "
            "configuration does not name, which is not supported"
        )


def _few_tokens(model: PreTrainedModel) -> Tensor:
    """Return a row of eight token ids (1, 8)."""
    embedding: Any = model.get_input_embeddings()
    return torch.arange(1, 9, device=model.device)[None] % len(embedding.weight)


def _differ(actual: Tensor, expected: Tensor) -> bool:
    """Return whether logits of the same shape differ by far more than rounding, by as much as other formulas do."""
    share = 1e-3 if expected.dtype == torch.float32 else 0.05
    return bool((actual.float() - expected.float()).abs().max() > share * expected.abs().max() + 1e-4)


def _generator_state(device: torch.device) -> Tensor:
    """Return the state of the generator that dropout on a device draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
