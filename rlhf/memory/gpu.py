"""What decides how much memory CUDA libraries take on a card: its compute capability and its multiprocessors."""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    capability: tuple[int, int]  # CUDA compute capability: (8, 9), (9, 0)
    multiprocessors: int


_H100_PCIE, _H100_SXM = Gpu((9, 0), 114), Gpu((9, 0), 132)
# By the recipe's hardware.name, from the same papers as the rates in rlhf/memory/projection.py, which takes `h100` for
# the PCIe card and `8xh100` for SXM.
GPUS = {"4090": Gpu((8, 9), 128), "h100": _H100_PCIE, "8xh100": _H100_SXM, "h200": _H100_SXM}
UNKNOWN = _H100_SXM  # takes the most memory: largest workspaces, and 4-bit weights are unpacked soonest

SMALL_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
LARGE_WORKSPACE = 32 * 1024 * 1024


def find(hardware: str) -> Gpu:
    """Return the card of a recipe's hardware.name: `2x4090` are two of `4090`; an unlisted name is `UNKNOWN`."""
    return GPUS.get(hardware) or GPUS.get(re.sub(r"^\d+x", "", hardware), UNKNOWN)


def workspace(card: str | tuple[int, int]) -> int:
    """Return the bytes of one cuBLAS workspace on a card, given by hardware.name or by compute capability.

    torch allocates one for each pair of a cuBLAS handle, of which every thread has its own, and a stream, and keeps it:
    32 MiB on Hopper and Blackwell, `:4096:2:16:8` on others (aten/src/ATen/cuda/CublasHandlePool.cpp,
    parseChosenWorkspaceSize; CUBLAS_WORKSPACE_CONFIG changes it). cuBLASLt, which `addmm` with a bias may use, works in
    the same memory unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0.
    """
    capability = card if isinstance(card, tuple) else find(card).capability
    return LARGE_WORKSPACE if capability[0] >= 9 else SMALL_WORKSPACE
