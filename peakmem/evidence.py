"""How far a card was from predictions for programs of its kind: what an interval is made of.

Shares are measured over predicted reserved memory, minus 1, of runs whose libraries were those of the prediction or
were compared with them (peakmem/validation; a test makes these numbers anew): from the 5th to the 95th of 100, or all
where there are few.
"""

from typing import NamedTuple


class Interval(NamedTuple):
    """What was measured beside predictions of one kind."""

    words: str
    low: float
    high: float
    runs: int


PLAIN = Interval("programs like it", -0.006, 0.023, 101)
PACKED = Interval("programs with a 4-bit model, which loads in no fixed order", -0.058, 0.047, 53)
LIBRARIES = Interval("programs that use cuDNN or cuFFT, whose work areas are not known", -0.013, 0.193, 14)
CONTEXTS = (141 * 2**20, 2_300_000_000)  # bytes of CUDA's context that were seen: on a T4, on an H200


def interval(uncounted: bool, packed: bool) -> Interval:
    """Return the evidence for a program with kernels whose memory is `uncounted`, or with a `packed` model."""
    return LIBRARIES if uncounted else PACKED if packed else PLAIN
