"""This machine as hardware for a recipe on a CPU: its memory, its threads, and rates that are measured in seconds."""

import os
import time
from collections.abc import Callable, Mapping

import psutil

from peakmem import cards
from rlhf.plan.own_rows import read_rows
from rlhf.plan.phases import PredictedStage
from rlhf.plan.projection import SECONDS_PER_HOUR, stage_work
from rlhf.process import memory
from rlhf.recipe import TRAINING_STAGES, PinnedRecipe, Recipe, StageName

# Bytes of a process beside tensors. Whole stages of cpu-tiny v1 with one row at a time had 0.54 to 0.66 GB resident at
# their peak, measured by getrusage (2026-11-27).
LIBRARIES = 1_000_000_000
SECONDS = 1.0  # that each rate is measured for
COPIED = 128 * 2**20  # bytes: more than a processor's cache


def free_bytes(processes: int = 1) -> int:
    """Return the bytes that the tensors of each of so many processes may take now."""
    return max(0, memory.free().size // processes - LIBRARIES)


def needed_bytes(recipe: Recipe, stage: StageName, tensors: int) -> int:
    """Return what a stage on a CPU needs of the machine: tensors (bytes) and libraries of each of its processes."""
    return recipe.processes(stage) * (tensors + LIBRARIES)


def threads() -> int:
    """Return the threads of this process: one for each processor core that it may use."""
    cores, allowed = psutil.cpu_count(logical=False), len(os.sched_getaffinity(0))
    return min(cores or allowed, allowed)


def measure(width: int, inner: int) -> cards.Rates:
    """Return the rates of products of 512 rows with a matrix (width, inner), and of copies, on `threads()` threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads())
    try:
        rows, matrix = torch.randn(512, width), torch.randn(width, inner)
        source = torch.zeros(COPIED, dtype=torch.uint8)
        target = torch.empty_like(source)
        products = 2 * 512 * width * inner / _seconds(lambda: rows @ matrix)
        return cards.Rates(products, 2 * COPIED / _seconds(lambda: target.copy_(source)), "measured, in float32")
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object]) -> float:
    """Return the median time of repeated work; the first time does not count."""
    work()
    end = time.perf_counter() + SECONDS
    times: list[float] = []
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def projected_hours(
    loaded: PinnedRecipe, stages: Mapping[StageName, PredictedStage], rates: cards.Rates
) -> dict[StageName, float]:
    """Return the projected hours of stages: their products and what they move, one after the other at these rates.

    Stages that do not train are left out, and those whose number of rows is not known.
    """
    own = read_rows(loaded.recipe, list(stages))
    rows = own.stages if own else {}
    hours = {}
    for stage, predicted in stages.items():
        work = stage_work(loaded.recipe, stage, predicted, rows.get(stage) if stage in TRAINING_STAGES else None)
        if work is not None:
            seconds = sum(rates.seconds(work.flops, work.moved + work.decoded_bytes))
            hours[stage] = seconds / SECONDS_PER_HOUR
    return hours
