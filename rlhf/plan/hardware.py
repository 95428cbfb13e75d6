"""The hardware that a recipe's `hardware.name` stands for: its card, and what it does in a second at nominal rates."""

import re
from typing import NamedTuple

from peakmem.cards import CARDS, UNKNOWN, Gpu


class Rates(NamedTuple):
    """What a device does in a second, and where the figures are from: nominal rates of a card, or measured ones."""

    flops: float  # operations of products; of a card bfloat16 with float32 accumulation, dense
    bandwidth: float  # bytes per second
    source: str


_SXM = "data sheet, SXM (half of the rate with sparsity)"
RATES = {  # by peakmem's names of cards
    "4090": Rates(165.2e12, 1.008e12, "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090"),
    "h100": Rates(756e12, 2.0e12, "NVIDIA H100 data sheet, PCIe (half of the rate with sparsity)"),
    "h100-sxm": Rates(989.5e12, 3.35e12, f"NVIDIA H100 {_SXM}"),
    "h200": Rates(989.5e12, 4.8e12, f"NVIDIA H200 {_SXM}"),
    "t4": Rates(65e12, 320e9, "NVIDIA T4 data sheet, float16"),
    "a100": Rates(312e12, 2.039e12, "NVIDIA A100 data sheet, 80 GB SXM"),
    "3060": Rates(25.5e12, 360e9, "NVIDIA GeForce RTX 3060 12 GB; the 3090's matrix rate by units and boost clock"),
    "3090": Rates(71e12, 936e9, "NVIDIA Ampere GA102 GPU architecture white paper, GeForce RTX 3090"),
    "4080": Rates(97.5e12, 716.8e9, "NVIDIA Ada GPU architecture white paper, GeForce RTX 4080"),
    "l40s": Rates(362.05e12, 864e9, "NVIDIA L40S data sheet (half of the rate with sparsity)"),
    "5090": Rates(209.5e12, 1.792e12, "NVIDIA RTX Blackwell GPU architecture white paper, GeForce RTX 5090"),
}


def _one_of(hardware: str) -> str:
    """Return the name of one of several cards: `2xh100` are two of `h100`, and `8xh100` have a form of their own."""
    return "h100-sxm" if hardware == "8xh100" else re.sub(r"^\d+x", "", hardware)


def rates_of(hardware: str) -> Rates | None:
    """Return the nominal rates of a card; None where they are not known."""
    return RATES.get(_one_of(hardware))


def gpu_of(hardware: str) -> Gpu:
    """Return the GPU; of an unlisted name the one that takes most."""
    card = CARDS.get(_one_of(hardware))
    return card.gpu if card else UNKNOWN


def lacks_bfloat16(hardware: str) -> str | None:
    """Return why a card cannot compute in bfloat16; None if it can, or is not known.

    Tensor cores multiply bfloat16 from compute capability 8.0 on; older cards convert each number to float32.
    """
    card = CARDS.get(_one_of(hardware))
    if card is None or card.gpu.capability >= (8, 0):
        return None
    major, minor = card.gpu.capability
    return f"a {card.words} does not compute in bfloat16: its compute capability is {major}.{minor}, and 8.0 is needed"
