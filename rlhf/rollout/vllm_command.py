"""The command that starts the vLLM server of a recipe."""

import math
import shlex
from urllib.parse import urlsplit

import psutil
import torch
from transformers import AutoModelForCausalLM

from rlhf.models.architecture import config_of
from rlhf.recipe import Architecture, OnlineOptions, Recipe

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 takes as --max-lora-rank
OVERHEAD = 1.5e9  # bytes of a server beside weights and cache; not measured on a card
UNKNOWN_SHARE = 0.4  # of the memory, for a base of unknown shape
BATCHED = 8192  # tokens of prompts that a card computes together


def start_command(recipe: Recipe, options: OnlineOptions, base: str) -> str:
    """Return the command that serves `base` as this stage needs it, on the loopback address.

    It has the recipe's dtype, the rank of its adapters, the length of its sequences, and a share of the memory that is
    estimated from weights and cache: what is left is the run's.
    """
    length = options.max_prompt_length + options.response_length
    # The CPU build of vLLM 0.32 ends when it splits a prompt that has a seed, so that all prompts must fit together.
    together = options.rollout_batch_size * options.max_prompt_length if recipe.hardware.device == "cpu" else BATCHED
    address = urlsplit(options.vllm_url or "http://127.0.0.1:8000")
    words = [
        *("vllm", "serve", base),
        *(("--revision", recipe.model.revision) if recipe.model.revision else ()),
        *("--host", "127.0.0.1", "--port", str(address.port or 8000), "--dtype", recipe.model.dtype),
        *("--enable-lora", "--max-lora-rank", str(next((r for r in RANKS if r >= recipe.lora.r), RANKS[-1]))),
        *("--logprobs-mode", "processed_logprobs", "--gpu-memory-utilization", f"{memory_share(recipe, options):.2f}"),
        *("--max-model-len", str(length), "--max-num-batched-tokens", str(max(length, together))),
    ]
    return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {shlex.join(words)}"


def memory_share(recipe: Recipe, options: OnlineOptions) -> float:
    """Return the share of the memory that a server needs, from 0.05 to 0.9, rounded up to hundredths."""
    architecture = recipe.model.architecture
    if architecture is None:
        return UNKNOWN_SHARE
    total = recipe.hardware.memory_gb * 1e9 if recipe.hardware.memory_gb else psutil.virtual_memory().total
    width = torch.empty(0, dtype=getattr(torch, recipe.model.dtype)).element_size()
    tokens = options.rollout_batch_size * (options.max_prompt_length + options.response_length)
    weights, per_token = sizes(architecture, recipe.tokenizer.vocab_size)
    need = width * (weights + per_token * tokens) + OVERHEAD
    return min(max(math.ceil(100 * need / total) / 100, 0.05), 0.9)


def sizes(architecture: Architecture, vocab_size: int | None) -> tuple[int, int]:
    """Return the number of weights of a model, and of the numbers that its cache holds for a token."""
    changes = {} if architecture.vocab_size or not vocab_size else {"vocab_size": vocab_size}
    config = config_of(architecture, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    cached = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * head_size
    return sum(weight.numel() for weight in model.parameters()), cached
