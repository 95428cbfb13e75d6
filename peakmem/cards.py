"""Facts about cards with their sources: memory, and what decides how much CUDA libraries allocate."""

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "cuda"]  # that is stood in for


class Gpu(NamedTuple):
    """What decides how much memory CUDA libraries take on a card."""

    capability: tuple[int, int]  # CUDA compute capability: (8, 9), (9, 0)
    multiprocessors: int


class Memory(NamedTuple):
    """Memory of a card, and where the figure is from."""

    gb: float
    note: str


class Card(NamedTuple):
    """What is known about a card."""

    words: str  # its name as it is sold
    gpu: Gpu  # from NVIDIA's papers
    memory: Memory | None = None  # what nvidia-smi shows


UNKNOWN = Gpu((9, 0), 132)  # an H100 SXM, with the largest workspaces, and where 4-bit weights are unpacked soonest

CARDS = {
    "4090": Card("RTX 4090", Gpu((8, 9), 128), Memory(25.7, "24,564 MiB")),
    "h100": Card("H100", Gpu((9, 0), 114), Memory(85.5, "81,559 MiB")),  # PCIe
    "h100-sxm": Card("H100 SXM", Gpu((9, 0), 132)),
    "h200": Card("H200", Gpu((9, 0), 132), Memory(150.7, "143,771 MiB")),
    "t4": Card("Tesla T4", Gpu((7, 5), 40), Memory(15.6, "14,912 MiB that CUDA shows of 16 GB")),
    "a100": Card("A100", Gpu((8, 0), 108), Memory(85.9, "81,920 MiB")),
    "3060": Card("RTX 3060", Gpu((8, 6), 28), Memory(12.8, "12,288 MiB")),
    "3090": Card("RTX 3090", Gpu((8, 6), 82), Memory(25.7, "24,576 MiB")),
    "4080": Card("RTX 4080", Gpu((8, 9), 76), Memory(17.1, "16,376 MiB")),
    "l40s": Card("L40S", Gpu((8, 9), 142), Memory(48.3, "46,068 MiB")),
    "5090": Card("RTX 5090", Gpu((12, 0), 170), Memory(34.1, "32,607 MiB")),
}

# Compute capability and multiprocessors from NVIDIA's data sheets, memory as it is sold.
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


def unpacks_4bit(gpu: Gpu, dtype: "torch.dtype", rows: int, out: int, inner: int) -> bool:
    """Return whether bitsandbytes unpacks a whole 4-bit weight (out, inner) to multiply `rows` inputs with it.

    The library itself is asked, which this imports; without it the answer is yes, which takes more memory.
    """
    from peakmem.patches import bitsandbytes

    return bitsandbytes.unpacks_4bit(gpu, dtype, rows, out, inner)


def workspace(gpu: Gpu) -> int:
    """Return the bytes of one cuBLAS workspace on a card.

    torch allocates one for each pair of a cuBLAS handle, of which every thread has its own, and a stream, and keeps it:
    32 MiB on Hopper and Blackwell, `:4096:2:16:8` on others (aten/src/ATen/cuda/CublasHandlePool.cpp,
    parseChosenWorkspaceSize; CUBLAS_WORKSPACE_CONFIG changes it). cuBLASLt, which `addmm` with a bias may use, works in
    the same memory unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0.
    """
    return LARGE_WORKSPACE if gpu.capability[0] >= 9 else SMALL_WORKSPACE
