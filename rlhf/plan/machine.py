"""This machine as hardware for a recipe on a CPU: its memory, its threads, and rates that are measured in a moment."""

import functools
import os
import time

import psutil

from rlhf.plan.hardware import Rates
from rlhf.process import memory
from rlhf.recipe import Recipe

# Bytes of a process beside tensors. Whole stages of cpu-tiny v1 with one row at a time had 0.54 to 0.66 GB resident at
# their peak, measured by getrusage (2026-11-27).
LIBRARIES = 1_000_000_000
SECONDS = 0.3  # that each rate is measured for
COPIED = 128 * 2**20  # bytes: more than a processor's cache


def free_bytes(processes: int = 1) -> int:
    """Return the bytes that the tensors of each of so many processes may take now."""
    return max(0, memory.free().size // processes - LIBRARIES)


def threads() -> int:
    """Return the threads of this process: one for each processor core that it may use."""
    cores, allowed = psutil.cpu_count(logical=False), len(os.sched_getaffinity(0))
    return min(cores or allowed, allowed)


def rates(recipe: Recipe) -> Rates:
    """Return what this machine does in a second for a recipe on a CPU, which has an architecture."""
    shape = recipe.model.architecture
    assert shape
    inner = shape.intermediate_size or shape.hidden_size
    return measure(shape.hidden_size, inner, recipe.hardware.threads or threads())


@functools.cache
def measure(width: int, inner: int, many: int) -> Rates:
    """Return the rates of products of 512 rows with a matrix (width, inner), and of copies, on so many threads.

    They are those of a machine without other work: CPU time is what counts. Each is measured once in a process.
    """
    import torch
    from torch.utils.benchmark import Timer

    tensors = {"rows": torch.randn(512, width), "matrix": torch.randn(width, inner)}
    tensors |= {"source": torch.zeros(COPIED, dtype=torch.uint8), "target": torch.zeros(COPIED, dtype=torch.uint8)}

    def seconds(statement: str) -> float:
        """Return the median CPU time of repeated work, divided by its threads."""
        timer = Timer(statement, globals=tensors, timer=time.process_time, num_threads=many)
        return timer.blocked_autorange(min_run_time=SECONDS).median / many

    products = 2 * 512 * width * inner / seconds("rows @ matrix")
    return Rates(products, 2 * COPIED / seconds("target.copy_(source)"), "measured, in float32")
