"""The memory that processes may still take here: free on the machine, and left of a container's limit."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class Free(NamedTuple):
    """Bytes that may still be taken, and in words what decides their number."""

    size: int
    words: str


def free(root: Path = Path("/")) -> Free:
    """Return the least of what is free on the machine and left of a control group's limit. Swap does not count.

    `root` is the folder that has `proc` and `sys`.
    """
    limits = [Free(psutil.virtual_memory().available, "free on this machine")]
    limits += (Free(size, "left of the container's limit") for size in _left_of_groups(root))
    return min(limits)


def _left_of_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that are left of each limit on this process's control group and on those that it is part of.

    Pages of files do not count as used, because the kernel gives them up. Source: the kernel's documentation, "Control
    Group v2".
    """
    mounted = root / "sys/fs/cgroup"
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    for group in (mounted / path.strip("/") for _, controllers, path in lines if not controllers):
        for folder in (group, *group.parents):
            limit, used = _text(folder / "memory.max"), _text(folder / "memory.current")
            if limit.isdecimal() and used.isdecimal():  # "max": no limit
                fields = dict(row.split()[:2] for row in _text(folder / "memory.stat").splitlines())
                files = sum(int(fields.get(name, 0)) for name in ("active_file", "inactive_file"))
                yield max(0, int(limit) - max(0, int(used) - files))
            if folder == mounted:
                break


def _text(file: Path) -> str:
    """Return the content of a file of the kernel, stripped; empty where there is none."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
