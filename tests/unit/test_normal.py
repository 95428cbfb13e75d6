"""Spellings of one text are one text in every comparison."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.corpus import Corpus, Split
from rlhf.data.normal import normal_answer, normalise
from rlhf.data.parsing import parse_row
from rlhf.data.quality.check import label_noise
from rlhf.data.quality.flaws import FLAWS
from rlhf.data.rows import Message, PromptOnly, Row
from rlhf.data.split import conversation_key
from rlhf.data.transcripts import parse_hh
from tests.unit.rows import pair_of_one_turn

ONE, OTHER = "Où est le café ?\nLà.", "Ou\u0300 est  le cafe\u0301\u00a0?\r\nLa\u0300. "


@given(st.text() | st.text(alphabet="e\u0301\u0323 \u2028\u00a0\r\n"))
def test_the_normal_form_is_its_own(text):
    assert normalise(normalise(text)) == normalise(text)


@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_ascii_keeps_the_side_that_white_space_alone_decided(text):
    assert normalise(text) == " ".join(text.split())


def test_numbers_are_compared_by_value():
    assert len({normal_answer(text) for text in ("10.0", "10", "1e1", " +10. ")}) == 1
    assert len({normal_answer(text) for text in ("10", "-10", "10.01", "ten", "1e99999", "10" + 30 * "0" + "1")}) == 6


def test_spellings_of_one_text_are_one_text():
    assert ONE != OTHER
    assert conversation_key((Message("user", ONE),)) == conversation_key((Message("user", OTHER),))
    assert parse_row({"prompt": "Q?", "chosen": ONE, "rejected": OTHER}, "preference", "a:1") == "identical"
    first, again, opposite = (
        pair_of_one_turn(ONE, ONE, "No."),
        pair_of_one_turn(OTHER, OTHER, "No."),
        pair_of_one_turn(OTHER, "No.", OTHER),
    )
    assert FLAWS["duplicates"]([first, again]) == [again]
    assert FLAWS["contradictory"]([first, opposite]) == [first, opposite]
    assert label_noise([first, opposite]).disagreement.total == 1


@pytest.mark.parametrize(("right", "further"), [("10.0", 0), ("11", 1)])
def test_right_answers_of_one_prompt_are_compared_by_value(right, further):
    rows: list[Row] = [
        PromptOnly((Message("user", ONE),), "a:1", "10"),
        PromptOnly((Message("user", OTHER),), "a:2", right),
    ]
    assert len(FLAWS["further_answers"](rows)) == further
    if not further:
        answers = Corpus(Split(rows, [])).right_answers()
        assert list(answers) == [(Message("user", text),) for text in (ONE, OTHER)], "every spelling has its answer"


def test_turns_are_found_behind_line_ends_of_windows():
    unix = "\n\nHuman: Hi\nyou\n\nAssistant: Hello!"
    assert parse_hh(unix.replace("\n", "\r\n")) == parse_hh(unix) and len(parse_hh(unix)) == 2
    asked = "\n\nHuman: Hi\n\nAssistant:"
    spellings = [parse_row({"prompt": text}, "prompt", "a:1") for text in (asked, asked.replace("\n", "\r\n"))]
    assert spellings == [PromptOnly((Message("user", "Hi"),), "a:1")] * 2
