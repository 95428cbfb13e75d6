"""Memory outside of torch: what a process may still take here, and what CUDA's context takes of a card."""

from pathlib import Path
from typing import NamedTuple

import psutil

# Bytes of a card that the driver's context and the kernels' code take outside of torch's allocator: `nvidia-smi` shows
# them as a process's use above `torch.cuda.memory_reserved`. This is a guess for large cards; on a Tesla T4 others
# measured 140.9 MiB. An H200 had 2.2 to 2.3 GB in use above what was reserved, of which an unknown
# part was in use before; records of the GPU benchmark now say how much (`idle_bytes`).
CONTEXT_BYTES = 600_000_000
CONTEXT_SEEN = 2_300_000_000  # beside the H200; what fits by less than the difference is called tight


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
