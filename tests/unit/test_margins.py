"""Scores and margins beside a pair."""

import json

import pytest

from rlhf.data import convert, formats
from rlhf.data.margins import SCORES, margin_of
from rlhf.data.raw import Malformed

PAIR = {"prompt": "Name a metal.", "chosen": "Iron.", "rejected": "Wood."}


@pytest.mark.parametrize(("chosen", "rejected"), SCORES)
def test_the_margin_is_the_difference_of_the_scores(chosen, rejected):
    assert margin_of({chosen: 3, rejected: 8.5}) == -5.5
    assert margin_of({chosen: "3", rejected: " 2"}) == 1, "cells of a table are text"
    assert margin_of({chosen: 3, rejected: None}) is margin_of({rejected: 3, chosen: ""}) is None
    assert margin_of({chosen: 3, rejected: 2, "margin": -4}) == 1


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


@pytest.mark.parametrize("wrong", [True, "high", [1], {"a": 1}, float("-inf"), "inf", 10**400])
@pytest.mark.parametrize("column", ["margin", "score_chosen", "rejected_rating"])
def test_what_is_no_finite_number_is_named(column, wrong):
    with pytest.raises(Malformed, match=f"'{column}' is .*finite number"):
        margin_of({column: wrong})


def test_scores_too_far_apart_for_a_number_are_refused():
    with pytest.raises(Malformed, match="score_chosen - score_rejected"):
        margin_of({"score_chosen": 1e308, "score_rejected": -1e308})


def test_a_margin_is_read_and_kept_on_conversion(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(json.dumps(PAIR | extra) + "\n" for extra in ({"score_chosen": 3, "score_rejected": 8}, {}))
    )
    before = convert.convert([file], {}).rows
    assert [pair.margin for pair in before.pairs] == [-5, None]
    convert.write(before, tmp_path / "b.jsonl")
    assert [pair.margin for pair in formats.read([tmp_path / "b.jsonl"]).pairs] == [-5, None]
