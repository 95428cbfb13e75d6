"""Seconds of a decoding step by variant and number of rows, compared with the bytes that it must read."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from bench.ceilings import ceilings
from bench.gpu import variants
from bench.gpu.item import Context, with_random_weights
from bench.gpu.measured import DecodingFigures, DecodingRows, DecodingTime
from bench.gpu.model import shared_base
from bench.gpu.record import Decision, decide
from bench.gpu.variants import (
    AS_IT_IS,
    DECODING_VARIANTS,
    LIBRARY,
    Variant,
    synchronize,
)
from bench.steps import spread
from bench.targets import DECODING_MBU, rate_ends, reached
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import Recipe
from rlhf.recipe.schema_online import Ppo
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample

ROUNDS = 3  # over the variants, after one that is not counted


def measure(context: Context[DecodingFigures], rows: list[int]) -> Decision:
    """Time every variant for every number of rows. The first number is the recipe's and decides."""
    loaded = with_random_weights(context.recipe)
    rows = [4] if context.dry_run else rows
    options = loaded.recipe.options(Ppo)
    measured = context.measured
    measured["bandwidth"] = ceilings(context.device, torch.bfloat16)["bandwidth"]
    shared, tokenizer = shared_base(loaded, context.device, context.scratch)
    measured["prompt"], measured["response"] = options.max_prompt_length, options.response_length
    measured["rows"] = {}
    for count in rows:
        slots = options.max_prompt_length + options.response_length / 2  # of a row whose keys and values are read
        table: DecodingRows = {"variants": {}}
        measured["rows"][str(count)] = table
        work, bytes_read = {}, {}
        for name, variant in choices(loaded.recipe):
            sampling = Sampling(options.max_prompt_length, options.response_length, 1.0, count)
            work[name] = partial(rollout_seconds, shared, tokenizer, sampling, variant)
            bytes_read[name] = bytes_per_step(shared, sampling, slots, adapter=variant is not variants.no_adapters)
        for name, runs in variants.in_rounds(work, ROUNDS + 1):
            read, bandwidth = bytes_read[name], measured["bandwidth"]
            row = runs if isinstance(runs, str) else figures(runs, options.response_length, read, bandwidth)
            table["variants"][name] = row
            if count == rows[0] and name == AS_IT_IS:  # decides, and may be all that there is time for
                decided = decision(row, count, context.dry_run)
                decide(context.record, decided)
            context.save()
    return decided


def choices(recipe: Recipe) -> Iterator[tuple[str, Variant]]:
    """Yield name and context of every variant that differs from what the recipe's stages run."""
    for name, variant in DECODING_VARIANTS.items():
        if name != LIBRARY or recipe.hardware.trunk == "lean":
            yield name, variant


def decision(row: DecodingTime | str, count: int, dry_run: bool) -> Decision:
    """Return whether a step as the stages run it reaches the target; None if that lies between its quartiles."""
    if isinstance(row, str):
        return Decision(False, row)
    if "mbu" not in row:
        return Decision(None, "only the first rollout was timed, which does not count")
    why = f"{1e3 * row['step_seconds']['median']:.2f} ms a step of {count} rows, MBU {row['mbu']:.0%}"
    return Decision(None if dry_run else reached(rate_ends(row["mbu"], row["step_seconds"]), DECODING_MBU), why)


def rollout_seconds(
    shared: SharedBase, tokenizer: DialogueTokenizer, sampling: Sampling, variant: Variant, seed: int
) -> dict[str, float]:
    """Return the seconds of one whole rollout, of its prefill and its decoding, captures included, and of a replay.

    Under `kernels` the number of kernels in a replay, for the first `seed`, whose seconds do not count.
    """
    prompt = sampling.max_prompt_length
    lengths = [prompt - row % min(7, prompt - 1) for row in range(sampling.batch_size)]
    prompts = [[3 + (7 * row + i) % 40 for i in range(length)] for row, length in enumerate(lengths)]
    torch.manual_seed(seed)
    phase_seconds: dict[str, float] = {}
    with ExitStack() as stack:
        stack.enter_context(variants.in_turn(variant, shared))
        if trunk := shared.role_trunk:
            stack.enter_context(trunk.trunk.merging(trunk.role))
        stack.enter_context(_timed("rollout", phase_seconds))
        phase = partial(_phase, spent=phase_seconds, counted=seed == 0)
        sample(shared.base, prompts, tokenizer, sampling, phase=phase, trunk=trunk)
    return phase_seconds


def figures(runs: Sequence[Mapping[str, float]], response: int, read: int, bandwidth: float) -> DecodingTime:
    """Return median and spread of a decoding step, the prefill and the rest of all rollouts but the first, and the MBU.

    `response` is the number of tokens of a rollout; the prefill makes the first one. `read` is what a step must read,
    in bytes. Of one rollout only the first step is known. A step is a mean over all of them: a plain one, a capture and
    replays of it; what a replay takes alone stands beside it.
    """
    first, *counted = runs
    row: DecodingTime = {"first_step_seconds": first["decode"] / (response - 1), "bytes_read": read}
    if counted:
        row["step_seconds"] = spread([run["decode"] / (response - 1) for run in counted])
        row["prefill_seconds"] = spread([run["prefill"] for run in counted])
        row["outside_seconds"] = spread([run["rollout"] - run["prefill"] - run["decode"] for run in counted])
        if kernels := first.get("kernels"):
            row["kernels"] = int(kernels)
        if all("replay" in run for run in counted):
            row["replay_seconds"] = spread([run["replay"] for run in counted])
        row["mbu"] = read / row["step_seconds"]["median"] / bandwidth
    return row


@contextmanager
def _phase(name: str, spent: dict[str, float], counted: bool = False) -> Iterator[None]:
    """Note the seconds of a phase in `spent`, and those of a replay of the step that decoding captures.

    `counted`: the kernels of a replay instead.
    """
    with _timed(name, spent), (_kernels if counted else _replays)(spent) if name == "decode" else nullcontext():
        yield


@contextmanager
def _kernels(spent: dict[str, float]) -> Iterator[None]:
    """Note the kernels of the first replay of a graph in the block in `spent`; nothing where the profiler sees none."""
    replay = torch.cuda.CUDAGraph.replay

    def profiled(graph: torch.cuda.CUDAGraph) -> None:
        if "kernels" in spent:
            return replay(graph)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            replay(graph)
            synchronize()
        spent["kernels"] = sum(event.device_type.name == "CUDA" for event in seen.events() or ())

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", profiled):
        yield


@contextmanager
def _replays(spent: dict[str, float]) -> Iterator[None]:
    """Note the mean seconds of a graph's replay in the block, from the first replay to the end, in `spent`."""
    replay, started, count = torch.cuda.CUDAGraph.replay, 0.0, 0

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal started, count
        if not count:
            synchronize()
            started = time.perf_counter()
        count += 1
        replay(graph)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", counted):
        yield
    synchronize()
    if count:
        spent["replay"] = (time.perf_counter() - started) / count


@contextmanager
def _timed(name: str, spent: dict[str, float]) -> Iterator[None]:
    synchronize()
    start = time.perf_counter()
    yield
    synchronize()
    spent[name] = spent.get(name, 0.0) + time.perf_counter() - start


def bytes_per_step(shared: SharedBase, sampling: Sampling, slots: float, adapter: bool = True) -> int:
    """Return the bytes that a decoding step must read: weights, active adapter, keys and values.

    `slots` is the number of tokens of a row whose keys and values are read. Embeddings are looked up and do not count,
    unless they are the output layer, too; norms are left out. In 16 bits these are the
    bytes of `rlhf.plan.projection.decoding_step_bytes`. A packed weight counts once, as it lies, even where a step
    unpacks it or reads it for several groups of rows: that is not what it must read.
    """
    config = shared.base.config
    embeddings, head = shared.base.get_input_embeddings().weight, shared.base.get_output_embeddings().weight
    base = [p for name, p in shared.base.named_parameters() if "lora_" not in name and p.dim() > 1]
    weights = sum(_size(p) for p in base if p is not embeddings or p is head)
    adapters = sum(map(_size, shared.roles.parameters("policy"))) if adapter else 0
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = sampling.batch_size
    cached: float = (
        2 * config.num_hidden_layers * config.num_key_value_heads * size * rows * slots * head.element_size()
    )
    return round(weights + adapters + cached)


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()
