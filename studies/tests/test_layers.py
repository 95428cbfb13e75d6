"""The comparison of adapters in all layers with adapters in the upper ones: curves, seconds to a gain, the table."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from bench import provenance
from bench.reading import read
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.run.records import Code
from studies.kinds import CurvePoint, LayersRecord, LayersRun
from studies.layers import __main__ as layers
from studies.paths import LAYERS


def point(step: int, seconds: float, gain: float, kl: float) -> CurvePoint:
    return {"step": step, "seconds": seconds, "gain": gain, "kl": kl}


def evaluated(step: int, gain: float) -> dict[str, float]:
    return {"step": step, "eval/true_reward_gain_sd": gain, "eval/kl_per_token": gain / 10}


def test_a_curve_adds_the_seconds_of_the_phases_and_leaves_evaluations_out():
    telemetry = [
        {"step": n, "cpu/rollout": 1.0, "cpu/score": 2.0, "cpu/update": 4.0, "cpu/evaluate": 100.0, "cpu/total": 107.0}
        for n in (1, 2, 3, 4)
    ]
    metrics: list[dict[str, Any]] = [{"step": 1}, evaluated(2, 0.5), {"step": 3}, evaluated(4, 0.8)]
    assert layers.learning_curve(metrics, telemetry) == [point(2, 14.0, 0.5, 0.05), point(4, 28.0, 0.8, 0.08)]


def test_the_mean_of_curves_is_taken_at_each_step():
    curves = [[point(5, 10.0, 0.4, 0.1)], [point(5, 14.0, 0.8, 0.3)]]
    (middle,) = layers.mean_curve(curves)
    assert middle == pytest.approx(point(5, 12.0, 0.6, 0.2))
    with pytest.raises(ValueError, match="longer"):
        layers.mean_curve([[], *curves])


@pytest.mark.parametrize(
    ("level", "seconds"), [(0.2, 5.0), (0.4, 10.0), (0.5, 15.0), (0.6, 20.0), (0.9, None)], ids=str
)
def test_seconds_to_a_gain_lie_on_straight_lines_and_the_first_crossing_counts(level, seconds):
    curve = [point(5, 10.0, 0.4, 0.0), point(10, 20.0, 0.6, 0.0), point(15, 30.0, 0.3, 0.0), point(20, 40.0, 0.7, 0.0)]
    assert layers.seconds_to_gain(curve, level) == (None if seconds is None else pytest.approx(seconds))


def test_the_table_has_means_over_seeds_and_a_dash_for_a_gain_that_is_not_reached():
    def run(gain: float) -> LayersRun:
        points = [point(20, 10.0, 0.4, 0.1), point(40, 20.0, gain - 0.35, 0.1)]
        return {
            "stage_cpu_seconds": {"sft": 10.0, "rm": 20.0, "ppo": 30.0},
            "reward_model_accuracy": 0.7,
            "phase_cpu_seconds": {},
            "ppo": {"true_reward_gain_sd": gain, "kl_per_token": 0.1},
            "curve": points,
        }

    summary = layers.layer_means({"upper_half": {"0": run(0.8), "1": run(1.0)}})
    table = layers.markdown(summary).splitlines()
    assert table[-1] == "| upper half | 0.90 (0.80 to 1.00) | 0.100 | 0.50 | 60 | 7.5 | 10.0 | 16.7 | – |"
    assert len({line.count("|") for line in table}) == 1


def test_the_page_shows_the_newest_record_which_is_of_committed_code_and_of_the_recipe_as_it_is():
    record = read(max((LAYERS / "results").glob("cpu_*.json"), key=lambda file: file.name), LayersRecord)
    assert record["code"]["dirty"] is False
    assert record["recipe_sha256"] == recipe.load(layers.RECIPE).sha256
    assert record["summary"] == json.loads(json.dumps(layers.layer_means(record["adapters_in"])))
    assert layers.markdown(record["summary"]) in (LAYERS / "README.md").read_text()


def test_a_record_replaces_no_other_and_that_is_said_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(layers, "run_seed", lambda *_: pytest.fail("it was measured"))
    monkeypatch.setattr(provenance, "code_version", lambda: Code(commit="0" * 40, dirty=False))
    (tmp_path / "record.json").write_text("kept")
    result = CliRunner().invoke(layers.main, ["--save", str(tmp_path / "record.json")])
    assert isinstance(result.exception, UserError) and "a record replaces no other" in str(result.exception)


def test_a_half_and_a_third_of_the_layers_exist_and_the_recipe_accepts_the_changes():
    for choice, first in zip(layers.LAYERS, (None, 3, 4), strict=True):
        loaded = recipe.load(layers.RECIPE, layers.CHANGES | {"lora.layers": choice}).recipe
        assert loaded.model.architecture and loaded.model.architecture.num_hidden_layers == 6
        numbers = loaded.lora.layer_numbers(6)
        assert numbers == (None if first is None else list(range(first, 6)))
