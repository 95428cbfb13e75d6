"""The verdict on a difference of figures of held-out prompts, and how to know where there is none."""

from types import SimpleNamespace
from typing import cast

import pytest

from rlhf.run import evidence
from rlhf.run.directory import StageRun
from rlhf.run.evidence import Gain
from rlhf.stages.best import choice
from tests.helpers import not_none, small
from tests.records import summary_of

WORDS = {(0.1, 0.4): "better", (-0.4, -0.1): "worse", (-0.1, 0.4): "not known yet", (-0.05, 0.08): "not known yet"}


def gain_of(value: float, interval: tuple[float, float] | None, unit: str = "", prompts: int | None = 15) -> Gain:
    return Gain("ppo", "score", 0.7, 0.7 + value, value, interval, unit, prompts=prompts)


def test_only_an_interval_that_excludes_zero_makes_better_or_worse():
    for interval, word in WORDS.items():
        assert evidence.verdict(interval) == word
        assert gain_of(sum(interval) / 2, interval).verdict == word
    for value in (-0.39, 0.0, 5.0):
        assert gain_of(value, None).verdict == "not known yet" and gain_of(value, None).kind == ""
    assert evidence.verdict((0.0, 0.4)) == evidence.verdict((-0.4, 0.0)) == "not known yet"


def test_an_interval_within_a_tenth_of_a_standard_deviation_is_no_difference():
    assert gain_of(0.015, (-0.05, 0.08), evidence.SD).verdict == "no difference"
    assert gain_of(0.015, (-0.05, 0.12), evidence.SD).verdict == "not known yet"
    assert gain_of(0.06, (0.02, 0.09), evidence.SD).verdict == "better", "small, and beyond doubt"


def test_the_number_of_prompts_stands_beside_the_gain_and_what_would_tell_beside_a_doubt():
    sure = gain_of(0.25, (0.1, 0.4), evidence.SD, 512).in_words()
    assert sure == "+0.25 standard deviations (95 %: +0.10 to +0.40) on 512 held-out prompts: better"
    doubt = gain_of(-0.26, (-0.62, 0.10)).in_words()
    assert doubt.startswith("-0.26 (95 %: -0.62 to +0.10) on 15 held-out prompts: not known yet; about 59 prompts")
    assert "evaluate.max_samples=59" in doubt
    assert "`rlhf run evaluate` measures an interval" in gain_of(-0.26, None, prompts=None).in_words()
    assert gain_of(0.0, None).in_words().endswith("not known yet; the same difference for every prompt has no interval")
    assert "more prompts would tell" in gain_of(0.0, (-0.1, 0.1)).in_words()


def test_what_is_in_no_figure_and_what_its_own_figures_chose_is_said():
    metrics = {
        "score": 0.5,
        "score_sft": 0.2,
        "score_gain_sd": 0.3,
        "score_gain_sd_low": 0.1,
        "score_gain_sd_high": 0.5,
    }
    metrics |= {"response_length_sft": 9.0, "heldout_prompts": 64, "score_no_verdict": 0.25}
    text = not_none(evidence.gain_of_stage("ppo", metrics)).in_words()
    assert text.startswith("+0.30 standard deviations (95 %: +0.10 to +0.50) on 64 held-out prompts: better")
    assert "0 % before and 25 % after" in text and "among" not in text
    of_stage = summary_of(stage="ppo", metrics=metrics | {"chosen_among_checkpoints": 5})
    (gain,) = evidence.gains_over_start({"ppo": of_stage})
    assert "among 5 checkpoints" in gain.in_words()


@pytest.mark.parametrize("stage", ["ppo", "sft"])
@pytest.mark.parametrize(
    ("changes", "among"),
    [
        ({"adapter": "best"}, 3),
        ({"adapter": "best", "save_steps": 6}, None),  # one alone was not chosen
        ({"adapter": "last"}, None),
        ({"adapter": "best", "data__validation_fraction": 0.02}, None),
    ],
)
def test_a_result_that_the_rows_of_its_figures_chose_is_marked(stage, changes, among):
    settings = {"eval_steps": 2, "save_steps": 2, "logging_steps": 1, **changes}
    loaded = small(**{key if "__" in key else f"{stage}__{key}": value for key, value in settings.items()})
    run = cast(StageRun, SimpleNamespace(loaded=loaded, stage=stage, total_steps=5))
    assert choice(run, 2).get("chosen_among_checkpoints") == among


def test_a_gain_of_an_evaluation_has_its_start_by_the_policies_that_were_measured():
    metrics = {"base/score": 0.4, "ppo/score": 0.6, "ppo/score_gain_sd": 0.2, "ppo/heldout_prompts": 9}
    (one,) = evidence.gains_over_start({"evaluate": summary_of(stage="evaluate", metrics=metrics)})
    assert (one.title, one.prompts, one.interval) == ("PPO against the base", 9, None)
