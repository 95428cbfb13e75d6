"""Each flaw is found in the row that has it, and dropped by its name."""

import json
import time
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.formats import ParsedRows, ReadReport, read
from rlhf.data.quality import flaws
from rlhf.data.quality.check import check
from rlhf.data.quality.flaws import FLAWS, nearly_identical
from rlhf.data.quality.report import QualityReport
from rlhf.data.quality.template_marks import templated
from rlhf.data.rows import LEFT_OUT, Document, Example, Message, PreferencePair
from rlhf.recipe.schema_data import Flaw
from tests.unit.published_templates import BY_BRACKETS, PUBLISHED
from tests.unit.rows import pair_of_one_turn

CUT = "You could begin with a walk along the river in the morning, before it gets too hot for that, and then you"
PLANTED = {
    "near_identical": ("Tell me.", " ".join(map(str, range(40))) + ".", " ".join(map(str, range(39))) + "."),
    "one_word": ("Tell me.", "Yes.", "It is not."),
    "repeats_prompt": ("What is the time?", "What is the  time? It is noon.", "What is the time?\nI am not told."),
    "unfinished": ("Tell me.", CUT, "It is not."),
    "other_script": ("Tell me.", "Это так.", "It is not."),
    "replaced": ("Tell me.", "It\ufffds so.", "It is not."),
    "mojibake": ("Tell me.", "Itâ€™s so.", "It is not."),
    "control": ("Tell\x00 me.", "It is so.", "It is not."),
    "invisible": ("Tell me.", "It is\u200b so.", "It is not."),
    "templated": ("<|im_start|>user\nTell me.<|im_end|>\n<|im_start|>assistant\n", "It is so.", "It is not."),
    "html": ("Tell me.", "It is so.<br>", "It is not."),
}


def clean(n: int = 30) -> list[PreferencePair]:
    return [pair_of_one_turn(f"Question {i}?", f"It is {i}.", f"It is not {i}.") for i in range(n)]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_flaw_is_found_and_no_other(name):
    planted = pair_of_one_turn(*PLANTED[name])
    found = {flaw: find([*clean(), planted]) for flaw, find in FLAWS.items()}
    assert {flaw: rows for flaw, rows in found.items() if rows} == {name: [planted]}


def test_a_repeat_is_a_duplicate_and_opposite_labels_contradict():
    one, again, opposite = (
        pair_of_one_turn("Q?", "A b.", "C d."),
        pair_of_one_turn("Q?", "A b.", "C d."),
        pair_of_one_turn("Q?", "C d.", "A b."),
    )
    rows = [*clean(), one, again, opposite]
    assert [id(row) for row in FLAWS["duplicates"](rows)] == [id(again)]
    assert [id(row) for row in FLAWS["contradictory"](rows)] == [id(one), id(again), id(opposite)]
    documents = [Document("a", "a:1"), Document("a", "a:2"), Document("b", "a:3")]
    assert FLAWS["duplicates"](documents) == documents[1:2]
    question = (Message("user", "2 + 2?"),)
    answers = [Example(question, "4", "a", right_answer=right) for right in ("4", "5", "4")]
    assert FLAWS["duplicates"](answers) == answers[2:], "another right answer is another row"
    assert FLAWS["further_answers"]([*clean(), *answers]) == answers[1:2]
    parsed = ParsedRows(tuple(answers), ReadReport((), (), {}))
    assert [row.right_answer for row in flaws.drop(parsed, ["further_answers"])[0].examples] == ["4", "4"]


def test_scores_that_say_nothing_or_the_opposite_are_found_and_dropped():
    right, equal, opposite = (
        replace(pair_of_one_turn(f"Which of {margin}?", "It is this.", "It is that."), margin=margin)
        for margin in (0.5, 0.0, -1.5)
    )
    rows = ParsedRows((*clean(), right, equal, opposite), ReadReport((), (), dict.fromkeys(LEFT_OUT, ())))
    found = {flaw: find(rows.rows) for flaw, find in FLAWS.items()}
    assert {flaw: flawed for flaw, flawed in found.items() if flawed} == {"tied": [equal], "inverted": [opposite]}
    kept, counts = flaws.drop(rows, ["tied", "inverted"])
    assert kept.pairs == (*clean(), right) and counts == {"tied": 1, "inverted": 1}
    findings = {line.name: line.severity for line in check(rows).findings()}
    assert (findings["tied"], findings["inverted"]) == ("warning", "warning")


@pytest.mark.parametrize(
    "text",
    [
        "It is so.<|im_end|>",
        "<|start_header_id|>user<|end_header_id|>\n\nTell me.<|eot_id|>",
        "[INST] Tell me. [/INST]",
        "<<SYS>>Be brief.<</SYS>> Tell me.",
        "<start_of_turn>user\nTell me.<end_of_turn>",
        "<|user|>\nTell me.\n<|assistant|>\n",
        "<｜User｜>Tell me.<｜Assistant｜>",
        "Below is one.\n\n### Instruction:\nTell me.\n\n### Response:\n",
        "### Human: Tell me.### Assistant: It is so.",
        "<s> Tell me.",
        "It is so. </s>",
    ],
)
def test_marks_of_a_chat_template_are_seen(text):
    assert templated(text)
    assert FLAWS["templated"]([Document(text, "a:1")]) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_published_template_writes_is_seen(name):
    template = PUBLISHED[name]
    asked = template.user.format("Name a bird.") + template.generation
    answered = template.user.format("Name a bird.") + template.answer.format("An owl.")
    systems = [template.system.format("Be brief.")] if template.system else []
    assert all(map(templated, [asked, answered, *(system + asked for system in systems)]))
    if name in BY_BRACKETS:
        assert templated(template.answer.format("An owl.")) and not templated(f"Write\n```\n{asked}\n```\nfirst.")


@pytest.mark.parametrize(
    "text",
    [
        "It ends with `<|im_end|>`, as in ```\n<|im_start|>user\n```",
        "It was <s>ten</s> five.",
        "<s>Ten</s> five.",
        "### Response:\nIt is so.",
        "See [1] and a < b | c > d. F# has 1 |> f <| 2.",
        "The end | user | assistant",
        "### Instructions:\nMix both.",
        "E[|X|] is the mean of |X|; OCaml has [|1; 2|] and [|x|], Haskell f <|> g and <$>.",
        "The log says User: hi, and then Assistant: hello.",
        "[INSTRUCTIONS] <bot> <user> </user> [system]",
    ],
)
def test_ordinary_text_is_not_taken_for_a_template(text):
    assert not templated(text)


def test_every_flaw_is_counted_in_the_report_and_can_be_dropped():
    assert {*FLAWS, "leaked"} == set(get_args(Flaw))
    assert set(get_args(Flaw)) <= set(QualityReport.__dataclass_fields__)


def test_drop_counts_each_row_for_the_first_reason():
    both = pair_of_one_turn("Tell me.", "Yes<br>", "It is not.")  # one word, and HTML
    rows = ParsedRows(
        (Document("<p>a</p>", "a:1"), Example((Message("user", "Q?"),), "Yes.", "a:2"), *clean(3), both),
        ReadReport((), (), {}),
    )
    kept, counts = flaws.drop(rows, ["one_word", "html"])
    assert counts == {"one_word": 2, "html": 1}
    assert (kept.documents, kept.examples, list(kept.pairs)) == ((), (), clean(3))
    assert flaws.drop(rows, ["html", "one_word"])[1] == {"html": 2, "one_word": 1}
    assert flaws.drop(rows, []) == (rows, {})


words = st.lists(st.sampled_from("abcde"), max_size=45)
EDITS = st.lists(st.tuples(st.integers(0, 44), st.sampled_from(["", "a", "a b"])), max_size=4)


@given(words, EDITS)
def test_near_copies_agree_with_a_plain_longest_common_subsequence(a, edits):
    """Copies in which a few words are left out, replaced or added, on both sides of the limit."""
    b = list(a)
    for at, text in edits:
        b[at : at + 1] = text.split()
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    assert nearly_identical(a, b) == (40 * table[-1][-1] >= 19 * (len(a) + len(b)))  # 0.95 in whole numbers


def test_answers_that_repeat_themselves_take_no_time():
    a, b = ["the", "cat", "sat"] * 500, ["the", "sat", "cat"] * 500
    began = time.process_time()
    assert not any(nearly_identical(a, b) for _ in range(20))
    assert time.process_time() - began < 2


@pytest.mark.parametrize(("echoes", "said"), [(10, False), (11, True)])
def test_a_file_whose_answers_begin_with_their_prompts_is_told_so_before_it_trains(tmp_path, echoes, said):
    asked = [f"What is the colour of item {i}?" for i in range(20)]
    answers = [f"{asked[i]} It is shade {i}." if i < echoes else f"Shade {i}." for i in range(20)]
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": q, "completion": a}) + "\n" for q, a in zip(asked, answers, strict=True))
    )
    notes = read([file]).report.notes
    assert any("begin with their prompt" in note and f"{echoes} of 20" in note for note in notes) == said
