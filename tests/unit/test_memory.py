"""What memory may still be taken: of the machine, of a control group, of Slurm."""

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


V2 = ("memory.max", "memory.current", "memory.stat")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")


@pytest.mark.parametrize(
    ("line", "mounted", "names", "prefix"),
    [("0::/job/step", "", V2, ""), ("9:cpu,memory:/job/step", "memory", V1, "total_")],
)
def test_the_tightest_group_decides_and_pages_of_files_are_free(tmp_path, line, mounted, names, prefix):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpuset:/\n{line}\n")
    root = tmp_path / "sys/fs/cgroup" / mounted
    group(root / "job/step", names, "max" if names is V2 else 2**63 - 4096, 3 * GB)
    assert memory.free(tmp_path, {}) == (64 * GB, "free on this machine")
    group(root / "job", names, 8 * GB, 5 * GB, f"{prefix}inactive_file {GB}\n{prefix}active_file {GB}")
    assert memory.free(tmp_path, {}) == (5 * GB, "left of the container's limit")
    group(root, names, 2 * GB, 3 * GB)  # a container may see its own group as the topmost one
    assert memory.free(tmp_path, {}).size == 0


@pytest.mark.parametrize(
    ("variables", "limit"),
    [
        ({}, None),
        ({"SLURM_MEM_PER_NODE": "0"}, None),  # all of the node
        ({"SLURM_MEM_PER_NODE": "8192"}, 8 * 2**30),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "3"}, 6 * 2**30),
        ({"SLURM_MEM_PER_CPU": "2048"}, None),
        ({"SLURM_MEM_PER_NODE": "many"}, None),
    ],
)
def test_a_job_of_slurm_has_its_part(tmp_path, monkeypatch, variables, limit):
    info = SimpleNamespace(rss=GB)
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: info))
    expected = (64 * GB, "free on this machine") if limit is None else (limit - GB, "left of Slurm's limit")
    assert memory.free(tmp_path, variables) == expected
