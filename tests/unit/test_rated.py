"""Rows of several rated answers become pairs, and columns of any source may have names of their own."""

import json
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import convert, formats
from rlhf.data.margins import sign_of
from rlhf.data.prepare import Preparation
from rlhf.errors import UserError
from rlhf.recipe.schema_data import Data
from tests.helpers import rlhf
from tests.unit.rows import UNCLEAR

COMMIT = "0123456789abcdef" * 2 + "01234567"
RATINGS = [(2.0, 10), (4.5, 5), (3.0, 7), (1.0, 1)]


def ultrafeedback(ratings=RATINGS, instruction="Name a metal."):
    """A row of UltraFeedback as it is published: `ratings` are the mean of the aspects and the overall score."""
    return {
        "source": "evol_instruct",
        "instruction": instruction,
        "models": [f"m{n}" for n in range(len(ratings))],
        "completions": [
            {
                "annotations": {"helpfulness": {"Rating": str(mean), "Rationale": "So."}, "honesty": {"Rating": "N/A"}},
                "custom_system_prompt": "Be honest, please.",
                "critique": "It could be longer.",
                "fine-grained_score": mean,
                "model": f"m{n}",
                "overall_score": overall,
                "principle": "honesty",
                "response": f"answer {n}",
            }
            for n, (mean, overall) in enumerate(ratings)
        ],
        "correct_answers": ["None"],
        "incorrect_answers": ["Not this one."],
    }


def read(tmp_path, *rows, **preparation):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return formats.read([file], preparation=Preparation(**preparation))


def told(rows):
    return [(pair.chosen, pair.rejected, pair.margin) for pair in rows.pairs]


def test_one_pair_of_the_best_and_the_worst_answer_is_made_of_a_prompt_and_ties_are_counted(tmp_path):
    alike = ultrafeedback([(3.0, 1), (3.0, 9)], "Name a gas.")
    rows = read(tmp_path, ultrafeedback(), alike, ultrafeedback(instruction="Name a tree."))
    assert told(rows) == [("answer 1", "answer 3", 3.5)] * 2
    assert [pair.prompt[0].content for pair in rows.pairs] == ["Name a metal.", "Name a tree."]
    assert rows.report.notes[0].endswith(
        "a.jsonl: 3 prompts with rated answers: 2 pairs of the best and the worst by fine-grained_score "
        "(more is better), 1 tie left out"
    )
    assert "not used in training: source, models, correct_answers, incorrect_answers;" in rows.report.notes[1]
    with pytest.raises(UserError, match="1 tie left out: no pair to train on"):
        read(tmp_path, alike)


def test_all_pairs_of_different_ratings_may_be_made_and_the_rating_named(tmp_path):
    rows = read(tmp_path, ultrafeedback([(1, 2), (2, 2), (1, 5)]), rated="all")
    assert told(rows) == [("answer 1", "answer 0", 1), ("answer 1", "answer 2", 1)]
    assert "2 pairs of all that are rated differently by fine-grained_score (more is" in rows.report.notes[0]
    assert told(read(tmp_path, ultrafeedback(), rating="overall_score")) == [("answer 0", "answer 3", 9)]
    by_aspect = read(tmp_path, ultrafeedback(), rating="+annotations.helpfulness.Rating")
    assert told(by_aspect) == [("answer 1", "answer 3", 3.5)]
    with pytest.raises(UserError, match=r"rates it: depth \(data\.rating\) is none"):
        read(tmp_path, ultrafeedback(), rating="depth")
    with pytest.raises(UserError, match=r"\+critique \(data\.rating\) has no numbers; the numbers there are .*score"):
        read(tmp_path, ultrafeedback(), rating="+critique")
    partly = {
        "prompt": "Q?",
        "answers": [{"text": text, "cost": cost} for text, cost in zip("abc", (1, "N/A", 3), strict=True)],
    }
    assert told(read(tmp_path, partly, rating="-cost")) == [("a", "c", 2)]


def test_without_a_rating_of_its_own_the_mean_of_the_aspects_rates_an_answer(tmp_path):
    row = ultrafeedback()
    for answer, second in zip(row["completions"], (5, 1, 1, "N/A"), strict=True):
        del answer["fine-grained_score"], answer["overall_score"]
        answer["annotations"]["honesty"]["Rating"] = second
    assert told(read(tmp_path, row)) == [("answer 0", "answer 3", 2.5)]


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ({"prompt": "Q?", "responses": ["a", "b", "c"], "ranks": [2, 1, 3]}, ("b", "c", 2)),
        (
            {"question": "Q?", "generations": ["a", "b", "c"], "scores": [0, 0.5, -1], "models": list("xyz")},
            ("b", "c", 1.5),
        ),
        ({"prompt": "Q?", "responses": ["a", "b", "c"], "ranks": [3, 1, 2]}, ("b", "a", 2)),
        ({"prompt": "Q?", "responses": ["a", "b", "c"], "ranking": [1, 0, 2]}, ("b", "c", 2)),
        ({"prompt": "Q?", "responses": ["a", "b", "c"], "ranking": [2, 2, 1]}, ("c", "a", 1)),
        ({"prompt": "Q?", "ranked_responses": ["a", "b", "c"]}, ("a", "c", 2)),
        ({"prompt": "Q?", "items": [{"content": "a", "rank": 2}, {"content": "b", "rank": 1}]}, ("b", "a", 1)),
        ({"prompt": "Q?", "candidates": ["a", "b"], "rating": ["4", "5"], "n_tokens": [9, 1]}, ("b", "a", 1)),
        (
            {"prompt": "Q?", "generation_model": ["x", "y"], "generations": ["a", "b"], "generation_scores": [1, 3]},
            ("b", "a", 2),
        ),
        (
            {"prompt": "Q?", "answers": [{"answer_id": 7, "text": "a", "score": 1}, {"text": "b", "score": 3}]},
            ("b", "a", 2),
        ),
        (
            {"prompt": "Q?", "answers": [{"answer": "a", "rank": 2.0}, {"answer": "b", "rank": 1.0}], "turns": 1},
            ("b", "a", 1),
        ),
        (
            {
                "instruction": "Q?",
                "input": "x",
                "outputs": [{"output": "a", "reward": 0}, {"output": "b", "reward": -1}],
            },
            ("a", "b", 1),
        ),
        (
            {
                "prompt": [{"role": "user", "content": "Q?"}],
                "k": [{"text": "a", "score": 1}, {"text": "b", "score": None}, {"text": "c", "score": 0}],
            },
            ("a", "c", 1),
        ),
    ],
)
def test_lists_of_answers_with_ratings_or_places_are_read(tmp_path, row, pair):
    rows = read(tmp_path, row)
    assert told(rows) == [pair]
    assert rows.pairs[0].prompt[0].content == ("Q?\nx" if "input" in row else "Q?")
    file = tmp_path / "b.jsonl"
    convert.write(convert.convert([tmp_path / "a.jsonl"]).rows, file)
    assert told(formats.read([file])) == [pair]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        *(
            (
                {"responses": ["a", "b", "c"], "ranking": ranking},
                "'ranking' may hold the place of each answer, or the answers by",
            )
            for ranking in ([2, 0, 1], [3, 1, 2])
        ),
        ({"responses": ["a", "b"], "rating": [1, 2], "reward": [2, 1]}, "rating, reward may each be the rating"),
        (
            {"answers": ["a", "b"], "texts": ["c", "d"], "scores": [2, 1]},
            "lists of answers under 'answers' and 'texts'",
        ),
        (
            {"badly_ranked_responses": ["a b", "c d"]},
            "'badly_ranked_responses' is not used in training|unknown columns",
        ),
        (
            {"answers": [{"text": "a", "model": "x"}, {"text": "b", "model": "y"}]},
            "no number beside each answer rates it",
        ),
        (
            {"answers": [{"text": text, "answer_id": n, "pm_score": n} for n, text in enumerate("ab")]},
            r"rates it: .*; 'pm_score' does not say whether more",
        ),
        (
            {"answers": [{"text": "a", "score": 1}, {"text": "b", "score": None}]},
            "fewer than two answers with a rating",
        ),
        ({"responses": ["a", "b"], "scores": [1, float("inf")]}, "'scores' is inf; a rating must be a finite number"),
        ({"responses": ["a", "b"], "scores": [1, float("nan")]}, "fewer than two answers with a rating"),
        (
            {"answers": [{"text": "a", "latency": 0.9}, {"text": "b", "latency": 0.2}]},
            r"'latency' does not say whether more of it is better: --set data.rating=\+latency if it is, data.rating=-",
        ),
        (
            {"answers": [{"text": "a", "score": 1}, {"text": "b", "score": 2, "trainable": False}]},
            r"'answers\[2\].trainable' is False; take the answer out, or --ignore trainable",
        ),
        ({"responses": ["a", "b"], "scores": [1, 2], "context": "A text."}, "texts under 'prompt' and 'context'"),
        ({"responses": ["a b", "c"], "chosen": 1}, "'chosen' may count its answers from 0 or from 1: write 'ranks'"),
        ({"responses": ["a", "b"], "scores": [1, 2], "source": "guten Tag"}, "'source' is not used in training"),
        ({"responses": ["a", "b"], "scores": [1, 2], "passage": "word"}, "'passage' would be lost"),
        (
            {"responses": ["a", "b"], "scores": [1, 2], "earlier": [{"role": "user", "content": "Hi."}]},
            "'earlier' is not used in training",
        ),
        ({"responses": ["a", "b"], "scores": [1, 2], "trainable": False}, "no answer"),
    ],
)
def test_what_is_not_clear_or_would_be_lost_is_refused(tmp_path, row, reason):
    if reason == "no answer":
        assert read(tmp_path, {"prompt": "Q?"} | row).report.counts()["untrained"] == 1
    else:
        with pytest.raises(UserError, match=rf"a\.jsonl:1: .*{reason}"):
            read(tmp_path, {"prompt": "Q?"} | row)


def test_a_ranking_from_0_is_the_place_of_each_answer_where_it_is_named_so(tmp_path):
    row = {"prompt": "Q?", "responses": ["a", "b", "c"], "ranking": [2, 0, 1]}
    assert told(read(tmp_path, row, rating="ranking")) == [("b", "a", 2)]


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_number_whose_name_leaves_open_which_answer_is_better_rates_where_its_sign_is_named(tmp_path, name):
    outer, dot, inner = name.partition(".")
    answers = [{"text": text, outer: {inner: n} if dot else n} for text, n in (("a", 1), ("b", 3))]
    row = {"prompt": "Q?", "answers": answers}
    lists = {"prompt": "Q?", "responses": ["a", "b"], name: [1, 3]}
    for unclear in (row, lists):
        for rating in (None, name):
            with pytest.raises(UserError, match=rf"a\.jsonl:1: .*'{name}' does not say whether more of it is better"):
                read(tmp_path, unclear, rating=rating)
        assert told(read(tmp_path, unclear, rating=f"-{name}")) == [("a", "b", 2)]
        more = read(tmp_path, unclear, rating=f"+{name}")
        assert told(more) == [("b", "a", 2)] and f"by {name} (more is better)" in more.report.notes[0]


@given(word=st.from_regex(r"[a-z]{2,12}", fullmatch=True), name=st.sampled_from(("score", "ratings", "reward", "rank")))
def test_one_more_word_makes_a_rating_unclear(word, name):
    known = word in ("avg", "overall") or f"{word} {name}" == "fine grained score"
    for names in (f"{word}_{name}", f"{name}_{word}", f"{word}.{name}", name + word.capitalize()):
        assert known or (sign_of(names) is None and sign_of(name) is not None)


def test_rated_answers_are_prompts_alone_where_that_kind_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "Q?", "responses": ["a", "b"], "scores": [1, 2]}))
    assert len(formats.read([tmp_path / "a.jsonl"], kind="prompt").bare_prompts) == 1


def test_columns_of_a_set_of_the_hub_have_the_names_that_the_recipe_gives_them(tmp_path, monkeypatch):
    """OpenOrca has `system_prompt`, `question` and `response`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    Path("orca").mkdir()
    row = {"id": "flan.1", "system_prompt": "Be brief.", "question": "Q?", "response": "Yes.", "topic": "of old"}
    Path("orca/train.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"system_prompt": ""}) + "\n")
    preparation = Preparation({"question": "prompt", "system_prompt": "system"}, ["topic"])
    read = formats.read_hub("orca", COMMIT, preparation=preparation)
    assert [[turn.role for turn in example.prompt] for example in read.examples] == [["system", "user"], ["user"]]
    first = read.report.files[0].sha256
    assert first == formats.read_hub("orca", COMMIT, preparation=preparation).report.files[0].sha256
    with pytest.raises(UserError, match=r"orca/train:row 1: no column 'q' to rename \(data\.rename\); the row has"):
        formats.read_hub("orca", COMMIT, preparation=Preparation({"q": "prompt"}))
    with pytest.raises(UserError, match=r"--set data\.rename\.problem=prompt"):
        formats.read_hub("orca", COMMIT)


def test_a_recipe_renames_two_columns_to_two_names():
    keys = {"source": "files", "files": ["a.jsonl"], "on_bad_row": "stop", "heldout_fraction": 0.1}
    data = Data.model_validate(keys | {"rename": {"a": "prompt", "b": "chosen"}, "ignore": ["topic"]})
    assert data.own_keys() == ["rename", "ignore"]
    with pytest.raises(ValueError, match="rename is set, but source is toy, which makes its own rows; remove it"):
        toy = {"documents": 9, "pairs": 9, "bayes_accuracy": 0.7}
        Data.model_validate(keys | {"source": "toy", "files": [], "toy": toy, "rename": {"a": "b"}})
    with pytest.raises(ValueError, match="rename gives two columns the same name"):
        Data.model_validate(keys | {"rename": {"a": "prompt", "b": "prompt"}})


def test_the_commands_say_how_pairs_were_made_and_what_was_not_used(tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(ultrafeedback(instruction=f"Name metal {n}.")) + "\n" for n in range(3)))
    for words in (("check",), ("show",), ("convert", "--to", tmp_path / "b.jsonl")):
        code, out, err = rlhf(monkeypatch, capsys, "data", words[0], file, *words[1:], "--ignore", "source,models")
        text = " ".join(out.split())
        assert code in (0, 3) and "3 pairs of the best and the worst by fine-grained_score (more is" in text, err
        assert "not used in training: correct_answers, incorrect_answers;" in text
