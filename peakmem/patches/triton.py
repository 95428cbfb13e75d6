"""Triton: a kernel allocates nothing, but that finding the best of its forms takes a buffer on the card."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from peakmem.tensors import META, forget, tensors_in

if TYPE_CHECKING:
    from peakmem.device import StandIn

FLUSHED = 256 * 1024 * 1024  # bytes that are written between two timings (backends/nvidia/driver.py)


def replacements(stand_in: "StandIn") -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield symbols, and what stands in the place of each: a launch for which there is no card."""
    if stand_in.stands_for == "cuda":
        yield "triton.runtime.jit:JITFunction.run", lambda _: _launch
        yield "triton.runtime.autotuner:Autotuner.run", lambda _: _tuned


def _launch(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
    """Launch nothing: results were allocated before. Numbers that a kernel may have written are not known."""
    for x in tensors_in(*args, *options.values()):
        forget(x)


def _tuned(tuner: Any, *args: Any, **options: Any) -> Any:
    """Launch the first form, after the buffer that timing all of them would take, the first time."""
    if len(tuner.configs) > 1 and not tuner.cache:
        tuner.cache[()] = tuner.configs[0]
        with torch._C.DisableTorchFunction():
            torch.empty(FLUSHED // 4, dtype=torch.int32, device=META)
    return tuner.fn.run(*args, **options, **tuner.configs[0].all_kwargs())
