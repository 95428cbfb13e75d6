"""Rows of two responses and a verdict become pairs by the verdict."""

import json

import pytest

from rlhf.data import convert, formats
from rlhf.data.prepare import Preparation
from rlhf.errors import UserError
from tests.helpers import rlhf
from tests.unit.rows import UNCLEAR


def numbered(verdict, column="overall_preference", **more):
    return {
        "context": [{"role": "user", "content": "A tree?"}],
        "response1": "One.",
        "response2": "Two.",
        column: verdict,
    } | more


def lettered(verdict, column="winner", **more):
    return {"prompt": "A tree?", "response_a": "One.", "response_b": "Two.", column: verdict} | more


def arena(verdict):
    sides = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}] for text in ("One.", "Two.")]
    return {"winner": verdict, "conversation_a": sides[0], "conversation_b": sides[1]}


def from_zero(verdict, column="better_response_id", **more):
    return {"prompt": "A tree?", "response_0": "One.", "response_1": "Two.", column: verdict} | more


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        (numbered(-2), "One."),
        (numbered(3), "Two."),
        (numbered("-1"), "One."),
        (numbered("0.5"), "Two."),
        (numbered(1, "winner"), "One."),
        (numbered(2, "winner"), "Two."),
        (numbered("response2", "preference"), "Two."),
        (from_zero(0), "One."),
        (from_zero(1), "Two."),
        (from_zero("response_1", "winner"), "Two."),
        (numbered(1, "better_response_id"), "One."),
        (arena("model_a"), "One."),
        (arena("model_b"), "Two."),
        (lettered("A"), "One."),
        (lettered("response_b", "preference"), "Two."),
    ],
)
def test_the_verdict_decides_and_ties_are_left_out(tmp_path, row, chosen):
    tie = {"overall_preference": 0} if "overall_preference" in row else {"winner": "tie (bothbad)", "preference": "tie"}
    tie = {"better_response_id": "tie"} if "better_response_id" in row else tie
    tied = row | {key: value for key, value in tie.items() if key in row}
    file = write(tmp_path / "a.jsonl", row, tied)
    found = convert.convert([file])
    assert [pair.chosen for pair in found.rows.pairs] == [chosen]
    assert {found.rows.pairs[0].chosen, found.rows.pairs[0].rejected} == {"One.", "Two."}
    assert found.rows.pairs[0].source == f"{file}:1"
    assert found.pairings[0].in_words() == f"{file}: 2 comparisons: 1 pair, 1 tie left out"


@pytest.mark.parametrize(
    "row",
    [
        *(numbered(-1, "preference"), numbered("nan"), lettered(1), lettered("gpt-4"), arena(True), lettered(0)),
        *(numbered(0, "better_response_id"), lettered(1, "better_response_id"), from_zero(2)),
        *(from_zero(1, "preference"), from_zero(1, "preferences"), lettered(-2, "overall_preference")),
    ],
)
def test_a_verdict_that_is_not_clear_is_refused(tmp_path, row):
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*leaves open which response is better; write"):
        convert.convert([write(tmp_path / "a.jsonl", row)])


def test_rows_without_a_prompt_a_verdict_or_a_pair_are_refused(tmp_path):
    with pytest.raises(UserError, match="name its column: --rename OLD=prompt"):
        convert.convert([write(tmp_path / "a.jsonl", numbered(1, context=None))])
    with pytest.raises(UserError, match="no verdict and no ratings say which response is better"):
        convert.convert([write(tmp_path / "b.jsonl", numbered(None))])
    with pytest.raises(UserError, match="every row is a tie"):
        convert.convert([write(tmp_path / "c.jsonl", numbered(0))])
    with pytest.raises(UserError, match="'history' would be lost"):
        convert.convert([write(tmp_path / "d.jsonl", lettered("a", history="Earlier."))])


@pytest.mark.parametrize("row", [numbered(-2), arena("model_a"), lettered("b")])
def test_reading_refuses_them_with_the_command_that_converts(tmp_path, monkeypatch, capsys, row):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "FILE", row, row)
    for on_bad_row in ("stop", "skip"):
        with pytest.raises(UserError, match=r"`rlhf data convert FILE --to pairs\.jsonl`") as refusal:
            formats.read(["FILE"], on_bad_row=on_bad_row)
        assert "ename" not in str(refusal.value)
    assert rlhf(monkeypatch, capsys, "data", "convert", "FILE", "--to", "pairs.jsonl")[0] == 0
    assert len(formats.read(["pairs.jsonl"]).pairs) == 2


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"tools": [{"name": "look_up"}]}, "'tools' would be lost"),
        ({"images": ["tree.png"]}, "'images' would be lost"),
        ({"input": "An oak."}, "'input' is not used in training"),
        ({"criteria": "Be short."}, r"'criteria' is not used in training.*--ignore criteria\)"),
        ({"response1": "Three."}, "'response1' is not used"),
        ({"response1": "Three.", "response2": "Four."}, "response_a, response_b and response1, response2; take one"),
        ({"overall_preference": -1}, "verdicts under 'winner' and 'overall_preference'; take the others out"),
        ({"score_a": 1, "score_b": "much"}, "'score_b' is 'much'; it must be a finite number"),
    ],
)
def test_no_other_column_is_lost(tmp_path, beside, reason):
    with pytest.raises(UserError, match=rf"a\.jsonl:1: .*{reason}"):
        convert.convert([write(tmp_path / "a.jsonl", lettered("a", **beside))])


def test_a_named_kind_ignores_unknown_columns_as_the_message_says(tmp_path):
    file = write(tmp_path / "a.jsonl", lettered("b", criteria="Be short."))
    (pair,) = convert.convert([file], kind="preference").rows.pairs
    assert (pair.chosen, pair.rejected) == ("Two.", "One.")


@pytest.mark.parametrize("beside", [{"weight": 0}, {"train": False}, {"train": "false"}])
def test_a_row_that_is_not_trained_on_makes_no_pair(tmp_path, beside):
    rows = convert.convert([write(tmp_path / "a.jsonl", lettered("a", **beside), lettered("b"))]).rows
    assert [pair.chosen for pair in rows.pairs] == ["Two."]
    assert rows.report.counts()["untrained"] == 1


@pytest.mark.parametrize(
    ("row", "margin"),
    [
        (lettered("a", score_a=1, score_b=5), -4),
        (lettered("b", score_a=1, score_b=5), 4),
        (lettered("b", score_a=2, score_b=2, margin=3), 0),
        (lettered("b", score_a=2, score_b=None, margin=3), 3),
        (lettered("a", response_a_rating="4.5", response_b_rating="2"), 2.5),
        (numbered(-1, score_1=9, score_2=3), 6),
        (lettered("a"), None),
    ],
)
def test_scores_of_the_responses_become_the_margin(tmp_path, row, margin):
    (pair,) = convert.convert([write(tmp_path / "a.jsonl", row)]).rows.pairs
    assert pair.margin == margin


def test_whole_conversations_must_begin_with_a_prompt_beside_them(tmp_path):
    (pair,) = convert.convert([write(tmp_path / "a.jsonl", arena("model_a") | {"prompt": "Hi"})]).rows.pairs
    assert [message.content for message in pair.prompt] == ["Hi"]
    with pytest.raises(UserError, match="do not begin with 'prompt'"):
        convert.convert([write(tmp_path / "b.jsonl", arena("model_a") | {"prompt": "Bye"})])


@pytest.mark.parametrize(
    "row",
    [
        numbered(-2, domain="general", individual_preference=[{"score": -2, "reasoning": "Short."}]),
        arena("model_a")
        | {"model_a": "x", "judge": "arena_user_7", "turn": 1, "anony": True, "tstamp": 1.5}
        | {"openai_moderation": {"flagged": False}, "toxic_chat_tag": {"flagged": False}},
        lettered("a", overall_preference=None, response1=None, response2=None),
        from_zero(1, is_response_0_safe=True, is_response_1_safe=True, safer_response_id=0, prompt_source="x")
        | {"response_0_severity_level": 1, "response_0_harm_category": {"fraud": True}, "response_0_sha256": "ab"},
    ],
)
def test_columns_on_how_a_verdict_came_about_are_left_out(tmp_path, row):
    assert len(convert.convert([write(tmp_path / "a.jsonl", row, row)]).rows.pairs) == 2


@pytest.mark.parametrize("name", UNCLEAR)
def test_numbers_whose_names_leave_open_which_response_is_better_decide_where_their_sign_is_named(tmp_path, name):
    for texts in ("response", "story"):
        row = {"prompt": "A tree?", f"{texts}_a": "One.", f"{texts}_b": "Two.", f"{name}_a": 1, f"{name}_b": 3}
        file = write(tmp_path / f"{texts}.jsonl", row)
        for sign, chosen in (("+", "Two."), ("-", "One.")):
            (pair,) = convert.convert([file], Preparation(rating=f"{sign}{name}_a")).rows.pairs
            assert (pair.chosen, pair.margin) == (chosen, 2)
        for rating in (None, f"{name}_a"):
            with pytest.raises(
                UserError, match=rf"{texts}\.jsonl:1: .*{name}_a' does not say whether more .* --rating -"
            ):
                convert.convert([file], Preparation(rating=rating))
    with pytest.raises(UserError, match=r"rates it: \+depth \(data.rating\) is none"):
        convert.convert([tmp_path / "response.jsonl"], Preparation(rating="+depth"))


def test_of_two_ratings_none_is_taken_before_the_other(tmp_path):
    row = lettered(None) | {"score_a": 1, "score_b": 2, "reward_a": 5, "reward_b": 3}
    file = write(tmp_path / "a.jsonl", row)
    with pytest.raises(UserError, match=r"score_a, reward_a do not agree .* --rating score_a\)"):
        convert.convert([file])
    assert convert.convert([file], Preparation(rating="reward_a")).rows.pairs[0].chosen == "One."
    with pytest.raises(UserError, match="do not agree"):  # with a verdict too
        convert.convert([write(tmp_path / "b.jsonl", row | {"winner": "a"})])


@pytest.mark.parametrize(("value", "is_named"), [("a", True), ("response_b", True), ("One.", True), (1, False)])
@pytest.mark.parametrize("column", ["label", "labels", "judgment", "human_label", "Judgements"])
def test_a_label_may_name_the_worse_response_as_well(tmp_path, column, value, is_named):
    """A way out is named only if it works: a new name where the value says which, and no column where ratings do."""
    file = write(tmp_path / "a.jsonl", lettered(value, column))
    with pytest.raises(UserError, match=rf"'{column}' .*leaves open") as refusal:
        convert.convert([file])
    assert (f"--rename {column}=winner" in str(refusal.value)) == is_named and "--ignore" not in str(refusal.value)
    assert not is_named or convert.convert([file], Preparation({column: "winner"})).rows.pairs
    rated = write(tmp_path / "b.jsonl", lettered(value, column, score_A=3, score_B=5))
    with pytest.raises(UserError, match=rf"to let their ratings decide: --ignore {column}\b"):
        convert.convert([rated])
    assert convert.convert([rated], Preparation(ignore=[column])).rows.pairs[0].chosen == "Two."


@pytest.mark.parametrize(
    ("beside", "way_out"),
    [
        ({"safer_response_id": 1}, "if 'safer_response_id' names the better one: --rename safer_response_id=winner"),
        ({"decided": "response_0", "n_tokens": 44}, "if 'decided' names the better one: --rename decided=winner"),
        ({"strength": -2, "text_id": "a71"}, "if 'strength' says it, write it as 'winner': response_0, response_1 or"),
        ({}, r"as `winner` or `score_…` do$"),
    ],
)
def test_without_a_verdict_the_columns_that_may_be_one_are_named_on_reading_and_on_conversion(
    tmp_path, beside, way_out
):
    file = write(tmp_path / "a.jsonl", from_zero(None, **beside))
    for read in (formats.read, convert.convert):
        with pytest.raises(UserError, match=way_out) as refusal:
            read([file])
        assert "makes pairs" not in str(refusal.value)
    if "--rename" in way_out:
        assert convert.convert([file], Preparation({next(iter(beside)): "winner"}, ["n_tokens"])).rows.pairs


@pytest.mark.parametrize(
    "names", [("response1", "response2"), ("response_1", "response_2"), ("Response 1", "Response 2")]
)
def test_the_sign_of_helpsteer_counts_beside_responses_1_and_2_however_they_are_spelled(tmp_path, names):
    for verdict in ("overall_preference", "preference_strength"):
        row = {"prompt": "A tree?", names[0]: "One.", names[1]: "Two.", verdict: 2}
        beside = {"preference_statement": "@Two is better.", "all_preferences_unprocessed": [{"strength": 1}]}
        (pair,) = convert.convert([write(tmp_path / "a.jsonl", row | beside, row | {verdict: 0})]).rows.pairs
        assert pair.chosen == "Two."
        with pytest.raises(UserError, match="a number below or above 0 is read beside 'response_1' and 'response_2'"):
            convert.convert([write(tmp_path / "b.jsonl", lettered(1, verdict))])


def test_numbers_that_count_the_responses_in_another_way_are_not_used_at_all(tmp_path):
    """From 0 on, 1 is the second response: with rows of 0 skipped, all others would be the wrong way round."""
    file = write(tmp_path / "a.jsonl", *(numbered(verdict, "winner") for verdict in (1, 1, 1, 0, 1)))
    with pytest.raises(UserError, match=r"a\.jsonl:4: 'winner' is 0 and leaves open"):
        convert.convert([file], on_bad_row="skip")


@pytest.mark.parametrize("names", [("context", "question"), ("prompt", "context"), ("prompt", "question")])
def test_a_passage_is_not_taken_for_the_prompt(tmp_path, names):
    row = {"response1": "Paris", "response2": "London", "overall_preference": -2} | dict.fromkeys(names, "A text.")
    with pytest.raises(UserError, match=rf"a\.jsonl:1: texts under '{names[0]}' and '{names[1]}'; write them into one"):
        convert.convert([write(tmp_path / "a.jsonl", row)])
    (pair,) = convert.convert([write(tmp_path / "b.jsonl", row | {names[0]: " "})]).rows.pairs
    assert [message.content for message in pair.prompt] == ["A text."]


@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        ({"prompt": "Q?", "responseA": "One.", "responseB": "Two.", "preferred": "B"}, "Two."),
        ({"question": "Q?", "left_output": "One.", "right_output": "Two.", "verdict": "left"}, "One."),
        ({"prompt": "Q?", "option1": "One.", "option2": "Two.", "best": "option2"}, "Two."),
        ({"prompt": "Q?", "first_reply": "One.", "second_reply": "Two.", "choice": "second"}, "Two."),
        ({"prompt": "Q?", "response_1": "One.", "response_2": "Two.", "better_response": 2.0}, "Two."),
        ({"prompt": "Q?", "answer_a": "One.", "answer_b": "Two.", "preferred_answer": "Two."}, "Two."),
        ({"prompt": "Q?", "response_a": "One.", "response_b": "Two.", "chosen": "A"}, "One."),
        ({"prompt": "Q?", "response_a": "One.", "response_b": "Two.", "score_a": 1, "scoreB": 3}, "Two."),
        ({"prompt": "Q?", "answer_a": "One.", "answer_b": "Two.", "answerA.rating": 1, "answerB.rating": 3}, "Two."),
        (
            {"prompt": "Q?", "response_a": "One.", "response_b": "Two.", "winner_model_a": 1, "winner_model_b": 0},
            "One.",
        ),
        ({"prompt": "Q?", "output 1": "One.", "output 2": "Two.", "ranks": {"1": 2, "2": 1}}, "Two."),
    ],
)
def test_responses_verdicts_and_ratings_are_found_by_their_shape(tmp_path, row, chosen):
    file = write(tmp_path / "a.jsonl", row)
    (pair,) = convert.convert([file]).rows.pairs
    assert pair.chosen == chosen
    for kind in ("auto", "preference"):
        with pytest.raises(UserError, match="two responses") as refusal:
            formats.read([file], kind=kind)
        assert "ename" not in str(refusal.value) and "--to pairs.jsonl" in str(refusal.value)


@pytest.mark.parametrize("verdict", [1, 0, True, 0.5, "yes", "the long one"])
@pytest.mark.parametrize("column", ["better_label", "preferred", "better_response", "human_choice"])
def test_a_verdict_that_names_no_response_is_refused_with_what_to_write(tmp_path, column, verdict):
    with pytest.raises(UserError, match=rf"'{column}' is .* write response_a, response_b or tie") as refusal:
        convert.convert([write(tmp_path / "a.jsonl", lettered(verdict, column))])
    assert "ename" not in str(refusal.value)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Q?", "choice_a": "One of it.", "choice_b": "Two.", "choice_c": "Three.", "answer": "a"},
        {"sentence1": "One is.", "sentence2": "Two are.", "label": 1},
        {"prompt": "Q?", "completion": "Yes.", "hint_1": "One of it.", "hint_2": "Two of it."},
    ],
)
def test_choices_sentences_and_hints_are_no_two_responses(tmp_path, row):
    with pytest.raises(UserError) as refusal:
        formats.read([write(tmp_path / "a.jsonl", row)])
    assert "two responses" not in str(refusal.value)


def test_a_verdict_beside_a_pair_that_is_not_clear_is_refused_also_where_all_rows_have_it(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"Q {n}?", "chosen": "One.", "rejected": "Two.", "better": "B"} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="'better' is 'B', which does not say whether chosen or rejected is better"):
        formats.read([file])
