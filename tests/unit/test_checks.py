"""Signs that are told from noise: how many healthy runs a check reports, and how many that go wrong it misses."""

import random
from collections.abc import Callable

import pytest

from rlhf.observe import checks, watch
from rlhf.observe.history import History
from tests.helpers import small

RUNS = 40
Sign = Callable[[History], str | None]
Curve = Callable[[float], float]  # share of the run -> loss without noise


def reported(sign: Sign, rows: int, curve: Curve, noise: float, **changes: float) -> int:
    """Return in how many of RUNS runs of `rows` rows a sign is seen. `noise` of a row is a share of the loss."""
    loaded = small(dpo__logging_steps=1, **changes)
    count = 0
    for seed in range(RUNS):
        rng, history = random.Random(seed), History(loaded.recipe, "dpo", total_steps=rows)
        for row in range(rows):
            history.add({"loss": curve(row / rows) * rng.gauss(1, noise)})
            if sign(history) is not None:
                count += 1
                break
    return count


def falling(share: float) -> float:
    return 0.69 - 0.3 * share


def steady(_: float) -> float:
    return 0.6


@pytest.mark.parametrize(("noise", "rows"), [(0.05, 375), (0.1, 190), (0.15, 40), (0.15, 375)])
@pytest.mark.parametrize("curve", [falling, steady])
def test_noise_is_no_rising_loss(noise, rows, curve):
    assert reported(checks.find_rising_loss, rows, curve, noise) <= 0.05 * RUNS


@pytest.mark.parametrize(("noise", "rows"), [(0.05, 40), (0.1, 40), (0.15, 375)])
@pytest.mark.parametrize(
    "curve",
    [lambda x: 0.6 if x < 0.5 else 0.9, lambda x: 0.6 * max(1.0, 2 * x)],
    ids=["in one step", "slowly, to twice as much"],
)
def test_a_loss_that_rises_is_seen(noise, rows, curve):
    assert reported(checks.find_rising_loss, rows, curve, noise) >= 0.95 * RUNS


def test_a_slow_fall_is_not_flat():
    """From 0.69 to 0.39 in 375 rows: in the first 20 of them the loss falls by less than its noise."""
    assert reported(checks.find_flat_loss, 375, falling, 0.05) <= 0.05 * RUNS


def test_a_fall_that_begins_after_warm_up_is_not_flat():
    """The rate rises over the first 40 % of the run, and the loss stays until then."""

    def late(share: float) -> float:
        return 0.69 - 0.5 * max(0.0, share - 0.3)

    assert reported(checks.find_flat_loss, 375, late, 0.02, dpo__warmup_ratio=0.4) == 0
    assert reported(checks.find_flat_loss, 375, late, 0.02) == RUNS


@pytest.mark.parametrize("rows", [40, 375])
def test_a_loss_that_stays_is_flat(rows):
    assert reported(checks.find_flat_loss, rows, steady, 0.05) >= 0.95 * RUNS


def ends(rows: int, last: float) -> int:
    """Return in how many of RUNS runs `fewer_ends` is seen: of 20 responses a row, half end, later `last`."""
    count = 0
    for seed in range(RUNS):
        rng, history = random.Random(seed), History(small().recipe, "ppo", total_steps=rows)
        for row in range(rows):
            rate = 0.5 if row < rows / 2 else last
            history.add({"response/eos_rate": sum(rng.random() < rate for _ in range(20)) / 20})
            if checks.find_fewer_ends(history) is not None:
                count += 1
                break
    return count


@pytest.mark.parametrize("rows", [150, 500])
def test_a_share_that_stays_has_not_fallen(rows):
    assert ends(rows, 0.5) <= 0.05 * RUNS


@pytest.mark.parametrize("rows", [40, 500])
def test_a_share_that_falls_is_seen(rows):
    assert ends(rows, 0.1) >= 0.95 * RUNS


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (3.4681, 3.4702, ("3.468", "3.470")),
        (0.30000001, 0.3, ("0.30000001", "0.3")),
        (4.0, 0.3, ("4", "0.3")),
        (2.0, 2.0, ("2", "2")),
    ],
)
def test_a_finding_tells_its_two_numbers_apart(one, other, expected):
    found = checks.apart(one, other)
    assert found[0] != found[1] or one == other
    assert tuple(map(float, found)) == tuple(map(float, expected))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the reward model"),
        ({"ppo__reward_funcs": ["length(most=9)"], "ppo__normalize_scores": False}, "the reward functions"),
        ({"ppo__reward_funcs": ["model", "length(most=9)"]}, "the reward model and the reward functions"),
    ],
)
def test_a_cause_speaks_of_the_rewards_that_are_there(changes, said):
    history = History(small(**changes).recipe, "ppo")
    for _ in range(2 * 5):
        history.add({"objective/kl_per_token": 9.0})
    (finding,) = [found for found in watch.findings(history, 10) if found.check == "high_kl"]
    assert said in finding.cause and ("reward model" in finding.cause) == ("reward model" in said)
    assert "9 nats per token, above" in finding.seen and "{" not in str(finding)
