"""CUDA in a whole process: what its context takes, and the variables that are set before torch starts."""

import os

from rlhf.process import environment
from rlhf.recipe import Recipe

# Bytes of a card that the driver's context and the kernels' code take outside of torch's allocator: `nvidia-smi` shows
# them as a process's use above `torch.cuda.memory_reserved`. This is a guess for large cards; on a Tesla T4 others
# measured 140.9 MiB. An H200 had 2.2 to 2.3 GB in use above what was reserved, of which an unknown
# part was in use before; records of the GPU benchmark now say how much (`idle_bytes`).
CONTEXT_BYTES = 600_000_000
CONTEXT_SEEN = 2_300_000_000  # beside the H200; what fits by less than the difference is called tight


def set_environment(recipe: Recipe) -> None:
    """Set the variables that torch, cuBLAS and the allocator read when they start. Call it before torch is imported.

    What would decide in the recipe's place is taken out (`environment.prepare`). Child processes inherit the rest. A
    value that the user has set is kept. Nothing is set for a CPU recipe.
    """
    environment.prepare()
    if recipe.hardware.device != "cuda":
        return
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
        # Batches of many lengths leave gaps between segments of fixed size; segments that can grow leave none.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def expandable_segments() -> bool:
    """Return whether torch's allocator uses expandable segments in a process prepared by `set_environment`."""
    config = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))
    return "expandable_segments:true" in config.replace(" ", "").lower()
