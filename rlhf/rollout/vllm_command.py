"""The command that starts the vLLM server of a recipe.

It runs in a separate environment, because vLLM pins other versions of transformers than this project. The server reads
the policy's adapter from the run directory, so it must see the same files.
"""

import math
import shlex
from urllib.parse import urlsplit

import psutil
import torch

from rlhf.models.architecture import parameter_count
from rlhf.recipe import Recipe
from rlhf.recipe.schema_model import Architecture
from rlhf.recipe.schema_online import OnlineOptions

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 takes as --max-lora-rank
OVERHEAD = 1.5e9  # bytes of a server beside weights and cache; not measured on a card
UNKNOWN_SHARE = 0.4  # of the memory, for a base of unknown shape
LOOPBACK = ("127.0.0.1", "localhost", "::1")
BATCHED = 8192  # tokens of prompts that a card computes together


def start_command(recipe: Recipe, options: OnlineOptions, base: str) -> str:
    """Return the command that serves `base` as this stage needs it, on the loopback address.

    It has the recipe's dtype, the rank of its adapters, the length of its sequences, and a share of the memory that is
    estimated from weights and cache: what is left is the run's.
    """
    on_cpu = recipe.hardware.device == "cpu"
    length = options.max_prompt_length + options.response_length
    # The CPU build of vLLM 0.32 ends when it splits a prompt that has a seed, so that all prompts must fit together.
    together = options.rollout_batch_size * options.max_prompt_length if on_cpu else BATCHED
    address = urlsplit(options.vllm_url or "http://127.0.0.1:8000")
    words = [
        *("vllm", "serve", base),
        *(("--revision", recipe.model.revision) if recipe.model.revision else ()),
        *("--host", "127.0.0.1", "--port", str(address.port or 8000), "--dtype", recipe.model.dtype),
        *("--enable-lora", "--max-lora-rank", str(next((r for r in RANKS if r >= recipe.lora.r), RANKS[-1]))),
        *("--logprobs-mode", "processed_logprobs", "--gpu-memory-utilization", f"{memory_share(recipe, options):.2f}"),
        *("--max-model-len", str(length), "--max-num-batched-tokens", str(max(length, together))),
    ]
    settings = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": 1}
    if on_cpu and recipe.model.architecture:
        # Of its own accord that build gives the cache what its process leaves of the share, which may be nothing.
        settings["VLLM_CPU_KVCACHE_SPACE"] = math.ceil(cache_bytes(recipe.model.architecture, recipe, options) / 2**30)
    return " ".join([*(f"{name}={value}" for name, value in settings.items()), shlex.join(words)])


def memory_share(recipe: Recipe, options: OnlineOptions) -> float:
    """Return the share of the memory that a server needs, from 0.05 to 0.9, rounded up to hundredths."""
    shape, vocab_size = recipe.model.architecture, recipe.tokenizer.vocab_size
    if shape is None:
        return UNKNOWN_SHARE
    total = recipe.hardware.memory_gb * 1e9 if recipe.hardware.memory_gb else psutil.virtual_memory().total
    changes = {} if shape.vocab_size or not vocab_size else {"vocab_size": vocab_size}
    weights = number_bytes(recipe) * parameter_count(shape, **changes)
    need = weights + cache_bytes(shape, recipe, options) + OVERHEAD
    return min(max(math.ceil(100 * need / total) / 100, 0.05), 0.9)


def bytes_on_card(recipe: Recipe, options: OnlineOptions) -> int:
    """Return the bytes that the server of the printed command takes of the run's own card.

    0 without a server, for one on another machine, and without a card of known memory.
    """
    here = options.vllm_url is not None and urlsplit(options.vllm_url).hostname in LOOPBACK
    if not here or recipe.hardware.device == "cpu" or recipe.hardware.memory_gb is None:
        return 0
    return round(memory_share(recipe, options) * recipe.hardware.memory_gb * 1e9)


def cache_bytes(shape: Architecture, recipe: Recipe, options: OnlineOptions) -> int:
    """Return the bytes of keys and values of the responses that are sampled together, at full length."""
    tokens = options.rollout_batch_size * (options.max_prompt_length + options.response_length)
    return number_bytes(recipe) * shape.cached_per_token * tokens


def number_bytes(recipe: Recipe) -> int:
    """Return the bytes of a number in the recipe's dtype."""
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return dtype.itemsize
