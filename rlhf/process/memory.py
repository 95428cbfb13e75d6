"""The memory that processes may still take here: free on the machine, and left of the limits that others set."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

MIB = 2**20  # the unit of Slurm's variables


class Free(NamedTuple):
    """Bytes that may still be taken, and in words what decides their number."""

    size: int
    words: str


def free(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Free:
    """Return the least of what is free on the machine and left of a control group's and of Slurm's limit.

    Swap does not count. `root` is the folder that has `proc` and `sys`.
    """
    limits = [Free(psutil.virtual_memory().available, "free on this machine")]
    limits += (Free(size, "left of the container's limit") for size in _left_of_groups(root))
    if (limit := _slurm_limit(environment)) is not None:
        left = limit - psutil.Process().memory_info().rss
        limits.append(Free(max(0, left), "left of Slurm's limit"))
    return min(limits)


def _left_of_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that are left of each limit on this process's control group and on those that it is part of.

    Pages of files do not count as used, because the kernel gives them up. Source: the kernel's documentation of control
    groups, "Memory Resource Controller" (version 1) and "Control Group v2".
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounted, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mounted, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = mounted / path.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mounted):
                break
            limit, used, prefix = _text(folder / names[0]), _text(folder / names[1]), names[2]
            if limit.isdecimal() and used.isdecimal():  # "max": no limit
                fields = dict(row.split()[:2] for row in _text(folder / "memory.stat").splitlines())
                files = sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield max(0, int(limit) - max(0, int(used) - files))


def _text(file: Path) -> str:
    """Return the content of a file of the kernel, stripped; empty where there is none."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _slurm_limit(environment: Mapping[str, str]) -> int | None:
    """Return the bytes that Slurm gives a job on this node; None without a job, and for one that has all of them."""
    if of_node := _count(environment, "SLURM_MEM_PER_NODE"):
        return of_node * MIB
    of_core, cores = _count(environment, "SLURM_MEM_PER_CPU"), _count(environment, "SLURM_CPUS_ON_NODE")
    return of_core * cores * MIB or None


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0
