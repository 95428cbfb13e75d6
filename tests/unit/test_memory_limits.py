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
        (MemoryError(), True),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (UserError("the row says: out of memory"), False),  # ours says what it means, and may quote
        (ImportError("libtorch.so: failed to map segment from shared object"), False),
    ],
)
def test_memory_that_runs_out_is_recognised(error, expected):
    assert exhaustion.out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EFBIG, "File too large", "metrics.jsonl"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), True),  # torch.save
        (ValueError("Error while serializing: I/O error: File too large (os error 27)"), True),  # safetensors
        (OSError(errno.EACCES, "Permission denied"), False),
    ],
)
def test_a_file_that_cannot_grow_is_recognised(error, expected):
    assert exhaustion.out_of_room(error) is expected


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_memory_that_runs_out_is_recognised_below_an_error_that_it_led_to(link):
    error = RuntimeError("the file cannot be closed")
    setattr(error, link, MemoryError())
    assert exhaustion.out_of_memory(error)
