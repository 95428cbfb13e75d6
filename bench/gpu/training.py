"""Seconds of a micro-batch by variant, the host's share of them, and the time of a role switch."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.ceilings import ceilings
from bench.gpu import variants
from bench.gpu.item import Context, with_random_weights
from bench.gpu.measured import MicroBatchTime, TrainingFigures
from bench.gpu.model import shared_base
from bench.gpu.plan import SWITCH_MS
from bench.gpu.record import Decision, decide
from bench.gpu.variants import AS_IT_IS, TRAINING, Variant, synchronize
from bench.steps import spread
from peakmem.kernels import ATTENTION_FLOPS
from rlhf.models.precision import mixed_precision
from rlhf.models.shared_base import SharedBase
from rlhf.recipe.schema import Sft
from rlhf.recipe.schema_online import Ppo

HOST = 0.8  # share of a micro-batch's time that the host may need and still be ahead of the GPU
# A stream takes about a thousand operations that wait. Of a whole micro-batch with more of them the host is stopped by
# the GPU; on so few tokens the GPU never is behind.
FEW_TOKENS = 8
ROUNDS = 3  # over the variants
REPEATS = 2  # of a micro-batch in a round, after one that is not counted
SWITCHES = 5


def measure(context: Context[TrainingFigures]) -> Decision:
    """Time forward and backward pass of the decoder, without output layer, in micro-batches of SFT and PPO."""
    loaded = with_random_weights(context.recipe)
    recipe = loaded.recipe
    measured = context.measured
    measured["flops"] = ceilings(context.device, torch.bfloat16)["flops"]
    shared, _ = shared_base(loaded, context.device, context.scratch)
    sft, ppo = recipe.options(Sft), recipe.options(Ppo)
    sizes = {
        "sft": (sft.per_device_train_batch_size, sft.max_length),
        "ppo": (ppo.per_device_train_batch_size, ppo.max_prompt_length + ppo.response_length),
    }
    measured["switch_ms"] = switch_ms(shared)
    measured["micro_batches"] = {
        stage: {"rows": rows, "length": length, "variants": {}} for stage, (rows, length) in sizes.items()
    }
    operations = {stage: counted(shared, *size) for stage, size in sizes.items()}
    work = {
        (stage, name): partial(micro_batch, shared, variant, *size)
        for name, variant in TRAINING.items()
        for stage, size in sizes.items()
    }
    # Rounds go over both stages, so that one that is cut off has measured both.
    for (stage, name), runs in variants.in_rounds(work, ROUNDS):
        row = runs if isinstance(runs, str) else figures(runs, operations[stage], measured["flops"])
        measured["micro_batches"][stage]["variants"][name] = row
        decide(context.record, decision(measured, context.dry_run))
        context.save()
    return decision(measured, context.dry_run)


def decision(measured: TrainingFigures, dry_run: bool) -> Decision:
    """Return whether the host stays ahead of the GPU in every micro-batch as the stages run it, and roles switch fast.

    A dry run decides nothing, and nor does an item while a stage is not measured.
    """
    shares = []
    for stage, table in measured["micro_batches"].items():
        row = table["variants"].get(AS_IT_IS)
        if row is None:
            return Decision(None, f"{stage} is not measured yet")
        if isinstance(row, str):
            return Decision(False, f"{stage}: {row}")
        shares.append((row["host_seconds"]["median"] / row["seconds"]["median"], f"{stage}'s MFU {row['mfu']:.0%}"))
    host = max(share for share, _ in shares)
    switch = measured["switch_ms"]
    why = f"host {host:.0%} of the time, role switch {switch:.1f} ms, {', '.join(mfu for _, mfu in shares)}"
    return Decision(None if dry_run else host <= HOST and switch <= SWITCH_MS, why)


class RoundTimes(NamedTuple):
    """What the passes of a micro-batch took in one round."""

    seconds: list[float]  # of forward and backward pass, until the device is done
    host_seconds: list[float]  # until the host has queued the same passes of a row of FEW_TOKENS
    scoring_seconds: list[float]  # of a forward pass without gradients
    peak_bytes: int | None


def micro_batch(shared: SharedBase, variant: Variant, rows: int, length: int, number: int) -> RoundTimes:
    """Time both passes and a forward pass under a variant. `number` is that of the round."""
    with variants.in_turn(variant, shared):
        return _passes(shared, rows, length)


def _passes(shared: SharedBase, rows: int, length: int) -> RoundTimes:
    device = shared.device
    whole, few = _tokens(rows, length, device), _tokens(1, FEW_TOKENS, device)

    def both() -> None:
        _forward(shared, whole).backward()

    def queued() -> None:
        _forward(shared, few).backward()

    def scoring() -> None:
        with torch.no_grad():
            _forward(shared, whole)

    shared.base.train()
    both()  # the warm-up
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, _ = timed(both)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    queued()
    _, host = timed(queued)
    shared.base.eval()
    scoring()
    scoring_seconds, _ = timed(scoring)
    shared.base.zero_grad(set_to_none=True)
    return RoundTimes(seconds, host, scoring_seconds, peak)


def _tokens(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Return tokens of shape (rows, length)."""
    return torch.randint(3, 40, (rows, length), device=device)


def _forward(shared: SharedBase, ids: torch.Tensor) -> torch.Tensor:
    """Return the sum of the decoder's output for tokens of shape (rows, length), as a loss."""
    with mixed_precision(shared.base):
        hidden: torch.Tensor = shared.base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.float().sum()


def counted(shared: SharedBase, rows: int, length: int) -> int:
    """Return the operations of both passes as the stages run them: of products and attention, without 4-bit products.

    They are counted once and outside of what is timed: the counter takes longer than the passes.
    """
    shared.base.train()
    with FlopCounterMode(display=False, custom_mapping={**ATTENTION_FLOPS}) as counter:
        _forward(shared, _tokens(rows, length, shared.device)).backward()
    shared.base.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


def figures(runs: Sequence[RoundTimes], operations: int, flops: float) -> MicroBatchTime:
    """Return median and spread of the seconds over all rounds, with MFU by the median."""
    seconds = spread([second for run in runs for second in run.seconds])
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return {
        "seconds": seconds,
        "host_seconds": spread([second for run in runs for second in run.host_seconds]),
        "scoring_seconds": spread([second for run in runs for second in run.scoring_seconds]),
        "operations": operations,
        "peak_bytes": max(peaks, default=None),
        "mfu": operations / seconds["median"] / flops,
    }


def timed(work: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Return the seconds until the device is done, and until the host has queued the work, of each repeat."""
    total, queued = [], []
    for _ in range(REPEATS):
        synchronize()
        start = time.perf_counter()
        work()
        queued.append(time.perf_counter() - start)
        synchronize()
        total.append(time.perf_counter() - start)
    return total, queued


def switch_ms(shared: SharedBase) -> float:
    """Return the median milliseconds of a role switch between policy and value, as in PPO's micro-batches."""
    seconds = []
    for _ in range(SWITCHES):
        for role in ("value", "policy"):
            start = time.perf_counter()
            shared.roles.activate(role)
            seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)
