"""Scores and margins beside a pair."""

import json

import pytest

from rlhf.data import convert, formats
from rlhf.data.margins import margin_of
from rlhf.data.raw import Malformed

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
