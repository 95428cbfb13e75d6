"""The time of a training step from what it computes, moves and launches, calibrated on some timed runs of other people.

A step's products, its other operations and its launches are counted on the stand-in device
(peakmem/tracker.py). The time is their sum, each at a rate of its own:

    seconds = operations / (share of the matrix rate) + bytes / (share of the bandwidth) + launches x overhead

The three rates are fitted to every second L40S run of PEFT's comparison, in the order of their names, and to two A100
runs of fms-acceleration, in bfloat16; they are held against all others, those with NF4 among them.
"""

from collections.abc import Sequence
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from peakmem.cards import Rates
from rlhf.plan.projection import CALIBRATED, TimeFactors, step_seconds
from studies.kinds import OutsideRow, PackedRow, TimedStep

L40S = Rates(362.05e12, 864e9, "NVIDIA L40S data sheet (half of the rate with sparsity)")
A100 = Rates(312e12, 2.039e12, "NVIDIA A100 data sheet, 80 GB SXM")


class Timed(NamedTuple):
    """A run whose step has counts and a measured time, and the card that it was measured on."""

    name: str
    step: TimedStep
    card: Rates


def timed(rows: Sequence[OutsideRow], packed: Sequence[PackedRow]) -> tuple[list[Timed], list[Timed]]:
    """Return the runs to calibrate on, and those to test on: rows of a record that have counts and a measured time."""
    ours = sorted((Timed(row["name"], row["step"], L40S) for row in rows if "step" in row), key=lambda run: run.name)
    theirs = [Timed(row["name"], row["step"], A100) for row in packed]
    known = [run for run in theirs if ", bfloat16, " in run.name and run.name.endswith(", 4 rows")]
    return [*ours[::2], *known], [*ours[1::2], *(run for run in theirs if run not in known)]


def fit(runs: Sequence[Timed]) -> TimeFactors:
    """Return the factors with the smallest mean error, as a ratio, each card counted equally.

    Tried are all on a grid on which no part is faster than the card's nominal rates: without that bound these runs,
    which compute and move nearly the same, make bandwidth free.
    """
    axes = np.arange(1.0, 3.001, 0.05), np.arange(1.0, 3.001, 0.05), np.arange(11) * 1e-6
    factors = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])  # (3, combinations)
    error = np.zeros(factors.shape[1])
    for card in {run.card for run in runs}:
        steps = [run.step for run in runs if run.card == card]
        parts = np.array([_nominal(step, card) for step in steps])  # (runs, 3)
        measured = np.array([[step["seconds_measured"]] for step in steps])
        error += np.abs(np.log(parts @ factors / measured)).mean(0)
    products, memory, launch = factors[:, error.argmin()].tolist()
    return TimeFactors(products, memory, launch)


def _nominal(step: TimedStep, card: Rates) -> tuple[float, float, float]:
    return *card.seconds(step["flops"], step["moved"]), step["launched"]


def ratio(run: Timed, factors: TimeFactors = CALIBRATED) -> float:
    """Return the projected over measured time of a step."""
    step = run.step
    projected = step_seconds(step["flops"], step["moved"], step["launched"], run.card, factors)
    return projected / step["seconds_measured"]


def spread(ratios: Sequence[float]) -> str:
    """Return the errors of projected times in words."""
    errors = [abs(r - 1) for r in ratios]
    return (
        f"{len(errors)} runs: median error {median(errors):.0%}, mean {mean(errors):.0%}, "
        f"projected over measured {min(ratios):.2f} to {max(ratios):.2f}"
    )
