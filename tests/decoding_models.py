"""Small models with adapters whose layers the lean forward passes replace."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
ROLES = ("policy", "reference", "base")


def four_bit(model) -> None:
    """Pack the layers' linear weights in NF4 with double quantization, as recipes do.

    Without the kernel that bitsandbytes has for some CPUs, which multiplies in bfloat16 whatever the inputs.
    """
    bnb = pytest.importorskip("bitsandbytes")
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                shape = child.in_features, child.out_features
                packed = bnb.nn.Linear4bit(*shape, bias=False, compute_dtype=child.weight.dtype, quant_type="nf4")
                packed.load_state_dict(child.state_dict())
                packed.support_avx512bf16_for_cpu = False
                setattr(parent, name, packed.to("cpu"))


def adapted(dtype: torch.dtype, kind: str = "llama", nf4: bool = False, **lora):
    """A base with a trainable and a frozen adapter, whose B are not zero and whose scaling is no power of two."""
    torch.manual_seed(0)
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM)}[kind]
    base = model(config(**SIZES)).to(dtype)
    for name, parameter in base.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)  # ones would hide where a norm is rounded
    if nf4:
        four_bit(base)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False}
    settings |= lora
    found = get_peft_model(base, LoraConfig(**settings), adapter_name="policy", autocast_adapter_dtype=True)
    found.add_adapter("reference", LoraConfig(**settings))
    for name, parameter in found.named_parameters():
        parameter.requires_grad_(".policy." in name)
        if ".lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.1
    return found.eval()


def activated(model, role: str):
    """The base of a peft model, with the adapter of a role or, for `base`, with none."""
    if role == "base":
        model.base_model.disable_adapter_layers()
    else:
        model.base_model.enable_adapter_layers()
        model.base_model.set_adapter(role, inference_mode=role == "reference")
    return model.get_base_model()


def hidden(model, role: str, ids: Tensor) -> Tensor:
    """Hidden states (B, T, H) by the library's layers; with bfloat16 weights under autocast, as in a run."""
    base = activated(model, role)
    with torch.autocast("cpu", torch.bfloat16, enabled=base.dtype == torch.bfloat16):
        found: Tensor = base.model(input_ids=ids, use_cache=False).last_hidden_state
    return found


@torch.no_grad()
def states(model, role: str, ids: Tensor) -> Tensor:
    """Hidden states (B, T, H), float32, as sampling computes them."""
    return hidden(model, role, ids).float()
