"""Signs that are told from noise: how many healthy runs a check reports, and how many that go wrong it misses."""

import json
import random
from collections.abc import Callable, Collection

import pytest

from rlhf.cli.summary_tables import summary_table
from rlhf.observe import checks, watch
from rlhf.observe.history import History
from rlhf.recipe import StageName
from rlhf.recipe.stages import STAGE_TABLE
from rlhf.report import records, tables
from tests.helpers import grouped, small
from tests.records import write_records

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


def history_with(stage: StageName, columns: Collection[str], value: float = 9.0) -> History:
    alone = {"reward_funcs": ["length(most=3)"], "normalize_scores": False}
    loaded = grouped("grpo", alone, rm=None, ppo=None, dpo=None, merge=None) if stage == "grpo" else small()
    history = History(loaded.recipe, stage)
    for row in range(60):
        history.add(dict.fromkeys(columns, value if row else 0.1))
    return history


CHECKED = [(stage, check) for stage in ("sft", "rm", "ppo", "dpo", "grpo") for check in STAGE_TABLE[stage].checks]


@pytest.mark.parametrize(("stage", "name"), CHECKED)
def test_a_check_reads_the_columns_that_it_names_and_is_not_asked_without_one(stage, name):
    """Another column would raise KeyError here; a missing one would be a finding on what is not there."""
    (check,) = (check for check in watch.CHECKS if check.name == name)
    known = history_with(stage, check.columns).of(check.columns)
    assert known is not None
    check.seen(known)
    for missing in check.columns:
        others = {key for one in watch.CHECKS for key in one.columns} - {missing}
        assert name not in {finding.check for finding in watch.findings(history_with(stage, others), 60)}
    with pytest.raises(KeyError, match="of another check"):
        known.values("of another check")


def test_no_finding_speaks_of_a_reward_model_that_is_not_there():
    """Whatever a stage's checks say, for functions alone: in the words of each cause."""
    for stage, name in CHECKED:
        (check,) = (check for check in watch.CHECKS if check.name == name)
        if stage != "rm" and "{rewards}" not in check.cause:
            assert "reward model" not in check.cause, name


UP = {"score_sft": 0.5, "score": 0.9, "score_gain_sd": 0.4, "response_length_sft": 3.0, "heldout_prompts": 96}
SURE = UP | {"score_gain_sd_low": 0.2, "score_gain_sd_high": 0.6}
UNSURE = UP | {"score_gain_sd_low": -0.2, "score_gain_sd_high": 1.0}


@pytest.mark.parametrize(
    ("stage", "flat", "evidence", "found"),
    [
        ("ppo", {"objective/scores": 0.5}, {f"eval/{key}": value for key, value in UNSURE.items()}, True),
        ("ppo", {"objective/scores": 0.5}, {f"eval/{key}": value for key, value in SURE.items()}, False),
        ("dpo", {"loss": 0.69}, {"rewards/accuracies": 0.5}, True),
        ("dpo", {"loss": 0.69}, {"rewards/accuracies": 0.75}, False),
        ("rm", {"loss": 0.69}, {"accuracy": 0.75}, False),
        ("rm", {"min_reward": 1.0, "max_reward": 1.0}, {"accuracy": 0.5}, True),
    ],
)
def test_that_nothing_is_learned_is_not_said_against_the_run_s_own_figures(stage, flat, evidence, found):
    history, rng = History(small().recipe, stage), random.Random(0)
    for _ in range(60):
        history.add({key: value * rng.gauss(1, 1e-3) for key, value in flat.items()} | evidence)
    denied = {check.name for check in watch.CHECKS if check.denies_learning}
    assert bool(denied & {finding.check for finding in watch.findings(history, 60)}) == found


def test_a_finding_that_the_result_refutes_has_no_advice(tmp_path, capsys):
    """DPO's loss was flat for a while, and its answers got better."""
    for metrics, refuted in ((SURE, True), (UNSURE, False)):
        write_records(tmp_path / "dpo", {}, {"metrics": metrics, "findings": ["flat_loss", "nan"]})
        line = {"check": "flat_loss", "step": 3, "seen": "flat", "cause": "too low", "remedies": {"dpo.beta": 0.1}}
        (tmp_path / "dpo" / "findings.jsonl").write_text(json.dumps(line) + "\n")
        run = records.load(tmp_path)
        ((shown,), _) = tables.findings(run)
        assert (shown.remedies == "", "It has learned since: score +0.40" in shown.text) == (refuted, refuted)
        summary_table(run.summaries["dpo"])
        assert ("findings: nan (" in capsys.readouterr().out) == refuted
