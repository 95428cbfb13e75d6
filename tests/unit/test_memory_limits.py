"""How memory and room that run out are recognised, and what a person is told."""

import errno

import pytest

from rlhf.errors import UserError
from rlhf.process import exhaustion


class OutOfMemoryError(RuntimeError):
    """As torch's is called."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "memory"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "memory"),
        (OSError(12, "Cannot allocate memory"), "memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "room"),
        (OSError(errno.EFBIG, "File too large", "metrics.jsonl"), "room"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), "room"),  # torch.save
        (ValueError("Error while serializing: I/O error: File too large (os error 27)"), "room"),  # safetensors
        (RuntimeError("shape mismatch"), None),
        (ValueError("out of memory"), None),
        (UserError("the row says: out of memory"), None),  # ours says what it means, and may quote
        (ImportError("libtorch.so: failed to map segment from shared object"), None),
        (OSError(errno.EACCES, "Permission denied"), None),
    ],
)
def test_what_ran_out_is_recognised(error, expected):
    assert exhaustion.ran_out(error) == expected


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_memory_that_runs_out_is_recognised_below_an_error_that_it_led_to(link):
    error = RuntimeError("the file cannot be closed")
    setattr(error, link, MemoryError())
    assert exhaustion.ran_out(error) == "memory"
