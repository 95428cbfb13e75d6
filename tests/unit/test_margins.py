"""Scores and margins beside a pair."""

import json

import pytest

from rlhf.data import convert, formats
from rlhf.data.margins import margin_of
from rlhf.data.prepare import Preparation
from rlhf.data.raw import Malformed
from rlhf.errors import UserError

PAIR = {"prompt": "Name a metal.", "chosen": "Iron.", "rejected": "Wood."}


NAMES = (
    ("score_chosen", "score_rejected"),
    ("chosen-rating", "rejected-rating"),
    ("rewardChosen", "rewardRejected"),
    ("chosen_avg_rating", "rejected_avg_rating"),
    ("overall_score.chosen", "overall_score.rejected"),
    ("chosen.score", "rejected.score"),
)


@pytest.mark.parametrize(("chosen", "rejected"), NAMES)
def test_two_numbers_whose_names_differ_as_those_of_the_answers_are_ratings(chosen, rejected):
    assert margin_of({chosen: 3, rejected: 8.5}) == -5.5
    assert margin_of({chosen: "3", rejected: " 2"}) == 1, "cells of a table are text"
    assert margin_of({chosen: 3, rejected: None}) is margin_of({rejected: 3, chosen: ""}) is None
    assert margin_of({chosen: 3, rejected: 2, "margin": -4}) == margin_of({chosen: 3, rejected: 2, "margin": "?"}) == 1
    assert margin_of({chosen: 0, rejected: 0}) == 0 and margin_of({rejected: 0, chosen: 0.5}) == 0.5


def test_ratings_may_stand_in_an_object_and_places_count_downwards():
    assert margin_of({"scores": {"chosen": 8, "rejected": 3}}) == 5
    assert margin_of({"chosen_rank": 1, "rejected_rank": 4}) == 3


@pytest.mark.parametrize(
    "name",
    ["{}_length", "n_tokens_{}", "{}Id", "{}_logprob", "is_{}_safe", "{}_model", "safety.{}.score", "bad_rank_{}"],
)
def test_what_does_not_say_by_its_whole_name_that_it_rates_is_no_rating(name):
    value = {"is_{}_safe": (True, False), "{}_model": ("gpt-4", "llama")}.get(name, (7, 3))
    assert margin_of(dict(zip(map(name.format, ("chosen", "rejected")), value, strict=True))) is None
    assert margin_of({"chosen": "4", "rejected": "5"}) is None, "these are the answers"


def test_without_scores_the_margin_is_read():
    assert margin_of({"margin": -1.5}) == -1.5
    assert margin_of({"margin": 0}) == 0
    assert (
        margin_of({})
        is margin_of({"margin": None})
        is margin_of({"margin": " "})
        is margin_of({"margin": float("nan")})
        is None
    )


@pytest.mark.parametrize("wrong", [True, "high", [1], float("-inf"), "inf", 10**400])
@pytest.mark.parametrize("column", ["margin", "score_chosen", "rejected_rating"])
def test_what_is_no_finite_number_is_named(column, wrong):
    beside = {"score_rejected": 1, "chosen_rating": 2} if column != "margin" else {}
    with pytest.raises(Malformed, match=f"'{column}' is .*finite number"):
        margin_of({column: wrong} | beside)


def test_scores_too_far_apart_for_a_number_are_refused():
    with pytest.raises(Malformed, match="score_chosen - score_rejected"):
        margin_of({"score_chosen": 1e308, "score_rejected": -1e308})


def test_a_margin_is_read_and_kept_on_conversion(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(json.dumps(PAIR | extra) + "\n" for extra in ({"score_chosen": 3, "score_rejected": 8}, {}))
    )
    before = convert.convert([file]).rows
    assert [pair.margin for pair in before.pairs] == [-5, None]
    convert.write(before, tmp_path / "b.jsonl")
    assert [pair.margin for pair in formats.read([tmp_path / "b.jsonl"]).pairs] == [-5, None]


def test_a_number_about_each_answer_that_does_not_say_how_it_rates_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = ({"bias_score_chosen": n, "bias_score_rejected": 3, "rank_chosen": 2, "rank_rejected": n} for n in (5, 4))
    file.write_text("".join(json.dumps(PAIR | row) + "\n" for row in rows))
    read = formats.read([file])
    assert [pair.margin for pair in read.pairs] == [3, 2]
    assert "not used in training: bias_score_chosen, bias_score_rejected;" in read.report.notes[0]
    assert "inverted" not in read.report.notes[0], "places are compared"


def test_of_several_ratings_the_order_of_columns_does_not_decide():
    score, place = {"score_chosen": 8, "score_rejected": 3}, {"rank_chosen": 2, "rank_rejected": 1}
    equal = {"rating_chosen": 4, "rating_rejected": 4}
    for one, other in ((score, place), (place, score), (score, equal)):
        with pytest.raises(Malformed, match=r"do not agree on which answer is better; name one: .*--rating \w+\)"):
            margin_of(one | other)
    assert margin_of(place | score, "score_rejected") == 5 and margin_of(score | place, "rank_chosen") == -1
    agreed = {"reward_chosen": 2, "reward_rejected": 1}
    assert margin_of(score | agreed) == margin_of(agreed | score) == 1
    assert margin_of(score | dict.fromkeys(place)) == 5, "a place that is not known says nothing"


def test_a_rating_that_the_user_names_is_the_margin_of_a_pair_and_one_that_no_row_has_is_refused(tmp_path):
    plain, rated = tmp_path / "plain.jsonl", tmp_path / "rated.jsonl"
    plain.write_text(json.dumps(PAIR | {"margin": 2}) + "\n")
    scores = {"rm_score_chosen": 1, "rm_score_rejected": 3, "score_chosen": 9, "score_rejected": 1}
    rated.write_text(json.dumps(PAIR | scores) + "\n")
    for sign, margin in (("+", -2), ("-", 2)):
        how = Preparation(rating=f"{sign}rm_score_chosen")
        read = formats.read([plain, rated], preparation=how)
        assert [pair.margin for pair in read.pairs] == [2, margin]
        assert read.report.notes[0].partition("not used in training: ")[2].startswith("score_chosen, score_rejected;")
        assert [pair.margin for pair in convert.convert([rated], how).rows.pairs] == [margin]
    plain.write_text("".join(json.dumps(scores | row) + "\n" for row in (PAIR | {"rejected": "Iron."}, PAIR)))
    beside = scores | {"cost_chosen": 1, "cost_rejected": 2}
    rated.write_text(json.dumps(PAIR | beside) + "\n")
    read = formats.read([plain, rated], preparation=Preparation(rating="-cost_chosen"))
    assert [pair.margin for pair in read.pairs] == [None, 1]
    assert "(inverted, tied): no pair has -cost_chosen (data.rating)" in read.report.notes[0]
    assert "inverted" not in read.report.notes[1]
    rated.write_text(json.dumps(beside | PAIR | {"rejected": "Iron."}) + "\n")
    assert formats.read([rated, plain], preparation=Preparation(rating="-cost_chosen")).pairs, "its row is left out"
    with pytest.raises(UserError, match=r"'rm_score_chosen' does not say whether more of it is better"):
        formats.read([rated], preparation=Preparation(rating="rm_score_chosen"))
    plain.write_text(json.dumps(PAIR) + "\n")
    for read_file in (
        lambda how: formats.read([plain, rated], preparation=how),
        lambda how: convert.convert([plain], how),
    ):
        with pytest.raises(UserError, match=r"no row has the number \+nonsense \(data.rating, --rating\)"):
            read_file(Preparation(rating="+nonsense"))


def test_numbers_of_unclear_meaning_are_said_not_to_be_compared_with_the_labels(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        json.dumps(PAIR | {"rm_score": {"chosen": 1, "rejected": 3}, "chosen_model": "x", "rejected_model": "y"})
    )
    (note,) = formats.read([file]).report.notes
    assert "No rating is compared with the labels (inverted, tied): 'rm_score.chosen' does not say" in note
    (pair,) = formats.read([file], preparation=Preparation(rating="+rm_score.chosen")).pairs
    assert pair.margin == -2
