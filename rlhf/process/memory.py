"""The memory that processes may still take here: free on the machine, and left of a container's limit."""

from pathlib import Path
from typing import NamedTuple

import psutil


class Free(NamedTuple):
    """Bytes that may still be taken, and in words what decides their number."""

    size: int
    words: str


def free(groups: Path = Path("/sys/fs/cgroup")) -> Free:
    """Return the least of what is free on the machine and left of a container's limit. Swap does not count.

    `groups` is where the control group of a container is mounted. Pages of files do not count as used, because the
    kernel gives them up. Source: the kernel's documentation, "Control Group v2".
    """
    machine = Free(psutil.virtual_memory().available, "free on this machine")
    try:
        limit = int((groups / "memory.max").read_text())
        used = int((groups / "memory.current").read_text())
        fields = dict(row.split()[:2] for row in (groups / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return machine
    files = sum(int(fields.get(name, 0)) for name in ("active_file", "inactive_file"))
    return min(machine, Free(max(0, limit - max(0, used - files)), "left of the container's limit"))
