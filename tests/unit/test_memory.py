"""What memory may still be taken: of the machine, of a control group."""

from types import SimpleNamespace

import pytest

from rlhf.process import memory

GB = 10**9


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 64 GB free."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GB))


def group(folder, names, limit, used, statistics="anon 0"):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(names, (limit, used, statistics), strict=True):
        (folder / name).write_text(f"{content}\n")


NAMES = ("memory.max", "memory.current", "memory.stat")


def test_the_tighter_limit_decides_and_pages_of_files_are_free(tmp_path):
    assert memory.free(tmp_path) == (64 * GB, "free on this machine"), "no control group"
    group(tmp_path, NAMES, "max", 3 * GB)
    assert memory.free(tmp_path) == (64 * GB, "free on this machine")
    group(tmp_path, NAMES, 8 * GB, 5 * GB, f"inactive_file {GB}\nactive_file {GB}")
    assert memory.free(tmp_path) == (5 * GB, "left of the container's limit")
    group(tmp_path, NAMES, 2 * GB, 3 * GB)
    assert memory.free(tmp_path).size == 0
