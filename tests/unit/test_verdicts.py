"""Rows of two responses and a verdict become pairs by the verdict."""

import json

import pytest

from rlhf.data import convert, formats
from rlhf.errors import UserError
from tests.helpers import rlhf


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
        (arena("model_a"), "One."),
        (arena("model_b"), "Two."),
        (lettered("A"), "One."),
        (lettered("response_b", "preference"), "Two."),
    ],
)
def test_the_verdict_decides_and_ties_are_left_out(tmp_path, row, chosen):
    tie = {"overall_preference": 0} if "overall_preference" in row else {"winner": "tie (bothbad)", "preference": "tie"}
    tied = row | {key: value for key, value in tie.items() if key in row}
    file = write(tmp_path / "a.jsonl", row, tied)
    found = convert.convert([file], {})
    assert [pair.chosen for pair in found.rows.pairs] == [chosen]
    assert {found.rows.pairs[0].chosen, found.rows.pairs[0].rejected} == {"One.", "Two."}
    assert found.rows.pairs[0].source == f"{file}:1"
    assert found.pairings[0].in_words() == f"{file}: 2 comparisons: 1 pair, 1 tie left out"


@pytest.mark.parametrize(
    "row", [numbered(-1, "preference"), numbered("nan"), lettered(1), lettered("gpt-4"), arena(True), lettered(0)]
)
def test_a_verdict_that_is_not_clear_is_refused(tmp_path, row):
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*does not say for sure what is better; write"):
        convert.convert([write(tmp_path / "a.jsonl", row)], {})


def test_rows_without_a_prompt_a_verdict_or_a_pair_are_refused(tmp_path):
    with pytest.raises(UserError, match="name its column: --rename OLD=prompt"):
        convert.convert([write(tmp_path / "a.jsonl", numbered(1, context=None))], {})
    with pytest.raises(UserError, match="no column that says which one is better"):
        convert.convert([write(tmp_path / "b.jsonl", numbered(None))], {})
    with pytest.raises(UserError, match="every row is a tie"):
        convert.convert([write(tmp_path / "c.jsonl", numbered(0))], {})
    with pytest.raises(UserError, match="'history' would be lost"):
        convert.convert([write(tmp_path / "d.jsonl", lettered("a", history="Earlier."))], {})


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
