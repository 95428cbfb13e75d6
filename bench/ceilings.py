"""Measured limits of a device: rates of a large product and a large copy, the denominators of HFU and MBU."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from bench.records import Ceilings
from rlhf.models.matmul import matmul

SIZES = {"cuda": (8192, 2**30, 20), "cpu": (1024, 2**27, 10)}  # side of the matrices, bytes copied, repeats


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the operations per second of a large product and bytes per second (read and written) of a large copy.

    Both are medians of several runs after two that are not counted, with torch's current number of threads; the product
    is by the faster of its libraries. Seconds are by the clock of the stages' steps: CPU seconds of all threads on a
    CPU, the wall's on a GPU. The memory goes back to the card, because others measure on it next.
    """
    rates = _rates(device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def _rates(device: torch.device, dtype: torch.dtype) -> Ceilings:
    side, size, repeats = SIZES[device.type]
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = min(_median_seconds(partial(multiply, a, b), device, repeats) for multiply in (torch.mm, matmul))
    copy = _median_seconds(lambda: target.copy_(source), device, repeats)
    return {
        "flops": 2 * side**3 / product,
        "bandwidth": 2 * size / copy,
        "clock": "cpu" if device.type == "cpu" else "wall",
    }


def _median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    now = time.process_time if device.type == "cpu" else time.perf_counter  # a GPU works while its process waits
    seconds = []
    for _ in range(repeats + 2):
        wait()
        start = now()
        work()
        wait()
        seconds.append(now() - start)
    return statistics.median(seconds[2:])
