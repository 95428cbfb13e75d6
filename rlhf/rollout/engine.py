"""Sampling: prompts in, responses out, as token ids with masks and the log-probabilities they were drawn with.

A response depends on its prompt and its own row of random numbers, and not on the prompts that are decoded beside it,
except for the rounding of kernels, which depends on the shape of a batch. Rounding changes a token only if its random
number lies within rounding of the boundary between two tokens: rarely in float32, more often in bfloat16.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from rlhf.data.batch import Rollout, collate
from rlhf.data.tokenize import SpecialIds
from rlhf.models.lean.trunk import RoleTrunk
from rlhf.models.precision import Model, mixed_precision
from rlhf.process import distributed
from rlhf.recipe.model_types import TESTED
from rlhf.rollout.decoding import Decoding, Sampling
from rlhf.rollout.generate import Generating
from rlhf.rollout.library_decoding import LibraryDecoding, few_kernels, using_attention
from rlhf.rollout.trunk_decoding import TrunkDecoding

Phase = Callable[[str], AbstractContextManager[Any]]  # gives the block in which a phase of this name runs


@torch.no_grad()
def sample(
    model: Model,
    prompts: Sequence[list[int]],
    tokenizer: SpecialIds,
    sampling: Sampling,
    *,
    phase: Phase = record_function,
    replicate: bool = False,
    trunk: RoleTrunk | None = None,
    done: Callable[[float], object] = lambda share: None,
) -> Rollout:
    """Sample responses to prompts (token ids) from the model with its active adapter.

    Prompts of similar length are decoded together. The result is in the order of `prompts`, the responses to one prompt
    side by side; they share one prefill. Randomness comes from torch's CPU generator: one number for each response and
    slot, drawn before anything is decoded. Several ranks, whose generators must be in the same state, decode a share of
    the prompts each, and all return the result for all prompts.

    phase: marks the blocks `prefill` and `decode`.
    replicate: every rank decodes all prompts in lockstep, needed for a model that the Trainer has sharded (FSDP,
        ZeRO-3).
    trunk: the lean trunk and the role that samples, in a block of `LeanTrunk.merging`. It decodes where it can
        (`LeanTrunk.decodes`), and the model's own layers otherwise.
    done: told after each batch which share of the prompts is done, from 0 to 1.

    Leaves the model in evaluation mode.
    """
    model.eval()
    device = next(model.parameters()).device
    copies = sampling.samples_per_prompt
    uniforms = torch.rand(len(prompts) * copies, sampling.response_length).to(device)
    tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=device)
    logprobs = torch.zeros(uniforms.shape, device=device)

    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    order = by_length if replicate else distributed.own_rows(by_length)
    at_once = max(1, sampling.batch_size // copies)
    with ready(model, trunk, whole=not replicate or distributed.world() == 1) as new_decoding:
        for at in range(0, len(order), at_once):
            indices = order[at : at + at_once]
            rows = [i * copies + copy for i in indices for copy in range(copies)]
            batch = [prompts[i] for i in indices], uniforms[rows], sampling, tokenizer
            tokens[rows], logprobs[rows] = _decode(phase, partial(new_decoding, *batch))
            done((at + len(indices)) / len(order))
    if not replicate:
        distributed.all_sum(tokens, logprobs)

    length = response_lengths(tokens, tokenizer.eos_id)
    responses = [row[:n] for row, n in zip(tokens.tolist(), length.tolist(), strict=True)]
    prompt_of_each = [prompt for prompt in prompts for _ in range(copies)]
    rollout = collate(prompt_of_each, responses, tokenizer.pad_id, tokenizer.eos_id, device)
    longest = int(length.max())
    return replace(rollout, logprobs=logprobs[:, :longest])


@contextmanager
def ready(
    model: Model, trunk: RoleTrunk | None = None, whole: bool = True
) -> Iterator[Callable[..., Decoding | Generating]]:
    """Prepare a model for sampling inside the block, and give what begins to decode a batch of prompts.

    `trunk` as in `sample`; `whole`: this process holds all weights.
    """
    with mixed_precision(model), ExitStack() as stack:
        if trunk is not None and trunk.trunk.decodes:
            stack.enter_context(few_kernels(model))
            yield partial(TrunkDecoding, trunk, model)
            return
        if model.config.model_type not in TESTED:  # transformers' `generate` knows every type
            yield partial(Generating, model)
            return
        stack.enter_context(using_attention(model, "sdpa"))
        if whole:
            stack.enter_context(few_kernels(model))
        yield partial(LibraryDecoding, model)


def response_lengths(tokens: torch.Tensor, eos_id: int) -> torch.Tensor:
    """Return the length (B,) of each response among sampled tokens (B, R): up to its first EOS, or R without one."""
    is_eos = tokens == eos_id
    return torch.where(is_eos.any(1), is_eos.int().argmax(1) + 1, tokens.shape[1])


def _decode(phase: Phase, start: Callable[[], Decoding | Generating]) -> list[Tensor]:
    """Decode one batch, in a separate function: its cache is freed before the next one is allocated."""
    with phase("prefill"):
        decoding = start()
    with phase("decode"):
        return decoding.run()
