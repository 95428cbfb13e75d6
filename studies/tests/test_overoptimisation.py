"""The study of over-optimisation: best-of-n against all subsets, fits of planted curves, noisy labels, and its page."""

import itertools
import json
import math
import re
from statistics import fmean, stdev

import pytest

from bench.reading import read
from rlhf import recipe
from rlhf.data.split import part
from rlhf.data.worlds import toy
from studies.kinds import Fitted, OveroptimisationRecord
from studies.overoptimisation import chains, curves, page
from studies.overoptimisation.curves import Form

FORMS: tuple[Form, ...] = ("best_of_n", "ppo")


def test_best_of_n_is_the_mean_over_all_subsets_with_ties_shared():
    judged = {
        "proxy": [[0.3, 0.1, 0.3, -2.0], [1.0, 2.0, 3.0, 4.0]],
        "truth": [[1.0, 5.0, -1.0, 2.0], [0.0, 4.0, -3.0, 1.0]],
        "utility": [[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]],
    }
    points = curves.of_best_of_n(judged)
    assert [point["number"] for point in points] == [2, 4]
    for point in points:
        n = point["number"]
        assert point["kl"] == pytest.approx(math.log(n) - (n - 1) / n, abs=1e-5)
        for judge in curves.JUDGES:
            bests = []
            for scores, values in zip(judged["proxy"], judged[judge], strict=True):
                drawn = itertools.combinations(range(4), n)
                tops = [[i for i in subset if scores[i] == max(scores[j] for j in subset)] for subset in drawn]
                bests.append(fmean(fmean(values[i] for i in top) for top in tops))
            every = [x for row in judged[judge] for x in row]
            assert dict(point)[judge] == pytest.approx((fmean(bests) - fmean(every)) / stdev(every), abs=1e-5)
        assert point["truth_low"] <= point["truth"] <= point["truth_high"]


@pytest.mark.parametrize("form", FORMS)
def test_a_fit_recovers_planted_coefficients_and_its_peak_is_the_highest_point(form):
    planted: Fitted = {"alpha": 1.3, "beta": 0.4, "residual": 0.0}
    places = [0.0, 0.2, 0.7, 1.4, 2.5, 6.0]  # 0, where both forms are 0, adds nothing
    fitted = curves.fit(form, [(d, curves.value(planted, form, d)) for d in places])
    assert fitted == pytest.approx(planted, abs=1e-9)
    top = curves.peak(fitted, form)
    assert top is not None
    highest = curves.value(fitted, form, top)
    assert highest > max(curves.value(fitted, form, top * share) for share in (0.99, 1.01))
    assert curves.peak({**fitted, "beta": -0.1}, form) is None


@pytest.mark.parametrize("form", FORMS)
def test_a_fit_weighs_all_points_and_says_how_far_they_lie_from_it(form):
    points = [(1.5, 1.0), (1.5, 2.0), (3.0, 0.5), (3.0, 1.5)]  # pairs around two places, which two coefficients reach
    fitted = curves.fit(form, points)
    assert [curves.value(fitted, form, d) for d in (1.5, 3.0)] == pytest.approx([1.5, 1.0])
    assert fitted["residual"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="do not determine"):
        curves.fit(form, points[:2])


def test_ppos_curve_has_kl_of_whole_answers_and_gains_in_sd_of_sft():
    of = "eval/reward_studies.overoptimisation.judges"
    row = {
        "step": 4,
        "eval/kl_per_token": 0.25,
        "eval/response_length": 12.0,
        "eval/score_gain_sd": 1.5,
        f"{of}.truth_gain": 0.6,
        f"{of}.truth_gain_low": 0.3,
        f"{of}.truth_gain_high": 0.9,
        f"{of}.utility_gain": -0.5,
    }
    (point,) = curves.of_ppo([{"step": 3}, row], {"truth": 1.2, "utility": 1.0})
    expected = {"number": 4, "kl": 3.0, "proxy": 1.5, "truth": 0.5, "utility": -0.5, "truth_low": 0.25}
    assert point == pytest.approx({**expected, "truth_high": 0.75})


def test_noise_flips_a_quarter_of_the_training_pairs_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(chains, "TOY", {"documents": 5, "pairs": 1200, "demonstrations": 5})
    lines = {}
    for world, noise in chains.NOISE.items():
        chains.write_world(tmp_path / world, 3, noise)
        lines[world] = {file.name: file.read_text().splitlines() for file in (tmp_path / world).iterdir()}
    data = recipe.load(chains.RECIPE).recipe.data
    flips = {"train": 0, "held out": 0}
    sizes = {"train": 0, "held out": 0}
    for clean, noisy in zip(*(map(json.loads, lines[world].pop(toy.PAIRS)) for world in chains.NOISE), strict=True):
        message = clean["chosen"].split(toy.HUMAN)[1].split(toy.ASSISTANT)[0].strip()
        side = "train" if part(message, 3, data.heldout_fraction) == "train" else "held out"
        sizes[side] += 1
        flips[side] += noisy == {"chosen": clean["rejected"], "rejected": clean["chosen"]} != clean
        assert sorted(clean.values()) == sorted(noisy.values())
    assert lines["clean"] == lines["noisy"]
    assert flips["held out"] == 0 < sizes["held out"]
    assert flips["train"] / sizes["train"] == pytest.approx(0.25, abs=0.04)


def test_the_recipes_of_all_runs_are_valid_and_none_has_a_kl_penalty(tmp_path):
    runs = chains.Chains(tmp_path, 0, {})
    for name, how in chains.POLICIES:
        loaded = runs.recipe_of(name, how).recipe
        assert loaded.ppo and loaded.rm and loaded.ppo.kl_coef == 0
        assert (loaded.rm.max_samples, loaded.rm.ensemble) == (
            chains.REWARD_MODELS[name].pairs,
            None if how is None else chains.MEMBERS,
        )


def test_the_page_and_the_picture_show_the_newest_record_which_is_of_committed_code_and_of_the_recipe_as_it_is():
    record = read(page.newest(), OveroptimisationRecord)
    assert record["code"]["dirty"] is False
    assert record["recipe_sha256"] == recipe.load(chains.RECIPE).sha256
    text = page.PAGE.read_text(encoding="utf-8")
    tables = page.tables(record)
    assert all(page.marked(name, table) in text for name, table in tables.items())
    assert f"](results/{page.newest().name})" in text
    assert page.picture_of(record) == page.IMAGE.read_text(encoding="utf-8")
    figure = re.compile(r"-?\d+\.\d\d")
    said = figure.findall(text.partition("## What agrees")[2].replace("−", "-"))
    assert said and {*said} <= {*figure.findall(" ".join(tables.values()))}
