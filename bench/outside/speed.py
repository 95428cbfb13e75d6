"""The time of a training step from what it computes, moves and launches, calibrated on some timed runs of other people.

A step's products, its other operations and its launches are counted on the stand-in device (rlhf/memory/tracker.py).
The time is their sum, each at a rate of its own:

    seconds = operations / (share of the matrix rate) + bytes / (share of the bandwidth) + launches x overhead

The three rates are fitted to every second L40S run of PEFT's comparison, in the order of their names, and to two A100
runs of fms-acceleration, in bfloat16; they are held against all others, those with NF4 among them.
"""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from rlhf.memory.cards import NominalRates
from rlhf.memory.projection import CALIBRATED, Rates, step_seconds

Row = Mapping[str, Any]
L40S = NominalRates(362.05e12, 864e9, "NVIDIA L40S data sheet (half of the rate with sparsity)")
A100 = NominalRates(312e12, 2.039e12, "NVIDIA A100 data sheet, 80 GB SXM")


Timed = tuple[Row, NominalRates]  # a row of a record, and the card that it was measured on


def timed(record: Mapping[str, Any]) -> tuple[list[Timed], list[Timed]]:
    """Return the runs to calibrate on, and those to test on: rows of a record that have counts and a measured time."""
    ours = sorted((row for row in record["rows"] if "step" in row), key=lambda row: row["name"])
    packed = record["packed"]
    known = [row for row in packed if ", bfloat16, " in row["name"] and row["name"].endswith(", 4 rows")]
    calibrated = [*((row, L40S) for row in ours[::2]), *((row, A100) for row in known)]
    others = [*((row, L40S) for row in ours[1::2]), *((row, A100) for row in packed if row not in known)]
    return calibrated, others


def fit(runs: Sequence[Timed]) -> Rates:
    """Return the rates with the smallest mean error, as a factor, each card counted equally.

    Tried are all on a grid on which no part is faster than the card's nominal rates: without that bound these runs,
    which compute and move nearly the same, make bandwidth free.
    """
    axes = np.arange(1.0, 3.001, 0.05), np.arange(1.0, 3.001, 0.05), np.arange(11) * 1e-6
    rates = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])  # (3, combinations)
    error = np.zeros(rates.shape[1])
    for card in {card for _, card in runs}:
        steps = [row["step"] for row, other in runs if other == card]
        parts = np.array([_nominal(step, card) for step in steps])  # (runs, 3)
        measured = np.array([[step["seconds_measured"]] for step in steps])
        error += np.abs(np.log(parts @ rates / measured)).mean(0)
    products, memory, launch = rates[:, error.argmin()].tolist()
    return Rates(products, memory, launch)


def _nominal(step: Row, card: NominalRates) -> tuple[float, float, float]:
    return step["flops"] / card.flops, step["moved"] / card.bandwidth, step["launched"]


def ratio(run: Timed, rates: Rates = CALIBRATED) -> float:
    """Return the projected over measured time of a step."""
    row, card = run
    step = row["step"]
    measured: float = step["seconds_measured"]
    return step_seconds(step["flops"], step["moved"], step["launched"], card, rates) / measured


def spread(ratios: Sequence[float]) -> str:
    """Return the errors of projected times in words."""
    errors = [abs(r - 1) for r in ratios]
    return (
        f"{len(errors)} runs: median error {median(errors):.0%}, mean {mean(errors):.0%}, "
        f"projected over measured {min(ratios):.2f} to {max(ratios):.2f}"
    )
