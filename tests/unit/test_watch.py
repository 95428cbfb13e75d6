"""The live checks: what each sees in the columns that a stage logs, and what it leaves alone."""

import math
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.observe.watch import CHECK_NAMES, CHECKS, FEW, LiveChecks
from rlhf.run.directory import StageRun
from tests.helpers import RECIPE, grouped, small
from tests.lines import read_intact_lines

PLANTED: dict[str, tuple[str, list[float], list[float]]] = {  # by check: a column, values that it reports, healthy ones
    "rising_loss": ("loss", [1.0] * FEW + [1.6] * FEW, [1.0] * FEW + [1.4] * FEW),
    "high_kl": ("objective/kl_per_token", [3.6] * FEW, [3.4] * FEW),
    "sampling_mismatch": ("rollout/logprob_diff_avg", [0.03] * FEW, [0.01] * FEW),
    "entropy_collapse": ("policy/entropy_avg", [2.0] * FEW + [0.5] * FEW, [2.0] * FEW + [0.7] * FEW),
    "no_signal": ("groups/no_signal", [0.8] * FEW, [0.6] * FEW),
    "clipping": ("policy/clipfrac_avg", [0.4] * FEW, [0.2] * FEW),
    "value_explosion": ("loss/value_avg", [0.2] * FEW + [3.0] * FEW, [0.01] * FEW + [0.9] * FEW),
}


@pytest.fixture
def run(tmp_path) -> StageRun:
    run = StageRun(tmp_path, grouped("grpo"), "grpo")
    run.path.mkdir(parents=True)
    return run


def checked(run: StageRun, column: str, values: list[float], *stop_on: str) -> list[dict[str, Any]]:
    checks = LiveChecks(run, stop_on)
    for step, value in enumerate(values, 1):
        checks.on_metrics(step, {column: value})
    return read_intact_lines(run.path / "findings.jsonl") if (run.path / "findings.jsonl").exists() else []


def test_every_check_is_planted():
    assert {*PLANTED, "nan"} == {*CHECK_NAMES} and len(CHECKS) == 8


@pytest.mark.parametrize("name", PLANTED)
def test_a_check_sees_what_was_planted_once_and_nothing_in_healthy_values(run, capsys, name):
    column, planted, healthy = PLANTED[name]
    assert checked(run, column, healthy) == []
    (found,) = checked(run, column, [*planted, planted[-1]])
    assert found["check"] == name and found["step"] == len(planted)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"[{name}]" in line and f"step {len(planted)}" in line


def test_a_number_that_is_not_finite_is_seen_but_for_those_of_evaluations(run):
    assert checked(run, "eval/gain", [math.nan]) == []
    (found,) = checked(run, "loss", [1.0, math.inf])
    assert (found["check"], found["step"]) == ("nan", 2)


def test_a_finding_may_end_the_run(run):
    column, planted, _ = PLANTED["clipping"]
    with pytest.raises(UserError, match=r"^grpo: .*clipping.*--stop-on"):
        checked(run, column, planted, "all")


def test_a_resumed_run_goes_on_with_what_was_logged(run):
    (run.path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1.0}}\n' for n in range(1, 6)))
    assert [row["check"] for row in checked(run, "loss", [2.0] * FEW)] == ["rising_loss"]


def test_the_recipe_s_own_limit_of_the_kl_counts(tmp_path):
    run = StageRun(tmp_path, small(ppo__best_kl_limit=0.5), "ppo")
    run.path.mkdir(parents=True)
    assert RECIPE and [row["check"] for row in checked(run, "objective/kl_per_token", [0.6] * FEW)] == ["high_kl"]
