"""Growth of predicted peaks, needs and operations beyond what is pinned in a recipe's predicted.json."""

import copy
from pathlib import Path

import pytest

from bench.memory import budgets
from bench.paths import ROOT
from rlhf.plan import prediction_file as pins
from rlhf.plan.phases import PeakPart
from rlhf.plan.predict import PREDICTED_STAGES
from rlhf.plan.prediction_file import Needs, Peaks, Works
from rlhf.recipe import StageName

DIRECTORIES = budgets.pinned_recipes(ROOT / "recipes")
STEP = {"policy": {"per_layer": 50, "outside": 40}, "base": {"per_layer": 30, "outside": 40}}
PEAKS: Peaks = {
    **{stage: {"load": {"base": 1_000}} for stage in PREDICTED_STAGES},
    "ppo": {
        "rollout": {"base": 10_000_000_000, "kv_cache": 500_000_000_000},
        "update": {"base": 10_000_000_000, "activations": 400_000_000_000, "logits": 2_000_000_000},
    },
}


def changed(stage: StageName, phase: str, part: PeakPart, factor: float) -> Peaks:
    grown = copy.deepcopy(PEAKS)
    grown[stage][phase][part] = round(grown[stage][phase][part] * factor)
    return grown


def test_growth_names_stage_phase_and_component():
    """4 % of 400 GB of activations are 16 GB, 3.9 % of the phase; 2 % are below what is allowed."""
    (line,) = budgets.changed_peaks(PEAKS, changed("ppo", "update", "activations", 1.04))
    assert line == "ppo/update grew by 3.9% to 428.00 GB: activations +16.00 GB"
    assert not [*budgets.changed_peaks(PEAKS, changed("ppo", "update", "activations", 1.02))]
    assert not [*budgets.changed_peaks(PEAKS, PEAKS)]


def test_growth_is_that_of_the_whole_phase():
    """Half as much again of a component that is small stays; a new component counts from nothing."""
    assert not [*budgets.changed_peaks(PEAKS, changed("ppo", "update", "logits", 1.5))]
    after = copy.deepcopy(PEAKS)
    after["ppo"]["update"]["buffers"] = 20_000_000_000
    after["ppo"]["update"]["activations"] -= 1_000_000_000
    (line,) = budgets.changed_peaks(PEAKS, after)
    assert line == "ppo/update grew by 4.6% to 431.00 GB: buffers +20.00 GB"


def test_phases_that_come_and_go_are_reported():
    after = copy.deepcopy(PEAKS)
    after["ppo"]["score"] = after["ppo"].pop("rollout")
    assert [*budgets.changed_peaks(PEAKS, after)] == ["ppo/rollout is gone", "ppo/score is new"]


def test_growth_of_a_stage_that_only_some_recipes_have_is_named():
    """GRPO is no stage of most recipes; it may grow, come and go as the others."""
    without: Peaks = {stage: phases for stage, phases in PEAKS.items() if stage != "grpo"}
    grpo: Peaks = {"grpo": {"update": {"base": 100}}}
    (line,) = budgets.changed_peaks(without | grpo, without | {"grpo": {"update": {"base": 110}}})
    assert line.startswith("grpo/update grew by 10.0%")
    assert [*budgets.changed_peaks(without, without | grpo)] == ["grpo/update is new"]
    assert [*budgets.changed_peaks(without | grpo, without)] == ["grpo/update is gone"]


def test_a_phase_that_shrinks_is_named_too():
    """Too low a prediction lets a stage start that runs out of memory."""
    (line,) = budgets.changed_peaks(PEAKS, changed("ppo", "update", "activations", 0.5))
    assert line.startswith("ppo/update shrank by ") and line.endswith(" GB") and ": activations -" in line
    assert not [*budgets.changed_peaks(PEAKS, changed("ppo", "update", "activations", 0.995))]
    needs: Needs = {"ppo": {"update": 1000}}
    assert [*budgets.changed_needs(needs, {"ppo": {"update": 990}})] == []
    assert [*budgets.changed_needs(needs, {"ppo": {"update": 989}})] == [
        "ppo/update needs 1.1% less of the card: 0.00 GB"
    ]


def test_a_phase_whose_need_is_gone_is_named():
    before: Needs = {"ppo": {"update": 1000, "score": 500}}
    (line,) = budgets.changed_needs(before, {"ppo": {"update": 1000}})
    assert line == "ppo/score: what it needs of the card is pinned and no longer predicted"
    assert len([*budgets.changed_needs(before, {})]) == 2


def test_a_phase_that_needs_more_of_the_card_is_named():
    before: Needs = {"ppo": {"update": 1000, "score": 500}}
    assert [*budgets.changed_needs(before, {"ppo": {"update": 1030, "score": 495}})] == []
    (line,) = budgets.changed_needs(before, {"ppo": {"update": 1031, "score": 500}})
    assert line == "ppo/update needs 3.1% more of the card: 0.00 GB"
    assert [*budgets.changed_needs({}, before)] == [], "nothing was pinned"


def test_more_operations_than_are_pinned_are_named():
    more = {"policy": {"per_layer": 51, "outside": 40}, "base": {"per_layer": 30, "outside": 42}}
    assert list(budgets.more_operations(STEP, more)) == [
        "decoding step of policy: 51 operations in a layer, where 50 are pinned",
        "decoding step of base: 42 operations outside the layers, where 40 are pinned",
    ]
    assert not list(budgets.more_operations(more, STEP))
    (line,) = budgets.more_operations({"policy": {"per_plain_layer": 9}}, {"policy": {"per_plain_layer": 10}})
    assert line == "decoding step of policy: 10 operations in a layer without adapters, where 9 are pinned"
    assert list(budgets.more_operations({}, {"base": {"outside": 42}})) == [
        "decoding step of base: 42 operations outside the layers, and none pinned"
    ]


WORKS: Works = {
    "ppo": {
        "score": {"flops": 1000, "moved": 500, "launched": 100},
        "update": {"flops": 3000, "moved": 900, "launched": 300},
    }
}


def test_an_extra_pass_is_named_with_its_phase():
    """One more forward pass of the critic in scoring, where there were four: a quarter more operations and launches."""
    more: Works = {"ppo": WORKS["ppo"] | {"score": {"flops": 1250, "moved": 504, "launched": 125}}}
    assert list(budgets.changed_work(WORKS, more)) == [
        "ppo/score: 25.0% more matrix operations, 1,000 to 1,250",
        "ppo/score: 25.0% more launches, 100 to 125",
    ]
    assert next(budgets.changed_work(more, WORKS)) == "ppo/score: 20.0% fewer matrix operations, 1,250 to 1,000"
    assert list(budgets.changed_work(WORKS, WORKS)) == []


def test_work_where_there_was_none_is_named():
    before: Works = {"ppo": {"load": {"flops": 0, "moved": 0, "launched": 0}}}
    after: Works = {"ppo": {"load": {"flops": 7, "moved": 0, "launched": 0}}}
    assert list(budgets.changed_work(before, after)) == ["ppo/load: 100.0% more matrix operations, 0 to 7"]
    assert list(budgets.changed_work(before, {})) == [], "a phase that is gone is named by its peak"


def test_pinned_peaks_are_read_as_they_were_written(tmp_path: Path):
    needed: Needs = {"ppo": {"update": 1000}}
    pins.pin(tmp_path, PEAKS, STEP, None, needed, WORKS)
    assert budgets.pinned_work(tmp_path) == WORKS
    assert budgets.pinned_needs(tmp_path) == needed
    assert budgets.pinned(tmp_path) == PEAKS
    assert budgets.pinned_step(tmp_path) == STEP


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_perplexity_decides_no_peak(directory: Path):
    """Where an evaluation is the peak of its stage it is so by sampling. All logits of a batch took up to 42 GB."""
    for stage, phases in budgets.pinned(directory).items():
        logits = phases.get("evaluate", {}).get("logits", 0)
        assert logits < 1_000_000_000, f"{stage}: {logits / 1e9:.1f} GB of logits in evaluate"
