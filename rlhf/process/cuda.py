"""CUDA settings of a whole process: environment variables before torch starts, switches afterwards.

torch is imported only inside functions, so that the variables can be set before it.
"""

import functools
import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rlhf.errors import UserError
from rlhf.process import environment
from rlhf.process.sizes import size_in_bytes
from rlhf.recipe import Recipe

if TYPE_CHECKING:
    import torch

# Bytes of a card that the driver's context and the kernels' code take outside of torch's allocator: `nvidia-smi` shows
# them as a process's use above `torch.cuda.memory_reserved`. This is a guess for large cards; on a Tesla T4 others
# measured 140.9 MiB (studies/outside). An H200 had 2.2 to 2.3 GB in use above what was reserved, of which an unknown
# part was in use before; records of the GPU benchmark now say how much (`idle_bytes`).
CONTEXT_BYTES = 600_000_000
CONTEXT_SEEN = 2_300_000_000  # beside the H200; what fits by less than the difference is called tight
# The allocator's cache is emptied before a graph is captured where the card has fewer bytes left (the temporaries of a
# decoding step are predicted to take at most 0.5 GiB in the recipes here), and before each n-th capture: the memory of
# dropped graphs is returned in no other way.
CAPTURE_ROOM = 2 << 30
EMPTIED_EVERY = 8
_captures = itertools.count(1)  # numbers of the captures of this process


def set_environment(recipe: Recipe) -> None:
    """Set the variables that torch, cuBLAS and the allocator read when they start. Call it before torch is imported.

    What would decide in the recipe's place is taken out (`environment.prepare`). Child processes inherit the rest. A
    value that the user has set is kept. Nothing is set for a CPU recipe.
    """
    environment.prepare()
    if recipe.hardware.device != "cuda":
        return
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
        # Batches of many lengths leave gaps between segments of fixed size; segments that can grow leave none.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def expandable_segments() -> bool:
    """Return whether torch's allocator uses expandable segments in a process prepared by `set_environment`."""
    config = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))
    return "expandable_segments:true" in config.replace(" ", "").lower()


def configure() -> None:
    """Choose the CUDA kernels of this process. A program that runs a model on CUDA calls this once, before the model.

    cuDNN's attention is switched off. On compute capability 9.0 torch would prefer it to flash attention, and here it
    has two faults. It builds an execution plan for each new shape, which takes tens of milliseconds forward and
    backward, and batches sorted by length have hundreds of shapes. Its workspace is also missing from the memory
    predictions. Flash attention, or the memory-efficient kernel where there is a mask, does the same work with the same
    rounding to bfloat16.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def capturing(graph: "torch.cuda.CUDAGraph") -> Iterator[None]:
    """Capture what the block launches on the current device as a graph.

    torch.cuda.graph does this too, but first waits for the device and empties the allocator's cache: what comes after
    would ask the driver for gigabytes again. While it captures, the allocator cannot release its cache. So it is
    emptied only where `CAPTURE_ROOM` and `EMPTIED_EVERY` ask for it.

    After an error there is no graph, and the device can be used as before. The error is the block's own, which names
    what cannot be captured; torch's for the end of such a capture would only say that there was one.
    """
    import torch

    if next(_captures) % EMPTIED_EVERY == 0 or _room() < CAPTURE_ROOM:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    stream, current = _capture_stream(), torch.cuda.current_stream()
    pool = torch.cuda.graph_pool_handle()
    stream.wait_stream(current)
    with torch.cuda.stream(stream), _keeping_garbage():
        # "thread_local": CUDA calls of other threads meanwhile, such as loading data, are not errors.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(stream)


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Let Python collect no garbage in the block: to destroy a graph in it may end a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def _capture_stream() -> "torch.cuda.Stream":
    """Return the one stream of all captures: cuBLAS keeps a workspace for every stream."""
    import torch

    return torch.cuda.Stream()


def _room() -> int:
    """Return the bytes that the allocator may still take of the card, under the cap of `cap_memory`."""
    import torch

    free, total = torch.cuda.mem_get_info()
    cap = int(torch.cuda.get_per_process_memory_fraction() * total)
    return min(free, cap - torch.cuda.memory_reserved())


def cap_memory(device: "torch.device") -> None:
    """Let this process use no more of the card than RLHF_VRAM_CAP (`24GB`, `24GiB`), to try what fits a smaller card.

    torch caps only its own allocator, so its cap is the variable's size minus `CONTEXT_BYTES`. Without the variable, or
    on a CPU, there is no cap. Raises UserError if the variable is not a size, or leaves no room beside the context.
    """
    import torch

    cap = os.environ.get("RLHF_VRAM_CAP")
    if not cap:
        return
    size = size_in_bytes(cap)
    if size is None:
        raise UserError(f"RLHF_VRAM_CAP={cap}: write a size with its unit, for example 24GB")
    if size <= CONTEXT_BYTES:
        raise UserError(f"RLHF_VRAM_CAP={cap}: the CUDA context alone takes about {CONTEXT_BYTES / 1e9:.1f} GB")
    if device.type == "cpu":
        return
    # torch needs an index here. The recipe's device has none, because transformers compares it.
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (size - CONTEXT_BYTES) / total), index)
