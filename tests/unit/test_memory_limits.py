"""How memory that runs out is recognised, and what a person is told."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.errors import UserError
from rlhf.process import exhaustion
from rlhf.run.checkpoints import Checkpoints
from rlhf.stages.runner import _explained_errors
from tests.helpers import small


def test_running_out_of_memory_names_the_way_out(tmp_path):
    run: Any = SimpleNamespace(
        stage="sft", path=tmp_path, loaded=SimpleNamespace(directory="recipes/mine/v1", recipe=small().recipe)
    )
    run.run_directory, run.checkpoints = tmp_path, Checkpoints(tmp_path)
    way_out = r"sft: out of memory .*rlhf plan --recipe recipes/mine/v1 --fastest"
    with pytest.raises(UserError, match=way_out), _explained_errors(run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


class OutOfMemoryError(RuntimeError):
    """As torch's is called."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(13, "Permission denied"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (UserError("the row says: out of memory"), False),  # ours says what it means, and may quote
        (ImportError("libtorch.so: failed to map segment from shared object"), False),
    ],
)
def test_memory_that_runs_out_is_recognised(error, expected):
    assert exhaustion.out_of_memory(error) is expected


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_memory_that_runs_out_is_recognised_below_an_error_that_it_led_to(link):
    error = RuntimeError("the file cannot be closed")
    setattr(error, link, MemoryError())
    assert exhaustion.out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch.so: failed to map segment from shared object"),
        RuntimeError("could not create a primitive"),  # oneDNN
    ],
)
def test_under_a_limit_a_library_that_fails_is_out_of_memory(monkeypatch, error):
    monkeypatch.setattr(exhaustion, "memory_limit", lambda: None)
    assert not exhaustion.out_of_memory(error)
    monkeypatch.setattr(exhaustion, "memory_limit", lambda: 10**9)
    assert exhaustion.out_of_memory(error)
    assert exhaustion.limit_in_words() == " (this process may have 1.0 GB of addresses: ulimit -v)"


FAILS_AT_EXIT = """
import atexit
import click
from rlhf.cli import guard
from rlhf.errors import UserError

class Library:
    def __del__(self):
        raise MemoryError("in a destructor")

def clean_up():
    raise MemoryError("at exit")

@click.command()
def command():
    raise {error}

library = Library()
atexit.register(clean_up)
guard.guarded(command)
"""


@pytest.mark.parametrize(
    ("error", "quiet"),
    [('MemoryError("no")', True), ('UserError("no") from MemoryError()', True), ('UserError("no")', False)],
)
def test_after_memory_ran_out_failures_at_exit_are_not_printed(error, quiet):
    code = FAILS_AT_EXIT.format(error=error)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    first, *others = done.stderr.splitlines()
    assert done.returncode == (71 if quiet else 1) and first.startswith("error: ")
    assert (not others) is quiet, done.stderr
