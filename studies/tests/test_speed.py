"""The time of a training step is calibrated on some runs and held against others."""

import numpy as np
import pytest

from bench.reading import read
from peakmem import cards
from rlhf.plan import projection
from studies.kinds import OutsideRecord, TimedStep
from studies.outside import compare, lengths, speed
from studies.outside.__main__ import FOLDER

CARD = cards.Rates(100.0, 10.0, "")
RATES = projection.TimeFactors(1.5, 1.2, 5e-6)


def timed(name: str, flops: float, moved: float, launched: float, rates: projection.TimeFactors) -> speed.Timed:
    seconds = projection.step_seconds(flops, moved, launched, CARD, rates)
    step: TimedStep = {"flops": flops, "moved": moved, "launched": launched, "seconds_measured": seconds}
    return speed.Timed(name, step, CARD)


def timed_steps(rates: projection.TimeFactors, count: int = 12) -> list[speed.Timed]:
    numbers = np.random.default_rng(0).uniform(1, 100, (count, 3)) * (1, 1, 1e6)
    return [timed(f"{at:02}", a, b, c, rates) for at, (a, b, c) in enumerate(numbers.tolist())]


def newest() -> OutsideRecord:
    return read(max(FOLDER.glob("*.json")), OutsideRecord)


def test_the_fit_finds_the_rates_that_made_the_times():
    assert speed.fit(timed_steps(RATES)) == pytest.approx(RATES)
    assert all(speed.ratio(run, RATES) == pytest.approx(1) for run in timed_steps(RATES))


def test_no_part_is_faster_than_the_card():
    rates = speed.fit(timed_steps(projection.TimeFactors(1.5, 0.2, 5e-6)))
    assert min(rates.products, rates.memory) >= 1


def test_one_strange_run_changes_little():
    runs = timed_steps(RATES)
    runs[0].step["seconds_measured"] *= 10
    assert speed.fit(runs) == pytest.approx(RATES, rel=0.1)


def test_no_run_is_both_calibrated_and_tested_on():
    content = newest()
    calibrated, others = ([run.name for run in part] for part in speed.timed(content["rows"], content["packed"]))
    assert not {*calibrated} & {*others}
    assert len(calibrated) + len(others) == sum("step" in r for r in content["rows"]) + len(content["packed"])
    assert not [name for name in calibrated if "nf4" in name]


def test_the_rates_of_a_plan_are_those_that_the_record_gives():
    content = newest()
    calibrated, others = speed.timed(content["rows"], content["packed"])
    assert speed.fit(calibrated) == pytest.approx(projection.CALIBRATED)
    low, high = projection.SPREAD
    assert all(low <= 1 / speed.ratio(run) <= high for run in others)


def test_a_step_s_work_is_the_mean_over_the_run_s_lengths():
    tokens = np.array(compare.RECORDED, dtype=float)
    work = np.stack([2 * tokens**2 + 3 * tokens, 5 * tokens, np.full(len(tokens), 7.0)], 1)
    work[0] += 1000  # the first step makes the optimizer's states, and does not count
    every = lengths.windows().ravel()
    step = compare._work_of_a_step(work, 0.5)
    assert step["flops"] == pytest.approx(np.mean(2.0 * every**2 + 3 * every))
    assert (step["moved"], step["launched"]) == pytest.approx((np.mean(5.0 * every), 7))
    assert step["seconds_measured"] == 0.5
