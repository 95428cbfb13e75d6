"""Held-out rows whose like is in training are found; what is only alike in form is not."""

import random

import pytest

from rlhf.data.quality.leakage import leaks
from rlhf.data.rows import Document, Example, Message, PreferencePair, PromptOnly, Row


def prose(words: int, seed: int) -> str:
    """Words that share no thirteen in a row with those of another seed."""
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(words))


def dialogue_pair(asked: str, chosen: str, rejected: str = "no", *before: str) -> PreferencePair:
    turns = tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate((*before, asked)))
    return PreferencePair(turns, chosen, rejected, "a:1")


def counted(training: list[Row], heldout: list[Row]) -> dict[str, int]:
    return {way: len(rows) for way, rows in leaks([*OTHERS, *training], heldout).by_kind.items() if rows}


OTHERS: list[Row] = [dialogue_pair(prose(20, n), prose(40, 100 + n), prose(40, 200 + n)) for n in range(50)]


def test_nothing_is_found_in_what_is_apart():
    heldout: list[Row] = [dialogue_pair(prose(20, 300 + n), prose(40, 400 + n)) for n in range(20)]
    assert counted([Document(prose(500, 500), "a:1"), Example((Message("user", "q"),), "Yes.", "a:2")], heldout) == {}
    assert (
        counted([], [dialogue_pair("say it", "Yes.")])
        == counted([dialogue_pair("really so", "Yes.")], [dialogue_pair("say it", "Yes.")])
        == {}
    )
    assert leaks([], heldout).leaking == leaks(heldout, []).leaking == []


def test_the_same_answer_in_another_conversation():
    answer = prose(15, 500)
    one, other = (
        dialogue_pair("how is that", answer),
        dialogue_pair("would you think so", "no", answer.upper().replace(" ", "  ")),
    )
    leaked = leaks([*OTHERS, one], [other])
    assert leaked.heldout == [(other, one)] and leaked.leaking == [one]
    assert counted([one], [other]) == {"same_answer": 1}
    assert counted([dialogue_pair("how is that", " ".join(answer.split()[:12]))], [other]) == {}


def test_the_same_last_turn_and_answer_after_another_start():
    training = dialogue_pair("and then", "Nothing.", "no", "hello", "hi")
    assert counted([training], [dialogue_pair("And then", "Nothing.", "x", "hey", "hi")]) == {"same_turn": 1}
    assert counted([training], [dialogue_pair("and now", "Nothing.", "x", "hey", "hi")]) == {}


def test_the_same_start_shows_where_the_split_is_not_ours():
    training = dialogue_pair("go on", prose(20, 500), "no", "hello there", "hi")
    assert counted([training], [dialogue_pair("hello  there", prose(20, 501), "x")]) == {"same_start": 1}


@pytest.mark.parametrize(("changed", "copy"), [([50], True), ([40, 80], False), (range(0, 120, 4), False)])
def test_four_fifths_of_the_shingles_make_a_near_copy(changed, copy):
    """Of 120 words, one changed word spoils 13 of 108 shingles, two spoil 26; a change in every fourth spoils all.

    Four fifths of the shingles make a copy.
    """
    words = prose(120, 500).split()
    other = [("x" if n in changed else word) for n, word in enumerate(words)]
    heldout = dialogue_pair("what is it", " ".join(words))
    for training in (
        dialogue_pair("and what", " ".join(other)),
        dialogue_pair("go on", "yes", "no", "well", " ".join(other)),
        Document("Once: " + ", ".join(other) + ".", "a:1"),
    ):
        leaked = leaks([*OTHERS, training], [heldout])
        assert [len(rows) for way, rows in leaked.by_kind.items() if way == "near_copies"] == [int(copy)]
        assert leaked.leaking == ([training] if copy else [])


def test_a_copy_must_be_in_one_row():
    """Two training rows with one half each are no copy, though all shingles but those between are in training."""
    words = prose(200, 500).split()
    halves: list[Row] = [dialogue_pair("one", " ".join(words[:100])), dialogue_pair("two", " ".join(words[100:]))]
    assert counted(halves, [dialogue_pair("all", " ".join(words))]) == {}


def test_a_template_is_no_copy():
    template = prose(60, 500)
    heldout: list[Row] = [dialogue_pair(f"{template} h{n}", f"it is h{n}") for n in range(11)]
    training: list[Row] = [dialogue_pair(f"{template} t{n}", f"it is t{n}") for n in range(100)]
    assert counted(training, heldout) == {}
    assert counted(training, heldout[:1]) == {}


@pytest.mark.parametrize(("training_rows", "copies"), [(9, 1), (10, 0)])
def test_what_more_than_ten_rows_share_is_a_template(training_rows, copies):
    """Rows of both sides count: nine and a held-out one are ten."""
    shared = prose(60, 500)
    training: list[Row] = [Document(f"t{n} {shared}", "a:1") for n in range(training_rows)]
    assert len(leaks(training, [Document(f"h {shared}", "a:1")]).by_kind["near_copies"]) == copies


def test_many_templates_of_few_rows_each_are_no_copies():
    templates = [prose(60, 500 + n) for n in range(20)]
    rows: list[Row] = [
        dialogue_pair(f"{templates[n % 20]} {prose(4, 1000 + n)}", prose(4, 2000 + n)) for n in range(1000)
    ]
    assert counted(rows[100:], rows[:100]) == {}


def test_the_order_of_what_is_found_is_that_of_the_rows():
    """Hashes of strings differ from process to process."""
    answers = [prose(40, 500 + n) for n in range(20)]
    heldout: list[Row] = [dialogue_pair(f"h{n}", answer) for n, answer in enumerate(answers)]
    training: list[Row] = [dialogue_pair(f"t{n}", f"{answer} and so on") for n, answer in enumerate(reversed(answers))]
    assert [row for row, _ in leaks(training, heldout).by_kind["near_copies"]] == heldout


def test_shingles_run_from_the_question_into_its_answer():
    asked, answer = prose(10, 500), prose(12, 501)
    assert counted(
        [dialogue_pair(" ".join(["x", *asked.split()[1:]]), "no", answer)], [dialogue_pair(asked, answer)]
    ) == {"near_copies": 1}


def test_a_prompt_without_an_answer_is_a_near_copy_by_its_last_message():
    asked = prose(15, 500)
    one, other = (PromptOnly((Message("user", text),), "a:1") for text in (f"Say: {asked}", asked))
    assert counted([one], [other]) == {"near_copies": 1}
    assert counted([PromptOnly((Message("user", prose(15, 501)),), "a:1")], [other]) == {}


def test_a_shingle_may_end_with_the_first_word_of_an_answer():
    asked = prose(12, 500)
    assert counted([dialogue_pair(f"so {asked}", "Yes.")], [dialogue_pair(asked, "Yes.")]) == {"near_copies": 1}
