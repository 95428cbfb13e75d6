"""CUDA in a whole process: what its context takes of a card, and how its allocator is set."""

import os

# Bytes of a card that the driver's context and the kernels' code take outside of torch's allocator: `nvidia-smi` shows
# them as a process's use above `torch.cuda.memory_reserved`. This is a guess for large cards; on a Tesla T4 others
# measured 140.9 MiB. An H200 had 2.2 to 2.3 GB in use above what was reserved, of which an unknown
# part was in use before; records of the GPU benchmark now say how much (`idle_bytes`).
CONTEXT_BYTES = 600_000_000
CONTEXT_SEEN = 2_300_000_000  # beside the H200; what fits by less than the difference is called tight


def expandable_segments() -> bool:
    """Return whether torch's allocator uses expandable segments in a process prepared by `environment.prepare`."""
    config = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))
    return "expandable_segments:true" in config.replace(" ", "").lower()
