"""Libraries that are imported without what takes long."""

import gc
import subprocess
import sys

import pytest

from rlhf.process.libraries import without_collections


def test_no_collection_looks_at_libraries():
    before = gc.get_freeze_count()
    with without_collections():
        assert not gc.isenabled()
        kept: list[list[int]] = [[] for _ in range(1000)]  # as an import makes objects
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(kept)
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()


def test_triton_reports_no_leaks_when_the_process_ends():
    pytest.importorskip("triton")
    program = "from rlhf.process.libraries import without_collections\nwith without_collections(): import triton"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
