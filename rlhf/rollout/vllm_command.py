"""The command that starts the vLLM server of a recipe.

It runs in a separate environment, because vLLM pins other versions of transformers than this project. The server reads
the policy's adapter from the run directory, so it must see the same files.
"""

import math
import shlex
from urllib.parse import urlsplit

import torch

from rlhf.models.architecture import config_of, parameter_count
from rlhf.process import proxies
from rlhf.recipe import Recipe
from rlhf.recipe.schema_online import OnlineOptions

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 takes as --max-lora-rank
OVERHEAD = 1.5e9  # bytes of a server beside weights and cache; not measured on a card
UNKNOWN_SHARE = 0.4  # of the memory, for a base of unknown shape or a card of unknown memory
CPU_SHARE = 0.1
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
    # Of its own accord that build gives the cache what its process leaves of the share, which may be nothing.
    settings = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" + " VLLM_CPU_KVCACHE_SPACE=1" * on_cpu
    address = urlsplit(options.vllm_url or "http://127.0.0.1:8000")
    words = [
        *("vllm", "serve", base),
        *(("--revision", recipe.model.revision) if recipe.model.revision else ()),
        *("--host", "127.0.0.1", "--port", str(address.port or 8000), "--dtype", recipe.model.dtype),
        *("--enable-lora", "--max-lora-rank", str(next((r for r in RANKS if r >= recipe.lora.r), RANKS[-1]))),
        *("--logprobs-mode", "processed_logprobs", "--gpu-memory-utilization", f"{_memory_share(recipe, options):.2f}"),
        *("--max-model-len", str(length), "--max-num-batched-tokens", str(max(length, together))),
    ]
    return f"{settings} {shlex.join(words)}"


def bytes_on_card(recipe: Recipe, options: OnlineOptions) -> int:
    """Return the bytes that the server of the printed command takes of the run's own card.

    0 without a server, for one on another machine, and without a card of known memory.
    """
    here = options.vllm_url is not None and proxies.is_local(options.vllm_url)
    if not here or recipe.hardware.device == "cpu" or recipe.hardware.memory_gb is None:
        return 0
    return round(_memory_share(recipe, options) * recipe.hardware.memory_gb * 1e9)


def _memory_share(recipe: Recipe, options: OnlineOptions) -> float:
    """Return the share of the memory that a server needs, from 0.05 to 0.9, rounded up to hundredths.

    It holds the weights, and keys and values of the responses that are sampled together, at full length.
    """
    shape, memory = recipe.model.architecture, recipe.hardware.memory_gb
    if recipe.hardware.device == "cpu":
        return CPU_SHARE
    if shape is None or memory is None:
        return UNKNOWN_SHARE
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    words = {} if shape.vocab_size else {"vocab_size": recipe.tokenizer.vocab_size}
    weights = parameter_count(config_of(shape, **words))
    tokens = options.rollout_batch_size * (options.max_prompt_length + options.response_length)
    need = dtype.itemsize * (weights + shape.cached_per_token * tokens) + OVERHEAD
    share = need / (memory * 1e9)
    return min(max(math.ceil(100 * share) / 100, 0.05), 0.9)
