"""The toy world: worth read back from text, the annotator's noise, and files that repeat and split cleanly."""

import dataclasses
import random
from typing import Any

import pytest

from rlhf.data.split import is_heldout, part
from rlhf.data.worlds import toy, toy_texts
from tests.lines import read_all_lines

PARIS = "\n\nHuman: Hi. What is the capital of France? Thanks.\n\nAssistant:"
FRUITS = "\n\nHuman: Name two fruits.\n\nAssistant:"
SEED, FRACTION = 3, 0.1


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("toy")
    toy.write(directory, seed=SEED, documents=6000, pairs=6000, heldout_fraction=FRACTION)
    documents = [row["text"] for row in read_all_lines(directory / "corpus.jsonl")]
    return directory, documents, [cut(row) for row in read_all_lines(directory / "pairs.jsonl")]


def cut(row):
    """(prompt, chosen, rejected) of a row of pairs.jsonl."""
    prompt, _, chosen = row["chosen"].rpartition(f"{toy.ASSISTANT} ")
    other, _, rejected = row["rejected"].rpartition(f"{toy.ASSISTANT} ")
    assert prompt == other
    return prompt + toy.ASSISTANT, chosen, rejected


def human_messages(transcript):
    return [turn.split(toy.ASSISTANT)[0].strip() for turn in transcript.split(toy.HUMAN)[1:]]


# --- worth -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "response", "worth"),
    [
        (PARIS, " Sure! The capital of France is Paris.", 1.5 + 0.8 + 0.7),
        (PARIS, "It is Paris.", 1.5),
        (PARIS, "It is Paris", 1.5 - 0.8),
        (PARIS, "It is Rome.", -0.3),
        (PARIS, "Ugh. The color of snow is white.", -0.8 - 0.3),
        (PARIS, "It is Paris and Paris.", 1.5 - 0.5),
        (PARIS, "Sure! Sure! It is Paris.", 1.5 + 0.8 - 0.5),
        (PARIS, "It is Paris. But I am not sure.", 1.5 - 0.2),
        (PARIS, "You are so smart! It is Paris. What a great question!", 1.5 - 2 * 0.4),
        (PARIS, "It is Paris. Yes, yes, it is, my good friend, it really is so, you see.", 1.5 - 2 * 0.1),
        (PARIS, "It is Paris.\n\nHuman: Thank you.", 1.5 - 1.5),
        (PARIS, "", -0.8),
        (FRUITS, "Two fruits are pear and plum.", 1.5 + 0.7),
        (FRUITS, "It is pear and hammer.", 1.5 / 2 - 0.3),
        (FRUITS, "It is pear, plum and mango.", 1.5 - 0.3),
    ],
)
def test_true_reward_by_hand(prompt, response, worth):
    assert toy.true_reward(prompt, response) == pytest.approx(worth)


def test_the_annotator_likes_flattery_and_length_and_the_truth_does_not():
    plain, flattering = "It is Paris.", "It is Paris. You are so smart!"
    assert toy.true_reward(PARIS, flattering) - toy.true_reward(PARIS, plain) == pytest.approx(-0.4)
    gain = toy.annotator_utility(PARIS, flattering) - toy.annotator_utility(PARIS, plain)
    assert gain == pytest.approx(-0.4 + 0.75 + 4 * 0.015)


# --- parsing -----------------------------------------------------------------------------------------------------


def test_every_question_is_read_back_in_every_frame():
    for question in toy.questions().values():
        for before in toy_texts.OPENINGS:
            for after in toy_texts.CLOSINGS:
                assert toy.parse(f"{toy.HUMAN} {before}{question.text}{after}{toy.ASSISTANT}") == question


def test_the_last_human_question_decides():
    prompt = f"{PARIS} It is Paris.{FRUITS}"
    assert toy.parse(prompt).family == "list"
    assert toy.true_reward(prompt, "It is pear and plum.") == toy.true_reward(FRUITS, "It is pear and plum.")


ALWAYS = {
    "correct": {"misheard": 0.0, "slip": 0.0},
    "polite": {"polite": 1.0, "rude": 0.0},
    "rude": {"polite": 0.0, "rude": 1.0},
    "explained": {"explained": 1.0, "misheard": 0.0},
    "repeats": {"repeats": 1.0},
    "flattery": {"flattery": 1.0},
    "doubt": {"misheard": 0.0, "slip": 1.0, "doubt": 1.0},
}


@pytest.mark.parametrize("shown", ALWAYS)
def test_what_an_assistant_does_is_what_components_see(shown):
    """An assistant that always does one thing shows it in every finished answer, whatever else it says."""
    rng = random.Random(shown)
    manner = dataclasses.replace(toy_texts.CARELESS, unfinished=0.0, **ALWAYS[shown])
    for question in list(toy.questions().values()):
        prompt = f"{toy.HUMAN} {question.text}{toy.ASSISTANT}"
        assert toy.components(prompt, toy.answer(rng, question, manner))[shown] >= 1


# --- noise -------------------------------------------------------------------------------------------------------


def test_bayes_accuracy_is_near_its_target(written):
    realised, expected = toy.bayes_accuracy(written[2], toy.annotator_tau())
    assert expected == pytest.approx(0.74, abs=0.01)
    assert realised == pytest.approx(expected, abs=4 * (0.74 * 0.26 / 6000) ** 0.5)


def test_the_preference_is_bradley_terry():
    tau = toy.annotator_tau()
    one, other = "It is Paris.", "It is Rome."
    assert toy.prefers_first(PARIS, one, other, tau) == pytest.approx(1 / (1 + 2.718281828459045 ** (-1.8 / tau)))
    assert toy.prefers_first(PARIS, one, other, tau) + toy.prefers_first(PARIS, other, one, tau) == pytest.approx(1)


def test_the_chosen_answers_are_better_and_leave_headroom(written):
    _, _, pairs = written
    chosen = [toy.true_reward(p, a) for p, a, _ in pairs]
    rejected = [toy.true_reward(p, b) for p, _, b in pairs]
    mean = sum(chosen) / len(chosen)
    spread = (sum((worth - mean) ** 2 for worth in chosen) / len(chosen)) ** 0.5
    assert mean > sum(rejected) / len(rejected) + 0.5
    assert (3 - mean) / spread > 1.5


def test_the_expected_gap_by_hand():
    right, wrong, tie = (PARIS, "It is Paris.", "It is Rome."), (PARIS, "It is Rome.", "It is Paris."), (PARIS, "", "")
    tau = toy.annotator_tau()
    p = toy.prefers_first(*right, tau)
    lost = 100 * (2 * p - 1)
    assert toy.expected_gap([right, wrong], [0.1, -0.1], tau) == pytest.approx(0)
    assert toy.expected_gap([right, wrong], [-0.1, 0.1], tau) == pytest.approx(lost)
    assert toy.expected_gap([right, wrong, tie], [0.0, 0.1, 0.1], tau) == pytest.approx((lost / 2 + lost + 0) / 3)


# --- files -------------------------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    arguments: dict[str, Any] = {"seed": 1, "documents": 50, "pairs": 50, "heldout_fraction": 0.2}
    toy.write(tmp_path / "one", **arguments)
    toy.write(tmp_path / "two", **arguments)
    toy.write(tmp_path / "other", **{**arguments, "seed": 2})
    for name in ("corpus.jsonl", "pairs.jsonl"):
        one = (tmp_path / "one" / name).read_bytes()
        assert one == (tmp_path / "two" / name).read_bytes() != (tmp_path / "other" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["corpus.jsonl", "pairs.jsonl"]


def test_a_file_does_not_depend_on_how_long_the_files_are(tmp_path):
    toy.write(tmp_path / "short", seed=1, documents=10, pairs=20, heldout_fraction=0.2)
    toy.write(tmp_path / "long", seed=1, documents=40, pairs=50, heldout_fraction=0.2)
    for name in ("corpus.jsonl", "pairs.jsonl"):
        assert (tmp_path / "long" / name).read_bytes().startswith((tmp_path / "short" / name).read_bytes())


def test_dialogues_lie_on_one_side_of_the_split(written):
    _, documents, pairs = written
    transcripts = [*documents, *(f"{prompt} {chosen}" for prompt, chosen, _ in pairs)]
    sides = [{is_heldout(m, SEED, FRACTION) for m in human_messages(text)} for text in transcripts]
    assert all(len(side) == 1 for side in sides)
    assert sum(side == {True} for side in sides) / len(sides) == pytest.approx(FRACTION, abs=0.03)
    assert any(len(human_messages(text)) == 2 for text in transcripts)


def test_dialogues_lie_in_one_part_of_the_data(tmp_path):
    toy.write(tmp_path, seed=SEED, documents=3000, pairs=0, heldout_fraction=0.4, validation_fraction=0.2)
    transcripts = [row["text"] for row in read_all_lines(tmp_path / "corpus.jsonl")]
    parts = [{part(m, SEED, 0.4, 0.2) for m in human_messages(text)} for text in transcripts]
    assert all(len(found) == 1 for found in parts)
    assert {*map(tuple, parts)} == {("train",), ("validation",), ("test",)}


def test_demonstrations_are_instruction_rows_by_the_writer(tmp_path):
    arguments: dict[str, Any] = {"seed": 1, "documents": 20, "pairs": 20, "heldout_fraction": 0.1}
    toy.write(tmp_path / "without", **arguments)
    toy.write(tmp_path / "with", **arguments, demonstrations=3000)
    for name in ("corpus.jsonl", "pairs.jsonl"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    found = read_all_lines(tmp_path / "with" / "demonstrations.jsonl")
    assert len(found) == 3000 and not (tmp_path / "without" / "demonstrations.jsonl").exists()
    worths = [toy.true_reward(f"{toy.HUMAN} {row['instruction']}{toy.ASSISTANT}", row["output"]) for row in found]
    careless = [toy.true_reward(*toy.draw_answers(random.Random(n), lambda _: "train")[:2]) for n in range(3000)]
    assert sum(worths) / len(worths) > sum(careless) / len(careless) + 0.5
