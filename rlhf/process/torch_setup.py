"""Torch's settings in a process that runs a recipe: device, threads, kernels, memory, random numbers."""

import ctypes
import os

import torch
from transformers import set_seed

from rlhf.errors import UserError
from rlhf.process import distributed
from rlhf.process.memory import CONTEXT_BYTES
from rlhf.recipe import Recipe
from rlhf.terminal.wording import size_in_bytes


def device_of(recipe: Recipe) -> torch.device:
    """Return the recipe's device. Raises UserError when it is CUDA and no GPU can be used."""
    if recipe.hardware.device == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs alone"
        raise UserError(
            f"the recipe needs CUDA, and torch {torch.__version__}, {built}, finds no usable GPU: see `nvidia-smi`, or "
            f"use --hw cpu; a torch with CUDA: `rm -r .venv`, then `make setup HW={recipe.hardware.name}`"
        )
    if recipe.hardware.device == "cuda" and distributed.launched():
        return torch.device("cuda", distributed.local_rank())
    return torch.device(recipe.hardware.device)


def set_up_torch(recipe: Recipe) -> torch.device:
    """Set up threads, kernels, memory and torch's generators for a recipe; return its device.

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
        # On compute capability 9.0 torch would prefer cuDNN's attention to flash attention, and here it has two faults.
        # It builds an execution plan for each new shape, which takes tens of milliseconds forward and backward, and
        # batches sorted by length have hundreds of shapes. Its workspace is also missing from the memory predictions.
        # Flash attention, or the memory-efficient kernel where there is a mask, does the same work with the same
        # rounding to bfloat16.
        torch.backends.cuda.enable_cudnn_sdp(False)
    cap_memory(device)
    set_seed(recipe.seed)
    return device


def cap_memory(device: torch.device) -> None:
    """Let this process use no more of the card than RLHF_VRAM_CAP (`24GB`, `24GiB`), to try what fits a smaller card.

    torch caps only its own allocator, so its cap is the variable's size minus `CONTEXT_BYTES`. Without the variable, or
    on a CPU, there is no cap. Raises UserError if the variable is not a size, or leaves no room beside the context.
    """
    cap = os.environ.get("RLHF_VRAM_CAP")
    if not cap:
        return
    size = size_in_bytes(cap)
    if size is None or size <= CONTEXT_BYTES:
        least = f"{CONTEXT_BYTES / 1e9:.1f} GB, what the CUDA context alone takes"
        raise UserError(f"RLHF_VRAM_CAP={cap}: write a size with its unit, for example 24GB, and more than {least}")
    if device.type == "cpu":
        return
    # torch needs an index here. The recipe's device has none, because transformers compares it.
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (size - CONTEXT_BYTES) / total), index)


def _keep_freed_memory() -> None:
    """Let glibc reuse the pages of freed tensors: new pages from the kernel cost 5 % of a PPO step."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    mallopt(-4, 0)  # M_MMAP_MAX: logits too, which are larger than the largest M_MMAP_THRESHOLD
