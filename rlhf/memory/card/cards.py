"""Facts about cards with their sources: memory, nominal rates, and what decides how much CUDA libraries allocate."""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """What decides how much memory CUDA libraries take on a card."""

    capability: tuple[int, int]  # CUDA compute capability: (8, 9), (9, 0)
    multiprocessors: int


class NominalRates(NamedTuple):
    """Nominal rates of a card, and their source."""

    flops: float  # per second, bfloat16 with float32 accumulation, dense
    bandwidth: float  # bytes per second
    source: str
    link: float | None = None  # bytes per second that it can receive from the others of its machine


class Memory(NamedTuple):
    """Memory of a card, and where the figure is from."""

    gb: float
    note: str


class Card(NamedTuple):
    """What is known about the card, or the cards of one machine, that a recipe's hardware.name stands for."""

    words: str  # its name as it is sold
    gpu: Gpu  # from the same papers as the rates
    rates: NominalRates | None = None
    memory: Memory | None = None  # what nvidia-smi shows; `rlhf new --card` takes the names of cards that have it


_H100_PCIE, _H100_SXM = Gpu((9, 0), 114), Gpu((9, 0), 132)
UNKNOWN = _H100_SXM  # with the largest workspaces, and where 4-bit weights are unpacked soonest
_ADA_4090 = Gpu((8, 9), 128)
_PAPER_4090 = "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090"
RATES_4090 = NominalRates(165.2e12, 1.008e12, _PAPER_4090)

CARDS = {  # by the recipe's hardware.name: `h100` is the PCIe card, `8xh100` SXM
    "4090": Card("RTX 4090", _ADA_4090, RATES_4090, Memory(25.7, "24,564 MiB")),
    "2x4090": Card(
        "RTX 4090",
        _ADA_4090,
        RATES_4090._replace(
            source=f"{_PAPER_4090}; PCIe 4.0 x16 in one direction: 16 lanes of 16 GT/s, 128b/130b", link=31.5e9
        ),
    ),
    "h100": Card(
        "H100",
        _H100_PCIE,
        NominalRates(756e12, 2.0e12, "NVIDIA H100 data sheet, PCIe (half of the rate with sparsity)"),
        Memory(85.5, "81,559 MiB"),
    ),
    "8xh100": Card(
        "H100 SXM",
        _H100_SXM,
        NominalRates(
            989.5e12,
            3.35e12,
            "NVIDIA H100 data sheet, SXM (half of the rates with sparsity, NVLink of both directions)",
            450e9,
        ),
    ),
    "h200": Card("H200", _H100_SXM),
}

SMALL_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
LARGE_WORKSPACE = 32 * 1024 * 1024


def gpu_of(hardware: str) -> Gpu:
    """Return the GPU of a recipe's hardware.name: `2xh100` are two of `h100`; an unlisted name is `UNKNOWN`."""
    card = CARDS.get(hardware) or CARDS.get(re.sub(r"^\d+x", "", hardware))
    return card.gpu if card else UNKNOWN


def rates_of(hardware: str) -> NominalRates | None:
    """Return the nominal rates of a recipe's hardware.name; None where they are not known.

    Several cards need a name of their own here, because their rates include the link between them.
    """
    card = CARDS.get(hardware)
    return card.rates if card else None


def workspace(card: str | tuple[int, int]) -> int:
    """Return the bytes of one cuBLAS workspace on a card, given by hardware.name or by compute capability.

    torch allocates one for each pair of a cuBLAS handle, of which every thread has its own, and a stream, and keeps it:
    32 MiB on Hopper and Blackwell, `:4096:2:16:8` on others (aten/src/ATen/cuda/CublasHandlePool.cpp,
    parseChosenWorkspaceSize; CUBLAS_WORKSPACE_CONFIG changes it). cuBLASLt, which `addmm` with a bias may use, works in
    the same memory unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0.
    """
    capability = card if isinstance(card, tuple) else gpu_of(card).capability
    return LARGE_WORKSPACE if capability[0] >= 9 else SMALL_WORKSPACE
