"""What a comparison with a published figure says."""

import re
from pathlib import Path

import pytest

from rlhf import recipe
from rlhf.evaluation import reproduce
from rlhf.recipe import published
from rlhf.recipe.published import CHAIN, Figure, compare_total, verdict_of
from rlhf.run import comparisons, records
from tests.records import summary_of

ROOT = Path(__file__).parents[2]


# -- comparing ---------------------------------------------------------------------------------------------------------


def figure(metric="peak_vram_gb", guide="guide", unit="GB", stage="sft", **keys) -> Figure:
    source = "guide > page > line" if guide else "an aim"
    return Figure(name="figure", stage=stage, metric=metric, guide=guide, unit=unit, source=source, **keys)


SHARE = {"metric": "accuracy", "unit": "fraction"}
LOSS = {"metric": "last.loss", "unit": "nats per token"}


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        ({"value": 61, "about": True}, 58, "reproduced (-4.9 %)"),
        ({"value": 61, "about": True}, 19, "below: the guide is too high (-68.9 %)"),
        ({"value": 45}, 45.6, "above (+1.3 %)"),
        ({"range": (None, 80)}, 12, "reproduced"),
        ({"range": (18, 24)}, 9, "below: the guide is too high (-50.0 %)"),
        ({"range": (8, 10), "about": True}, 10.9, "reproduced (+9.0 %)"),
        ({"value": 28}, float("nan"), "not measured"),
        ({"value": 47.76, "tolerance": 1}, 48.7, "reproduced (+2.0 %)"),
        ({"value": 1.2, **LOSS}, 1.1, "below (-8.3 %)"),
        ({"value": 0.72, **SHARE}, 0.74, "above (+2 points)"),
        ({"range": (0.7, None), **SHARE}, 0.69, "below (-1 points)"),
        ({"guide": None, "range": (None, 5), "metric": "accuracy_gap_points"}, 5.025, "missed (+0.5 %)"),
        ({"guide": None, "range": (0.05, 0.3), "metric": "kl_per_token", "unit": "nats"}, 0.04, "missed (-20.0 %)"),
        ({"value": 61}, None, "not measured"),
        ({"value": 2, "metric": None, "not_comparable": "a raw score"}, 2.0, "not compared: a raw score"),
    ],
)
def test_a_value_reproduces_a_figure_or_lies_on_a_side_of_it(keys, value, said):
    assert str(verdict_of(figure(**keys), value)) == said


def test_a_guide_with_two_figures_contradicts_itself():
    """The guide's table has 61 GB for SFT, and its overview 45; a range and its upper end do not contradict."""
    table, overview = figure(value=61, about=True), figure(value=45)
    assert verdict_of(table, 58.4, [table, overview]).word == "reproduced"
    assert verdict_of(overview, 58.4, [table, overview]).word == "contradicts itself"
    assert verdict_of(overview, 20, [table, overview]).word == "below: the guide is too high"
    within, end = figure(range=(18, 24)), figure(range=(None, 24))
    assert verdict_of(within, 7.6, [within, end]).word == "below: the guide is too high"


@pytest.mark.parametrize(("device", "judged"), [("NVIDIA H100 PCIe", True), ("NVIDIA H200", False)])
def test_hours_of_another_card_are_not_judged(device, judged):
    loaded = recipe.load(ROOT / "recipes/h100-mistral-7b/v1")
    found = {row.metric for row in comparisons.figures(loaded, "sft", device)}
    assert "peak_vram_gb" in found and ("hours" in found) is judged


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "either a value"),
        ({"value": 1, "metric": None}, "a metric that it is compared with, or a reason"),
        ({"value": 1, "guide": None}, "a target of our own"),
        ({"value": 1, "source": "a page"}, "source"),
    ],
)
def test_a_figure_that_says_two_things_is_refused(keys, said):
    guide = keys.pop("guide", "guide")
    row = {"name": "f", "stage": "sft", "metric": "hours", "unit": "h", "source": "guide > page > line", "guide": guide}
    with pytest.raises(ValueError, match=re.escape(said)):
        Figure.model_validate(row | keys)


# -- several stages --------------------------------------------------------------------------------------------------


def took(peak: float | None, hours: float, price: float | None = None) -> dict[str, float | None]:
    return {"peak_vram_gb": peak, "hours": hours, "cost_usd": None if price is None else price * hours}


def costs(price: float | None = None) -> dict[str, dict[str, float | None]]:
    return {
        "sft": took(58.0, 8.0, price),
        "rm": took(25.0, 4.0, price),
        "ppo": took(70.0, 20.0, price),
        "dpo": took(36.0, 99.0, price),
    }


@pytest.mark.parametrize(
    ("metric", "stages", "value", "said"),
    [
        ("peak_vram_gb", costs(), 70.0, "reproduced"),
        ("hours", costs(), 32.0, "reproduced"),
        ("cost_usd", costs(2.0), 64.0, "reproduced"),
        ("cost_usd", costs(), None, "not compared: needs the price of an hour (--price)"),
        ("hours", {"sft": costs()["sft"]}, None, "not compared: needs rm, ppo"),
        ("peak_vram_gb", {"sft": took(None, 1.0)}, None, "not compared: needs sft, rm, ppo"),
    ],
)
def test_a_total_is_the_highest_peak_the_chain_s_hours_or_their_cost(metric, stages, value, said):
    any_value = figure(metric, stage="all", range=(0.0, 1000.0))
    found, verdict = compare_total(any_value, stages)
    assert found == value and str(verdict) == said


def test_dollars_are_those_of_every_card():
    assert summary_of(wall_seconds=7200, processes=8).spent(2.0)["cost_usd"] == 32.0


def test_a_total_that_lacks_stages_is_missed_only_above_its_range():
    """SFT and the reward model took 12 hours: PPO might have taken none."""
    aim = figure("hours", guide=None, unit="hours", stage="all", range=(0.0, 12.0))
    without_ppo = {stage: spent for stage, spent in costs().items() if stage in ("sft", "rm")}
    assert compare_total(aim, without_ppo) == (None, published.Verdict("not compared", "needs ppo"))
    value, verdict = compare_total(aim, without_ppo | {"rm": took(25.0, 4.1)})
    assert value == pytest.approx(12.1) and verdict.word == "missed"


# -- records ---------------------------------------------------------------------------------------------------------


def summaries_of(name: str, measured: dict[tuple[str, str | None], float], hours: float = 1.0, peak: float = 20.0):
    """Summaries of SFT, reward model and PPO of a recipe, as far as tables read them."""
    figures = recipe.load(ROOT / "recipes" / name / "v1").figures
    all_stages = [f.model_dump(mode="json", exclude_defaults=True) for f in figures if f.stage == "all"]
    return {
        stage: summary_of(
            stage=stage,
            wall_seconds=3600 * hours,
            peak_vram_bytes=peak * 1e9,
            targets=[records.compared(f, measured.get((stage, f.metric))) for f in figures if f.stage == stage],
            all_stages=all_stages,
        )
        for stage in CHAIN
    }


def test_a_record_gives_its_figure_back():
    for name in ("4090-llama2-7b", "h100-mistral-7b"):
        for row in recipe.load(ROOT / "recipes" / name / "v1").figures:
            assert summary_of(targets=[records.compared(row, 1.0)]).figures[0][:2] == (row, 1.0)
    older = {"name": "f", "published": [61, 61], "published_mean": None, "unit": "h", "measured": 1, "within": True}
    assert summary_of(targets=[older]).figures == []


def test_reproduce_compares_each_seed_their_mean_and_all_stages_together():
    seeds = {}
    for seed, (perplexity, accuracy, peak) in enumerate([(3.31, 0.74, 19.0), (3.4, 0.73, 21.0)]):
        measured: dict[tuple[str, str | None], float] = {
            ("sft", "perplexity"): perplexity,
            ("rm", "accuracy"): accuracy,
        }
        measured["sft", "peak_vram_gb"] = peak
        seeds[str(seed)] = summaries_of("4090-llama2-7b", measured, hours=6.0, peak=peak)
    rows = {(row[0], row[1]): row[2:] for row in reproduce.rows(seeds)}
    assert rows["stage", "metric"][0] == "published"
    after = rows["sft", "perplexity after (Training Metrics Timeline)"]
    assert after[-1] == "1 of 2 reproduced, mean above (+1.7 %)"
    assert rows["sft", "held-out perplexity (Step 1, SFT Training)"][-1] == "2 of 2 reproduced, mean reproduced"
    assert rows["rm", "held-out accuracy (Step 2, Reward Model)"][0] == "≥ 0.7 fraction"
    assert rows["sft", "peak memory (Step 1, SFT Training)"][-1] == "1 of 2 reproduced, mean reproduced"
    assert rows["ppo", "first KL (Training Metrics Timeline)"][-1].startswith("not compared: 0 by construction")
    assert rows["all", "peak memory (Memory Usage Breakdown)"][-1] == "2 of 2 reproduced, mean reproduced"
    on_timeline = rows["all", "time on the timeline (Training Metrics Timeline)"]
    assert (
        on_timeline[:3] == ("22 hours", "18", "18")
        and on_timeline[-1] == "0 of 2 reproduced, mean below: the guide is too high (-18.2 %)"
    )
