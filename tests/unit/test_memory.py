"""What memory may still be taken: of the machine, of a control group."""

from types import SimpleNamespace

import pytest

from rlhf.process import memory

GB = 10**9


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 64 GB free."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GB))


def group(folder, names, limit, used, statistics=""):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(names, (limit, used, statistics), strict=True):
        (folder / name).write_text(f"{content}\n")


NAMES = ("memory.max", "memory.current", "memory.stat")


def test_the_tightest_group_decides_and_pages_of_files_are_free(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:cpuset:/\n0::/job/step\n")
    root = tmp_path / "sys/fs/cgroup"
    group(root / "job/step", NAMES, "max", 3 * GB)
    assert memory.free(tmp_path) == (64 * GB, "free on this machine")
    group(root / "job", NAMES, 8 * GB, 5 * GB, f"inactive_file {GB}\nactive_file {GB}")
    assert memory.free(tmp_path) == (5 * GB, "left of the container's limit")
    group(root, NAMES, 2 * GB, 3 * GB)  # a container may see its own group as the topmost one
    assert memory.free(tmp_path).size == 0
