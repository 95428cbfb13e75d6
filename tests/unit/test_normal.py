"""Spellings of one text are one text in every comparison."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import check
from rlhf.data.corpus import Corpus, Split
from rlhf.data.formats import ParsedRows
from rlhf.data.normal import normal_answer, normalise
from rlhf.data.parsing import parse_row
from rlhf.data.rows import Message, PreferencePair, PromptOnly, Row
from rlhf.data.split import conversation_key
from rlhf.data.transcripts import parse_hh

SPELLINGS = [
    ("Où est le café ?\nLà.", "Ou\u0300 est  le cafe\u0301\u00a0?\r\nLa\u0300. "),
    ("Where is it? There.", "\ufeffWhere is\u200b it? \u2060The\u00adre.\u200e"),
    ("ABC (12) はガ", "ＡＢＣ\u3000（１２） はｶ\uff9e"),
    ("A heart ❤ and می\u200cخواهم", "A heart ❤\ufe0f and میخواهم\U000e0001\u034f"),
]
ONE, OTHER = SPELLINGS[0]
DIFFERENT = [("x²", "x2"), ("½", "1/2"), ("\U0001f3f4\U000e0067\U000e0062", "\U0001f3f4"), ("ﬁ", "fi"), ("A", "a")]


@given(st.text() | st.text(alphabet="e\u0301\u0323 \u2028\u00a0\r\n\u200b\ufeffＡｶ\uff9e\U0001f3f4\U000e0067\u034f"))
def test_the_normal_form_is_its_own(text):
    assert normalise(normalise(text)) == normalise(text)


@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_ascii_keeps_the_side_that_white_space_alone_decided(text):
    assert normalise(text) == " ".join(text.split())


def test_numbers_are_compared_by_value():
    assert len({normal_answer(text) for text in ("10.0", "10", "1e1", " +10. ")}) == 1
    assert len({normal_answer(text) for text in ("-5", "\u22125", "\u2013 5", "- 5.0", "\uff0d\uff15")}) == 1
    assert len({normal_answer(text) for text in ("10", "-10", "10.01", "ten", "1e99999", "10" + 30 * "0" + "1")}) == 6


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_spellings_of_one_text_are_one_text(one, other):
    assert one != other
    assert conversation_key((Message("user", one),)) == conversation_key((Message("user", other),))
    assert parse_row({"prompt": "Q?", "chosen": one, "rejected": other}, "preference", "a:1") == "identical"
    first, again, opposite = (
        PreferencePair((Message("user", prompt),), chosen, rejected, "a.jsonl:1")
        for prompt, chosen, rejected in ((one, one, "No."), (other, other, "No."), (other, "No.", other))
    )
    assert found([first, again]) == {"duplicates": 1}
    assert found([first, opposite]) == {"contradictory": 2}
    assert found([first], [again]) == {"leaked": 1}


def found(rows: list[Row], heldout: Sequence[Row] = ()) -> dict[str, int]:
    """What `rlhf data check` finds, but for lengths."""
    read, held = (ParsedRows(tuple(rows)) for rows in (rows, heldout))
    return {finding.name: finding.rows for finding in check.check(read, held) if finding.name != "chosen longer"}


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_says_something_else_is_another_text(one, other):
    assert normalise(one) != normalise(other)


@pytest.mark.parametrize(("right", "further"), [("10.0", 0), ("11", 1)])
def test_right_answers_of_one_prompt_are_compared_by_value(right, further):
    rows: list[Row] = [
        PromptOnly((Message("user", ONE),), "a:1", "10"),
        PromptOnly((Message("user", OTHER),), "a:2", right),
    ]
    assert found(rows).get("further answers", 0) == further
    if not further:
        answers = Corpus(Split(rows, [])).right_answers()
        assert list(answers) == [(Message("user", text),) for text in (ONE, OTHER)], "every spelling has its answer"


def test_turns_are_found_behind_line_ends_of_windows():
    unix = "\n\nHuman: Hi\nyou\n\nAssistant: Hello!"
    assert parse_hh(unix.replace("\n", "\r\n")) == parse_hh(unix) and len(parse_hh(unix)) == 2
