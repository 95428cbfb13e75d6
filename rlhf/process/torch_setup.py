"""Torch's settings in a process that runs a recipe: device, threads, kernels, memory, random numbers."""

import ctypes

import torch
from transformers import set_seed

from rlhf.errors import UserError
from rlhf.process import cuda, distributed
from rlhf.recipe import Recipe


def device_of(recipe: Recipe) -> torch.device:
    """Return the recipe's device. Raises UserError when it is CUDA and no GPU can be used."""
    if recipe.hardware.device == "cuda" and not torch.cuda.is_available():
        if torch.version.cuda is None:
            raise UserError(
                f"the recipe needs CUDA, and torch {torch.__version__} is built for CPUs alone. Without a GPU: "
                "--hw cpu. With one, in a checkout: `rm -r .venv`, then "
                f"`make setup HW={recipe.hardware.name}` without an index of CPU wheels in PIP_ARGS"
            )
        raise UserError(
            f"the recipe needs CUDA, and torch {torch.__version__} finds no usable GPU: see `nvidia-smi`, or use "
            "--hw cpu"
        )
    if recipe.hardware.device == "cuda" and distributed.launched():
        return torch.device("cuda", distributed.local_rank())
    return torch.device(recipe.hardware.device)


def set_up_torch(recipe: Recipe) -> torch.device:
    """Set up threads, kernels and torch's generators for a recipe; return its device.

    A CPU computes deterministically, which costs nothing there.
    """
    if recipe.hardware.threads:
        torch.set_num_threads(recipe.hardware.threads)
    device = device_of(recipe)
    if device.type == "cpu":
        _keep_freed_memory()
        torch.use_deterministic_algorithms(True)
        # Filling new tensors with NaN costs time and changes no result here.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # stubs lack it
    else:
        cuda.configure()
    cuda.cap_memory(device)
    set_seed(recipe.seed)
    return device


def _keep_freed_memory() -> None:
    """Let glibc reuse the pages of freed tensors: new pages from the kernel cost 5 % of a PPO step."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its largest
