"""Measured limits of a device: rates of a large product and a large copy, the denominators of MFU and MBU."""

import statistics
import time
from collections.abc import Callable

import torch

from bench.kinds import Ceilings

SIZES = {"cuda": (8192, 2**30, 20), "cpu": (1024, 2**27, 10)}  # side of the matrices, bytes copied, repeats


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the operations per second of a large product and bytes per second (read and written) of a large copy.

    Both are medians of several runs by the wall's clock, after two that are not counted, with torch's current number
    of threads.
    """
    side, size, repeats = SIZES[device.type]
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _median_seconds(lambda: torch.mm(a, b), device, repeats)
    copy = _median_seconds(lambda: target.copy_(source), device, repeats)
    return {"flops": 2 * side**3 / product, "bandwidth": 2 * size / copy}


def _median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(repeats + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])
