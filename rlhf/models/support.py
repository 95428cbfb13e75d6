"""Which models are supported: what the engine assumes of a model, and the checks that refuse others.

The engine samples with its own key-value cache, and computes log-probabilities from final hidden states and the
output matrix, without ever making all logits. That is exact for a decoder of plain attention layers whose logits are
one product with the output matrix, times a constant. `unsupported` refuses what is known to be otherwise; `check_model`
compares the parts with the model's own forward pass.
"""

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf.errors import UserError
from rlhf.models.traits import LENGTH_DEPENDENT_ROPE, logit_scale, ropes

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


def check_lengths(config: PreTrainedConfig, longest: int, name: str) -> None:
    """Raise UserError where sequences of `longest` tokens would change the rotary frequencies.

    With these ropes they depend on the longest row of a batch, so that a response would depend on its neighbours, and
    keys that are cached would keep other frequencies than new ones.
    """
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
    ids = torch.arange(1, 9, device=model.device)[None] % int(output_layer.weight.shape[0])
    logits = model(input_ids=ids, use_cache=False).logits
    logits_type, logits = logits.dtype, logits.float()
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    product = output_layer(hidden).float() * logit_scale(model.config)
    shorter = model(input_ids=ids[:, :4], use_cache=False).logits.float()
    # far above rounding, far below another formula
    bound = (1e-3 if logits_type == torch.float32 else 0.05) * float(logits.abs().max()) + 1e-4
    for other, what in (
        (product, "its logits are not its hidden states times the output matrix"),
        (shorter, "its output for a token depends on later tokens"),
    ):
        if float((logits[:, : other.shape[1]] - other).abs().max()) > bound:
            raise UserError(f"{name}: {what}, which is not supported")
