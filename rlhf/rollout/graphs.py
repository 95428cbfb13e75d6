"""The capture of CUDA's work as a graph, without giving up the allocator's cache."""

import functools
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

# The allocator's cache is emptied before a graph is captured where the card has fewer bytes left (the temporaries of a
# decoding step are predicted to take at most 0.5 GiB in the recipes here), and before each n-th capture: the memory of
# dropped graphs is returned in no other way.
CAPTURE_ROOM = 2 << 30
EMPTIED_EVERY = 8
_captures = itertools.count(1)  # numbers of the captures of this process


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what the block launches on the current device as a graph.

    torch.cuda.graph does this too, but first waits for the device and empties the allocator's cache: what comes after
    would ask the driver for gigabytes again. While it captures, the allocator cannot release its cache. So it is
    emptied only where `CAPTURE_ROOM` and `EMPTIED_EVERY` ask for it.

    After an error there is no graph, and the device can be used as before. The error is the block's own, which names
    what cannot be captured; torch's for the end of such a capture would only say that there was one.
    """
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
def _capture_stream() -> torch.cuda.Stream:
    """Return the one stream of all captures: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream()


def _room() -> int:
    """Return the bytes that the allocator may still take of the card, under the cap of `cap_memory`."""
    free, total = torch.cuda.mem_get_info()
    cap = int(torch.cuda.get_per_process_memory_fraction() * total)
    return min(free, cap - torch.cuda.memory_reserved())
