"""`rlhf ratings export`: what raters preferred, as rows that training and the data check read back."""

import json

import pytest

from rlhf.data import formats
from rlhf.data.rows import Message
from rlhf.data.split import conversation_key, is_heldout
from rlhf.data.transcripts import render_hh
from rlhf.errors import UserError
from rlhf.rating import export, store
from rlhf.rating.pairs import PairedAnswers, pair_answers
from tests.e2e.evaluations import evaluation, row
from tests.helpers import rlhf
from tests.records import write_records


def rate(root, *choices: tuple[str, int, store.Choice]) -> PairedAnswers:
    """Append (rater, item, choice) in turn."""
    answers = pair_answers(root)
    pairs = {pair.item: pair for pair in answers.pairs}
    for rater, item, choice in choices:
        store.append(answers.file, store.new_line(pairs[item], rater, choice, "ab"))
    return answers


def exported(root, answers: PairedAnswers, **options) -> export.ExportedRows:
    return export.export(answers, root / "evaluate" / "samples.jsonl", "hh", **options)


@pytest.fixture
def root(tmp_path):
    return evaluation(tmp_path, [row(i, sft=f"poor {i}", ppo=f"good {i}") for i in range(8)])


def test_one_rater(root):
    answers = rate(root, ("ann", 0, "b"), ("ann", 1, "a"), ("ann", 2, "tie"), ("ann", 3, "skip"), ("ann", 4, "b"))
    rate(root, ("ann", 4, "undo"))
    result = exported(root, answers)
    assert [(r["chosen"], r["rejected"]) for r in result.rows] == [("good 0", "poor 0"), ("poor 1", "good 1")]
    assert (result.rated, result.ties, result.empty) == (3, 1, 0)
    assert result.rows[1]["chosen_from"] == "sft" and result.rows[1]["ratings"] == {"ann": "sft"}
    both = exported(root, answers, keep_ties=True).rows[2:]
    assert [(r["chosen"], r["rejected"]) for r in both] == [("good 2", "poor 2"), ("poor 2", "good 2")]


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ("b", "b"),
        ("bba", "b"),
        ("aab", "a"),
        ("ba", "tie"),
        ("bt", "tie"),
        ("bbat", "tie"),
        ("bbbat", "b"),
        ("t", "tie"),
    ],
)
def test_the_majority_is_more_than_half_of_the_votes(choices, expected):
    assert export.majority([{"t": "tie"}.get(letter, letter) for letter in choices]) == expected


def test_several_raters_and_a_choice_of_them(root):
    judge = "judge:model"
    answers = rate(root, ("ann", 0, "b"), ("ben", 0, "b"), (judge, 0, "a"), ("ann", 1, "b"), (judge, 1, "a"))
    result = exported(root, answers)
    assert [r["chosen"] for r in result.rows] == ["good 0"] and result.ties == 1
    assert result.rows[0]["ratings"] == {"ann": "ppo", "ben": "ppo", judge: "sft"}
    assert [r["chosen"] for r in exported(root, answers, raters=[judge]).rows] == ["poor 0", "poor 1"]
    with pytest.raises(UserError, match=r"no ratings of 'eve'; it has those of ann, ben, judge:model"):
        exported(root, answers, raters=["eve"])


def test_ratings_of_other_answers_are_no_rows(root):
    rate(root, ("ann", 0, "b"), ("ann", 1, "b"))
    evaluation(root.parents[1], [row(0, ppo="new"), *(row(i, f"poor {i}", f"good {i}") for i in range(1, 8))])
    assert [r["chosen"] for r in exported(root, pair_answers(root)).rows] == ["good 1"]


def test_the_file_is_read_back_as_the_pairs_that_were_rated(tmp_path, monkeypatch, capsys):
    """Several turns, a system message, quotes and other scripts come back to the letter, also for `rlhf data check`."""
    prompts = [
        "\n\nHuman: One?\n\nAssistant:",
        'Be brief.\n\nHuman: Two?\n\nAssistant: Yes.\n\nHuman: Why, "then"?\n\nAssistant:',
        "\n\nHuman: Drei — 三?\n\nAssistant:",
    ]
    rows = [row(i, f"poor  {i}\n- é", f"good {i} 三 \u2028 end") | {"prompt": p} for i, p in enumerate(prompts)]
    rows.append(row(3, sft="", ppo="good"))
    root = evaluation(tmp_path, rows)
    write_records(root / "evaluate", {"seed": 5})
    rate(root, *(("ann", i, "b") for i in range(4)))
    file = tmp_path / "rated.jsonl"
    arguments = ("ratings", "export", root, "--to", file)
    code, out, err = rlhf(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert "3 preference rows of 4 rated pairs; 0 ties left out, 1 with an empty answer" in " ".join(out.split())
    assert "held out with seed 5" in err
    pairs = formats.read([file]).pairs
    assert [pair.chosen for pair in pairs] == [r["ppo"]["response"] for r in rows[:3]]
    assert [pair.rejected for pair in pairs] == [r["sft"]["response"] for r in rows[:3]]
    assert [render_hh(pair.prompt) for pair in pairs] == prompts
    assert pairs[1].prompt[0] == Message("system", "Be brief.") and len(pairs[1].prompt) == 4
    code, out, _ = rlhf(monkeypatch, capsys, "data", "check", file, "--json")
    assert code == 0 and json.loads(out)["pairs"] == 3 and json.loads(out)["malformed"] == 0


def test_held_out_prompts_stay_held_out_with_the_seed_that_held_them_out():
    """What the note of the command says: with another seed most of them are for training."""
    keys = [conversation_key((Message("user", f"question {i}"),)) for i in range(2000)]
    heldout = [key for key in keys if is_heldout(key, 5, 0.1)]
    assert len(heldout) > 100 and sum(is_heldout(key, 6, 0.1) for key in heldout) < len(heldout) / 3


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_prompts_in_another_template_need_their_messages(tmp_path, template):
    root = evaluation(tmp_path, [row(0) | {"prompt": "<s>[INST] One? [/INST]"}])
    answers = rate(root, ("ann", 0, "b"))
    samples = root / "evaluate" / "samples.jsonl"
    with pytest.raises(UserError, match=f"cannot be read back; they have template: {template}; evaluate again"):
        export.export(answers, samples, template)
    messages = [{"role": "user", "content": "One?"}]
    evaluation(tmp_path, [row(0) | {"prompt": "<s>[INST] One? [/INST]", "messages": messages}])
    assert export.export(pair_answers(root), samples, template).rows[0]["prompt"] == messages


@pytest.mark.parametrize(
    ("choices", "message"),
    [([], "no ratings yet; `rlhf ab` and"), ([("ann", 0, "tie")], "nothing to export of 1 rated pair; 1 tie left")],
)
def test_nothing_to_export_is_one_line(root, monkeypatch, capsys, choices, message):
    rate(root, *choices)
    to = root.parents[1] / "rated.jsonl"
    code, _, err = rlhf(monkeypatch, capsys, "ratings", "export", root, "--to", to)
    *told, last = err.splitlines()
    assert code == 1 and message in last and not to.exists()
    assert len(told) <= 1 and all("was edited since" in line for line in told), "the run's records are made up"


def test_a_last_rating_without_its_line_s_end_is_kept_and_a_cut_one_is_not(root):
    """An editor may leave it out, where a line was taken out by hand; a crash cuts a line off in the middle."""
    answers = rate(root, ("ann", 0, "a"), ("ann", 1, "b"), ("ann", 2, "a"))
    whole = answers.file.read_bytes()
    answers.file.write_bytes(whole.rstrip(b"\n"))
    assert len(store.current_ratings(answers.file)) == 3
    again = store.new_line(answers.pairs[3], "ann", "b", "ab")
    store.append(answers.file, again)
    assert [rating.choice for rating in store.current_ratings(answers.file)] == ["a", "b", "a", "b"]
    answers.file.write_bytes(whole[:-9])
    assert len(store.current_ratings(answers.file)) == 2
    store.append(answers.file, again)
    assert [rating.choice for rating in store.current_ratings(answers.file)] == ["a", "b", "b"]
