"""Facts about cards with their sources: memory, nominal rates, and what decides how much CUDA libraries allocate."""

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "cuda"]  # that is stood in for


class Gpu(NamedTuple):
    """What decides how much memory CUDA libraries take on a card."""

    capability: tuple[int, int]  # CUDA compute capability: (8, 9), (9, 0)
    multiprocessors: int


class Rates(NamedTuple):
    """What a device does in a second, and where the figures are from: nominal rates of a card, or measured ones."""

    flops: float  # operations of products; of a card bfloat16 with float32 accumulation, dense
    bandwidth: float  # bytes per second
    source: str
    link: float | None = None  # bytes per second that it can receive from the others of its machine

    def seconds(self, flops: float, moved: float) -> tuple[float, float]:
        """Return the seconds of these operations and those of moving these bytes, on which all estimates of time rest.

        Their sum is the time if one waits for the other, the larger one if both go on at once.
        """
        return flops / self.flops, moved / self.bandwidth


class Memory(NamedTuple):
    """Memory of a card, and where the figure is from."""

    gb: float
    note: str


class Card(NamedTuple):
    """What is known about the card, or the cards of one machine, that a recipe's hardware.name stands for."""

    words: str  # its name as it is sold
    gpu: Gpu  # from the same papers as the rates
    rates: Rates | None = None
    memory: Memory | None = None  # what nvidia-smi shows; `rlhf new --card` takes the names of cards that have it


_H100_PCIE, _H100_SXM = Gpu((9, 0), 114), Gpu((9, 0), 132)
UNKNOWN = _H100_SXM  # with the largest workspaces, and where 4-bit weights are unpacked soonest
_ADA_4090 = Gpu((8, 9), 128)
_PAPER_4090 = "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090"
RATES_4090 = Rates(165.2e12, 1.008e12, _PAPER_4090)

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
        Rates(756e12, 2.0e12, "NVIDIA H100 data sheet, PCIe (half of the rate with sparsity)"),
        Memory(85.5, "81,559 MiB"),
    ),
    "8xh100": Card(
        "H100 SXM",
        _H100_SXM,
        Rates(
            989.5e12,
            3.35e12,
            "NVIDIA H100 data sheet, SXM (half of the rates with sparsity, NVLink of both directions)",
            450e9,
        ),
    ),
    "h200": Card(
        "H200",
        _H100_SXM,
        Rates(989.5e12, 4.8e12, "NVIDIA H200 data sheet, SXM (half of the rate with sparsity)"),
        Memory(150.7, "143,771 MiB"),
    ),
    # Turing multiplies float16 on its tensor cores, and has no bfloat16 (`lacks_bfloat16`).
    "t4": Card(
        "Tesla T4",
        Gpu((7, 5), 40),
        Rates(65e12, 320e9, "NVIDIA T4 data sheet, float16"),
        Memory(15.6, "14,912 MiB that CUDA shows of 16 GB"),
    ),
    "a100": Card(
        "A100",
        Gpu((8, 0), 108),
        Rates(312e12, 2.039e12, "NVIDIA A100 data sheet, 80 GB SXM"),
        Memory(85.9, "81,920 MiB"),
    ),
    "3060": Card(
        "RTX 3060",
        Gpu((8, 6), 28),
        Rates(25.5e12, 360e9, "NVIDIA GeForce RTX 3060 12 GB; the 3090's matrix rate by units and boost clock"),
        Memory(12.8, "12,288 MiB"),
    ),
    "3090": Card(
        "RTX 3090",
        Gpu((8, 6), 82),
        Rates(71e12, 936e9, "NVIDIA Ampere GA102 GPU architecture white paper, GeForce RTX 3090"),
        Memory(25.7, "24,576 MiB"),
    ),
    "4080": Card(
        "RTX 4080",
        Gpu((8, 9), 76),
        Rates(97.5e12, 716.8e9, "NVIDIA Ada GPU architecture white paper, GeForce RTX 4080"),
        Memory(17.1, "16,376 MiB"),
    ),
    "l40s": Card(
        "L40S",
        Gpu((8, 9), 142),
        Rates(362.05e12, 864e9, "NVIDIA L40S data sheet (half of the rate with sparsity)"),
        Memory(48.3, "46,068 MiB"),
    ),
    "5090": Card(
        "RTX 5090",
        Gpu((12, 0), 170),
        Rates(209.5e12, 1.792e12, "NVIDIA RTX Blackwell GPU architecture white paper, GeForce RTX 5090"),
        Memory(34.1, "32,607 MiB"),
    ),
}

# Cards without rates here: compute capability and multiprocessors from NVIDIA's data sheets, memory as it is sold.
_GIB = 2**30 / 1e9
OTHERS = {
    name: Card(words, Gpu(capability, multiprocessors), memory=Memory(gib * _GIB, f"{gib} GiB as sold"))
    for name, words, capability, multiprocessors, gib in (
        ("a100-40", "A100 40 GB", (8, 0), 108, 40),
        ("a10g", "A10G", (8, 6), 80, 22.5),
        ("a6000", "RTX A6000", (8, 6), 84, 48),
        ("l4", "L4", (8, 9), 58, 22.5),
        ("v100", "V100 16 GB", (7, 0), 80, 16),
        ("v100-32", "V100 32 GB", (7, 0), 80, 32),
        ("3070", "RTX 3070", (8, 6), 46, 8),
        ("3080", "RTX 3080", (8, 6), 68, 10),
        ("4060", "RTX 4060", (8, 9), 24, 8),
        ("4060ti-16", "RTX 4060 Ti 16 GB", (8, 9), 34, 16),
        ("4070", "RTX 4070", (8, 9), 46, 12),
        ("4070ti-super", "RTX 4070 Ti SUPER", (8, 9), 66, 16),
        ("5060ti-16", "RTX 5060 Ti 16 GB", (12, 0), 36, 16),
        ("5070", "RTX 5070", (12, 0), 48, 12),
        ("5070ti", "RTX 5070 Ti", (12, 0), 70, 16),
        ("5080", "RTX 5080", (12, 0), 84, 16),
        ("6000ada", "RTX 6000 Ada", (8, 9), 142, 48),
        ("rtxpro6000", "RTX PRO 6000", (12, 0), 188, 96),
        ("b200", "B200", (10, 0), 148, 180),
    )
}
ANY = Card("any card", UNKNOWN, memory=Memory(1e6, "no limit"))  # where no card is named


def names() -> list[str]:
    """Return the names of the cards whose memory is known, from the least memory to the most."""
    return [name for name, _ in _sizes()]


def _sizes() -> list[tuple[str, float]]:
    known = {**CARDS, **OTHERS}
    sizes = [(name, card.memory.gb * 1e9) for name, card in known.items() if card.memory]
    return sorted(sizes, key=lambda one: one[1])


def smallest(needed: float) -> str | None:
    """Return the card with the least memory that has `needed` bytes; None if none has."""
    return next((name for name, size in _sizes() if size >= needed), None)


# Bytes of a card that the driver's context and the kernels' code take beside torch's allocator: `nvidia-smi` shows them
# as a process's use above what is reserved. A guess for large cards; on a Tesla T4 others measured 140.9 MiB.
CONTEXT = 600_000_000
SMALL_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
LARGE_WORKSPACE = 32 * 1024 * 1024


def named(text: str) -> Card:
    """Return a card by its name (`4090`, `RTX 4090`), or any with so much memory: `24GB`, `24 GiB`.

    Of a card of which only the size is known, kernels take what they take on the card that takes most. Raises
    ValueError, whose message has the names.
    """
    given = re.sub(r"\s", "", text).lower()
    known = {name: card for name, card in {**CARDS, **OTHERS}.items() if card.memory}
    for name, card in known.items():
        if given in (name, re.sub(r"\s", "", card.words).lower()):
            return card
    size = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(gb|gib)", given)
    gb = float(size[1]) * (2**30 / 1e9 if size[2] == "gib" else 1) if size else 0
    if not gb:
        raise ValueError(
            f"{text!r} is no card: name a size with its unit, such as 24GB, or one of {', '.join(names())}"
        )
    return Card(f"card with {gb:g} GB", UNKNOWN, memory=Memory(gb, "as given"))


def _card(hardware: str) -> Card | None:
    """Return the card of a recipe's hardware.name, of which there may be several; None for an unlisted name."""
    return CARDS.get(hardware) or CARDS.get(re.sub(r"^\d+x", "", hardware))


def gpu_of(hardware: str) -> Gpu:
    """Return the GPU of a recipe's hardware.name: `2xh100` are two of `h100`; an unlisted name is `UNKNOWN`."""
    card = _card(hardware)
    return card.gpu if card else UNKNOWN


def rates_of(hardware: str) -> Rates | None:
    """Return the nominal rates of a recipe's hardware.name; None where they are not known.

    Several cards need a name of their own here, because their rates include the link between them.
    """
    card = CARDS.get(hardware)
    return card.rates if card else None


def lacks_bfloat16(hardware: str) -> str | None:
    """Return why a recipe's hardware.name cannot compute in bfloat16; None if it can, or is not known.

    Tensor cores multiply bfloat16 from compute capability 8.0 on; older cards convert each number to float32.
    """
    card = _card(hardware)
    if card is None or card.gpu.capability >= (8, 0):
        return None
    major, minor = card.gpu.capability
    return f"a {card.words} does not compute in bfloat16: its compute capability is {major}.{minor}, and 8.0 is needed"


def unpacks_4bit(gpu: Gpu, dtype: "torch.dtype", rows: int, out: int, inner: int) -> bool:
    """Return whether bitsandbytes unpacks a whole 4-bit weight (out, inner) to multiply `rows` inputs with it.

    The library itself is asked, which this imports; without it the answer is yes, which takes more memory.
    """
    from peakmem.patches import bitsandbytes

    return bitsandbytes.unpacks_4bit(gpu, dtype, rows, out, inner)


def workspace(card: str | tuple[int, int]) -> int:
    """Return the bytes of one cuBLAS workspace on a card, given by hardware.name or by compute capability.

    torch allocates one for each pair of a cuBLAS handle, of which every thread has its own, and a stream, and keeps it:
    32 MiB on Hopper and Blackwell, `:4096:2:16:8` on others (aten/src/ATen/cuda/CublasHandlePool.cpp,
    parseChosenWorkspaceSize; CUBLAS_WORKSPACE_CONFIG changes it). cuBLASLt, which `addmm` with a bias may use, works in
    the same memory unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0.
    """
    capability = card if isinstance(card, tuple) else gpu_of(card).capability
    return LARGE_WORKSPACE if capability[0] >= 9 else SMALL_WORKSPACE
