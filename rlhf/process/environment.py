"""The environment of a process that runs a recipe: what a recipe decides, no variable decides.

Launchers leave variables in shells, jobs and containers, and accelerate and transformers take ranks, engine and
precision from them; torch and its libraries take their arithmetic from others.
"""

import os
import re
import sys
from typing import TYPE_CHECKING

from rlhf.process import distributed
from rlhf.terminal import say

if TYPE_CHECKING:
    from rlhf.recipe import Recipe

# By prefix: each library adds names with each version.
ARITHMETIC = re.compile(
    r"ACCELERATE_(DOWNCAST|DYNAMO|FP8|MIXED_PRECISION)|ATEN_|(DNNL|ONEDNN)_|MKL_(CBWR|DISABLE|ENABLE)|(NVIDIA|HIPBLASLT)_"
    r"TF32_|TORCH_(ALLOW|BLAS|CUBLAS|CUDNN|LINALG|MIOPEN)_|TORCH(DYNAMO|INDUCTOR)_|XLA_(DOWNCAST|USE)_|USE_HUB_KERNELS"
)
LAUNCHER = re.compile(
    r"(RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|NODE|CROSS)_(RANK|SIZE|WORLD_SIZE)|ROLE_NAME|FORK_LAUNCHED)$|(ACCELERATE|"
    r"DEEPSPEED|FSDP|MASTER|MEGATRON_LM|PARALLELISM_CONFIG|SMDATAPARALLEL|TORCHELASTIC)_|(PMI[X2]?|OMPI|MV2|(I_)?MPI)_"
)
EXPANDABLE = "expandable_segments:True"  # a setting of torch's allocator


def prepare(recipe: "Recipe") -> None:
    """Take out what would decide in a recipe's place, and set what torch's allocator reads when it starts.

    Call it before torch is imported; child processes inherit the result. A process that is alone loses all variables of
    launchers and of torch's arithmetic, a rank of several those of arithmetic; a line names them. Slurm's variables
    stay: no library here reads ranks from them, and trackers log its job. For a card the allocator gets a setting where
    the user has set none.
    """
    alone = distributed.world() == 1
    found = {name for name in os.environ if ARITHMETIC.match(name) or (alone and LAUNCHER.match(name))}
    # Our own launch sets some, and so do libraries once they are imported.
    if found and distributed.STARTED_HERE not in os.environ and "torch" not in sys.modules:
        say(f"taken out of the environment, where the recipe decides: {', '.join(sorted(found))}")
    for name in found:
        del os.environ[name]
    if recipe.hardware.device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
        # Batches of many lengths leave gaps between segments of fixed size; segments that can grow leave none.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", EXPANDABLE)


def expandable_segments() -> bool:
    """Return whether torch's allocator uses expandable segments in a process that `prepare` has prepared."""
    config = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE))
    return EXPANDABLE.lower() in config.replace(" ", "").lower()
