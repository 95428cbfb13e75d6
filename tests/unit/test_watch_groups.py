"""What the live checks see in the logs of RLOO and GRPO, how often they look, and which advice recipes accept."""

import itertools
import math
import random
import statistics
from collections import UserDict

import pytest

from rlhf import recipe
from rlhf.observe import advice, checks, watch
from rlhf.observe.history import FEW, History
from rlhf.recipe import StageName
from rlhf.recipe.stages import GROUPS, STAGE_TABLE
from tests.helpers import RECIPE, grouped, small

ROWS = 2 * FEW


def rising(first: float, last: float) -> list[float]:
    return [first] * FEW + [last] * FEW


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
@pytest.mark.parametrize(
    ("check", "planted", "healthy", "remedies"),
    [
        (
            "entropy_collapse",
            {"policy/entropy_avg": rising(2.0, 0.5)},
            {"policy/entropy_avg": rising(2.0, 0.7)},
            {"beta", "entropy_coef"},
        ),
        (
            "longer",
            {"response/length": rising(100, 160), "objective/scores": rising(0.0, 1.0)},
            {"response/length": rising(100, 160), "objective/scores": rising(1.0, 0.0)},
            {"beta", "learning_rate", "num_mini_batches"},
        ),
        (
            "no_signal",
            {"groups/no_signal": [0.8] * ROWS},
            {"groups/no_signal": [0.6] * ROWS},
            {"num_generations", "resample_groups"},
        ),
        (
            "clipping",
            {"policy/clipfrac_avg": [0.4] * ROWS},
            {"policy/clipfrac_avg": [0.2] * ROWS},
            {"learning_rate", "num_mini_batches"},
        ),
    ],
)
def test_a_check_sees_what_is_planted_and_names_keys_of_the_stage(stage, check, planted, healthy, remedies):
    def seen(logged: dict[str, list[float]]) -> dict[str, watch.Finding]:
        history = History(grouped(stage).recipe, stage)
        for values in zip(*logged.values(), strict=True):
            history.add(dict(zip(logged, values, strict=True)))
        return {finding.check: finding for finding in watch.findings(history, ROWS)}

    assert set(seen(planted)[check].remedies) == {f"{stage}.{key}" for key in remedies}
    assert check not in seen(healthy)


@pytest.mark.parametrize(("now", "more"), [(0, 4), (3, 6), (10, 20), (600, 1_000), (1_000, None)])
def test_prompts_without_signal_are_replaced_more_often_than_now_within_the_bound(now, more):
    history = History(grouped("grpo", {"resample_groups": now}).recipe, "grpo")
    assert advice.larger_groups(history).get("grpo.resample_groups") == more


class CountedRow(UserDict[str, float | None]):
    """A row that counts how often a value of it is looked at."""

    looks = 0

    def __getitem__(self, key: str) -> float | None:
        self.looks += 1
        return super().__getitem__(key)


def test_checks_look_at_a_row_only_while_it_is_the_newest():
    history = History(small().recipe, "sft")
    rows = [CountedRow(loss=2.0 - step / 100) for step in range(60)]
    for step, row in enumerate(rows):
        history.add(row)
        watch.findings(history, step)
    assert {row.looks for row in rows} == {2}, "once when it is added, once for a value that is not a number"


@pytest.mark.parametrize("seed", range(20))
def test_the_best_loss_so_far_is_that_of_all_earlier_rows(seed):
    """Also where the check does not see every row, and where rows have no loss."""
    rng = random.Random(seed)
    history, losses = History(small().recipe, "sft"), list[float]()
    for _ in range(80):
        loss = rng.choice([rng.gauss(1, 0.5), None, math.nan, math.inf])
        history.add({"loss": loss})
        losses += [loss] if loss is not None and math.isfinite(loss) else []
        if rng.random() < 0.7:
            means = [statistics.fmean(losses[i : i + FEW]) for i in range(len(losses) - 2 * FEW + 1)]
            assert history.least_mean("loss") == min([math.inf, *means])
            if len(losses) >= 2 * FEW:
                last, best = statistics.fmean(losses[-FEW:]), min(losses[0], *means)
                squares = [(b - a) ** 2 for a, b in itertools.pairwise(losses)]
                noise = math.sqrt(statistics.fmean(squares) / FEW) * 2 * (math.sqrt(math.log(len(losses))) + 1)
                rising = last > 1.2 * best and last > best + noise
                assert (checks.find_rising_loss(history) is not None) == rising


def stages_of(check: watch.Check) -> list[StageName]:
    return [stage for stage, row in STAGE_TABLE.items() if check.name in row.checks]


def test_the_table_of_stages_names_the_checks_that_there_are():
    named = {name for row in STAGE_TABLE.values() for name in row.checks}
    assert named == {*watch.CHECK_NAMES}


@pytest.mark.parametrize("directory", recipe.available(RECIPE.parents[1]), ids=lambda d: f"{d.parent.name}-{d.name}")
def test_every_recipe_accepts_all_advice(directory):
    loaded = recipe.load(directory)
    for check in watch.CHECKS:
        for stage in stages_of(check):
            if loaded.recipe.section(stage) is not None:
                for key, value in check.advice(History(loaded.recipe, stage)).items():
                    changed = recipe.load(directory, {key: value})
                    assert changed.recipe != loaded.recipe, f"{check.name} of {stage}: {key} is {value} already"


Row = dict[str, float | None]


def rows_until(early: Row, late: Row, rows: int) -> list[Row]:
    return [early] * (rows - rows // 2) + [late] * (rows // 2)


AT_ONCE: dict[str, tuple[Row, Row]] = {  # rows that a check reports as soon as it can: the first half, and the second
    "nan": ({"loss": math.nan}, {}),
    "flat_loss": ({"loss": 1.0}, {"loss": 1.0}),
    "rising_loss": ({"loss": 1.0}, {"loss": 100.0}),
    "flat_reward": ({"objective/scores": 1.0}, {"objective/scores": 1.0}),
    "large_updates": ({"policy/approxkl_avg": 9.0}, {"policy/approxkl_avg": 9.0}),
    "same_scores": ({"min_reward": 0.0, "max_reward": 0.0}, {"min_reward": 0.0, "max_reward": 0.0}),
    "chance": ({"accuracy": 0.5}, {"accuracy": 0.5}),
    "overconfident": ({"min_reward": -9.0, "max_reward": 9.0}, {"min_reward": -9.0, "max_reward": 9.0}),
    "high_kl": ({"objective/kl_per_token": 9.0}, {"objective/kl_per_token": 9.0}),
    "negative_kl": ({"objective/kl_per_token": -9.0}, {"objective/kl_per_token": -9.0}),
    "sampling_mismatch": ({"rollout/logprob_diff_avg": 1.0}, {"rollout/logprob_diff_avg": 1.0}),
    "longer": (
        {"response/length": 1.0, "objective/scores": 0.0},
        {"response/length": 9.0, "objective/scores": 9.0},
    ),
    "fewer_ends": ({"response/eos_rate": 1.0}, {"response/eos_rate": 0.0}),
    "repetition": ({}, {}),
    "entropy_collapse": ({"policy/entropy_avg": 9.0}, {"policy/entropy_avg": 0.0}),
    "no_signal": ({"groups/no_signal": 1.0}, {"groups/no_signal": 1.0}),
    "clipping": ({"policy/clipfrac_avg": 1.0}, {"policy/clipfrac_avg": 1.0}),
    "value_explosion": ({"loss/value_avg": 1.0}, {"loss/value_avg": 9999.0}),
}


@pytest.mark.parametrize("check", watch.CHECKS, ids=lambda check: check.name)
def test_a_check_sees_something_from_its_number_of_rows_on(check):
    """With one row fewer, rows as bad as can be are not reported, and the check counts as unused."""
    stage = stages_of(check)[0]
    recipe_ = grouped(stage, {}).recipe if stage in GROUPS else small(ppo__kl_estimator="k1").recipe
    history = History(recipe_, stage)
    history.responses = ["again and again " * 20]
    for row in rows_until(*AT_ONCE[check.name], check.rows):
        assert check.seen(history) is None or check.name == "repetition"
        history.add(row)
    assert check.seen(history) is not None
    assert check.name in watch.unused_checks(stage, check.rows - 1)
    assert check.name not in watch.unused_checks(stage, check.rows)


@pytest.mark.parametrize(("width", "rate", "advised"), [(576, 1e-5, 3e-4), (576, 3e-4, 6e-4), (64, 1e-4, 2e-3)])
def test_a_higher_rate_is_the_one_with_which_adapters_of_this_width_begin(width, rate, advised):
    """The rates of the released cpu-smollm2-sums and cpu-tiny-sums; beyond them the guide's advice, twice the rate."""
    loaded = grouped("grpo")
    changes = {"grpo.learning_rate": rate, "model.architecture.hidden_size": width}
    advice_given = advice.higher_rate(History(loaded.with_changes(changes).recipe, "grpo"))
    assert advice_given == {"grpo.learning_rate": pytest.approx(advised)}
