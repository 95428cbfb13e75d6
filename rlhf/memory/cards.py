"""Facts about cards with their sources: memory, nominal rates, and what decides how much CUDA libraries allocate."""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """What decides how much memory CUDA libraries take on a card."""

    capability: tuple[int, int]  # CUDA compute capability: (8, 9), (9, 0)
    multiprocessors: int


_H100_PCIE, _H100_SXM = Gpu((9, 0), 114), Gpu((9, 0), 132)
# By the recipe's hardware.name, from the same papers as the rates below: `h100` is the PCIe card, `8xh100` SXM.
GPUS = {"4090": Gpu((8, 9), 128), "h100": _H100_PCIE, "8xh100": _H100_SXM, "h200": _H100_SXM}
UNKNOWN = _H100_SXM  # takes the most memory: largest workspaces, and 4-bit weights are unpacked soonest


class NominalRates(NamedTuple):
    """Nominal rates of a card, and where they stand."""

    flops: float  # per second, bfloat16 with float32 accumulation, dense
    bandwidth: float  # bytes per second
    source: str
    link: float | None = None  # bytes per second that it can receive from the others of its machine


_RTX_4090 = "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090"
NOMINAL_RATES = {  # by the recipe's hardware.name
    "4090": NominalRates(165.2e12, 1.008e12, _RTX_4090),
    "2x4090": NominalRates(
        165.2e12, 1.008e12, f"{_RTX_4090}; PCIe 4.0 x16 in one direction: 16 lanes of 16 GT/s, 128b/130b", 31.5e9
    ),
    "h100": NominalRates(756e12, 2.0e12, "NVIDIA H100 data sheet, PCIe (half of the rate with sparsity)"),
    "8xh100": NominalRates(
        989.5e12,
        3.35e12,
        "NVIDIA H100 data sheet, SXM (half of the rates with sparsity, NVLink of both directions)",
        450e9,
    ),
}

MEMORY = {"4090": (25.7, "24,564 MiB"), "h100": (85.5, "81,559 MiB")}  # GB, and what nvidia-smi shows

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


def size_in_bytes(text: str) -> int | None:
    """Return the bytes of a size such as `12GB` or `1.5 GiB`; None for all else, as a number without a unit."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(GB|GiB)", text, re.IGNORECASE)
    if not match or not float(match[1]):
        return None
    return round(float(match[1]) * (2**30 if match[2].lower() == "gib" else 10**9))
