"""Splits: nothing on both sides, nothing moved by what else is in the file."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.rows import Document, Message, PreferencePair
from rlhf.data.split import conversation_key, divide, document_key, is_heldout, part, shuffled


def pair_with_turns(*turns: str, n: int = 0) -> PreferencePair:
    """A pair whose prompt alternates user and assistant, the user first."""
    prompt = tuple(Message(("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns))
    return PreferencePair(prompt, f"good {n}", f"bad {n}", f"a.jsonl:{n}")


def key_of(row: PreferencePair) -> str:
    return conversation_key(row.prompt)


def test_known_sides_never_change():
    assert [n for n in range(40) if is_heldout(f"prompt {n}", 0, 0.1)] == [4, 8, 30, 34]


def test_the_fraction_is_met_and_the_seed_matters():
    keys = [str(n) for n in range(10_000)]
    first = {key for key in keys if is_heldout(key, 0, 0.1)}
    second = {key for key in keys if is_heldout(key, 1, 0.1)}
    assert 900 < len(first) < 1100 and 900 < len(second) < 1100
    assert len(first & second) < 150
    assert first < {key for key in keys if is_heldout(key, 0, 0.2)}


def test_validation_takes_its_share_of_all_keys_from_the_held_out_ones():
    """Both are drawn by one number for each key: with two, only two fifths of the share would be validation."""
    parts = Counter(part(str(n), 0, 0.4, 0.2) for n in range(10_000))
    assert 1900 < parts["validation"] < 2100 and 1900 < parts["test"] < 2100


def test_key_is_the_first_user_message_with_white_space_normalised():
    key = conversation_key(
        (Message("system", "Be brief."), Message("user", "  Tell\n me a\tjoke "), Message("user", "x"))
    )
    assert key == "Tell me a joke"
    assert conversation_key((Message("user", " "), Message("assistant", "Yes?"), Message("user", "Hi"))) == "Hi"
    with pytest.raises(ValueError, match="without a user message"):
        conversation_key((Message("system", "Be brief."),))


def test_a_transcript_is_split_by_its_prompt_and_a_text_by_itself():
    transcript = Document("\n\nHuman: Tell  me\n\nAssistant: What?\n\nHuman: A joke", "a:1")
    assert document_key(transcript) == "Tell me" == key_of(pair_with_turns("Tell me", "Sure."))
    assert document_key(Document(" Plain  text\n", "a:2")) == "Plain text"
    assert document_key(Document("\n\nAssistant: I begin.", "a:3")) == "Assistant: I begin."


opening = st.sampled_from([f"question {n}" for n in range(8)])
rows = st.lists(
    st.builds(lambda start, more: pair_with_turns(start, *more), opening, st.lists(st.sampled_from("abc"), max_size=4))
)


@settings(deadline=None)
@given(rows, st.integers(0, 50), st.floats(0, 1))
def test_no_prompt_and_no_conversation_is_on_both_sides(rows, seed, fraction):
    train, heldout = divide(rows, seed=seed, fraction=fraction)
    assert not {row.prompt for row in train} & {row.prompt for row in heldout}
    assert not {row.prompt[0] for row in train} & {row.prompt[0] for row in heldout}
    assert len(train) + len(heldout) == len(rows)


@settings(deadline=None)
@given(rows, rows, st.randoms(use_true_random=False))
def test_a_side_depends_neither_on_the_order_nor_on_other_rows(rows, others, random):
    _, heldout = divide(rows, seed=3, fraction=0.5)
    mixed = [*rows, *others]
    random.shuffle(mixed)
    train_of_mixed, heldout_of_mixed = divide(mixed, seed=3, fraction=0.5)
    for row in rows:
        assert row in (heldout_of_mixed if row in heldout else train_of_mixed)


def test_shuffled_is_a_permutation_that_the_seed_decides():
    numbers = list(range(50))
    assert sorted(shuffled(numbers, 1)) == numbers
    assert shuffled(numbers, 1) == shuffled(iter(numbers), 1) != shuffled(numbers, 2)
    assert shuffled(range(8), 0) == [7, 5, 3, 0, 6, 4, 2, 1]
    assert numbers == list(range(50))
