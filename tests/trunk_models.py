"""Small models with adapters, of every type that the lean trunk runs."""

from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.decoding_models import SIZES, four_bit

KINDS: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),  # with biases in q, k, v
    "qwen3": (partial(Qwen3Config, head_dim=16), Qwen3ForCausalLM),  # with norms of heads
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trunk_model(
    kind: str = "llama", dtype: torch.dtype = torch.float32, nf4: bool = False, sizes: Any = SIZES, **lora: Any
) -> Any:
    """A base with the roles `policy` and `reference`, whose scaling is no power of two and whose norms are not 1."""
    torch.manual_seed(0)
    config, model = KINDS[kind]
    base = model(config(**sizes))
    if nf4:
        four_bit(base)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ALL, "init_lora_weights": False} | lora
    peft = get_peft_model(base, LoraConfig(**settings), adapter_name="policy")
    peft.add_adapter("reference", LoraConfig(**settings))
    for name, parameter in peft.named_parameters():
        if "lora_" in name or "bias" in name:
            parameter.data = 0.1 * torch.randn_like(parameter)
        elif "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
        if "lora_" not in name and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(".policy." in name)
    return peft.eval()


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())
