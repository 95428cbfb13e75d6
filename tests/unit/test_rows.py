"""Rows of files: TRL's types, named sets and functions of one's own are read as they say; all else is refused."""

import csv
import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.data import formats
from rlhf.data.formats import ParsedRows, settings_of
from rlhf.data.rows import Document, Example, Message, PreferencePair, PromptOnly, of_kind
from rlhf.errors import UserError
from rlhf.recipe import parse_overrides
from tests.helpers import one_line_of

ASKED = (Message("user", "What is 2 + 2?"),)
USER = {"role": "user", "content": "What is 2 + 2?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "5"))
THANKS, BYE = {"role": "user", "content": "Thanks!"}, {"role": "assistant", "content": "Bye."}
TRANSCRIPT = "\n\nHuman: What is 2 + 2?\n\nAssistant: "
SHARED = [{"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "4"}]
Rows = Sequence[dict[str, Any]]


def read(folder: Path, rows: Rows | str | bytes, *changes: str, name: str = "rows.jsonl") -> ParsedRows:
    file = folder / name
    text = rows if isinstance(rows, str | bytes) else "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return formats.read([file], settings_of([file], parse_overrides(changes)))


def pairs(found: ParsedRows) -> list[PreferencePair]:
    return of_kind(found.rows, PreferencePair)


def refusal(folder: Path, rows: Rows | str | bytes, *changes: str, name: str = "rows.jsonl") -> str:
    with pytest.raises(UserError) as caught:
        read(folder, rows, *changes, name=name)
    return one_line_of(caught)


EXAMPLE, PAIR = Example(ASKED, "4", ""), PreferencePair(ASKED, "4", "5", "")


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ({"text": "Two and two."}, "text", Document("Two and two.", "")),
        ({"messages": [USER, FOUR]}, "messages", EXAMPLE),
        ({"prompt": "What is 2 + 2?"}, "prompt_only", PromptOnly(ASKED, "")),
        ({"prompt": [USER], "answer": 4.0}, "prompt_only", PromptOnly(ASKED, "", "4")),
        ({"prompt": "What is 2 + 2?", "completion": " 4\n"}, "prompt_completion", EXAMPLE),
        ({"prompt": [USER], "completion": [FOUR], "answer": "4"}, "prompt_completion", Example(ASKED, "4", "", "4")),
        (
            {"prompt": "What is 2 + 2?", "completion": "4", "label": True},
            "unpaired_preference",
            Example(ASKED, "4", "", None, True),
        ),
        ({"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5"}, "preference", PAIR),
        ({"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}, "preference", PAIR),
        ({"chosen": [USER, FOUR], "rejected": [USER, FIVE]}, "preference", PAIR),
        (  # as UltraFeedback binarized: a text, and both whole conversations
            {"prompt": "What is 2 + 2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE], "score_chosen": 8.0}
            | {"score_rejected": "5"},
            "preference",
            PreferencePair(ASKED, "4", "5", "", 3.0),
        ),
        (
            {"prompt": [USER], "completion": [FOUR], "system": "Be brief."},
            "prompt_completion",
            Example((Message("system", "Be brief."), *ASKED), "4", ""),
        ),
        ({"chosen": TRANSCRIPT + "4", "rejected": TRANSCRIPT + "5"}, "hh", PAIR),
        (
            {"instruction": "What is", "input": "2 + 2?", "output": "4"},
            "alpaca",
            Example((Message("user", "What is\n2 + 2?"),), "4", ""),
        ),
        ({"conversations": SHARED}, "sharegpt", EXAMPLE),
        ({"question": "What is 2 + 2?", "answer": 4}, "gsm8k", Example(ASKED, "4", "", "4")),
        (
            {
                "instruction": "What is 2 + 2?",
                "completions": [
                    {
                        "response": text,
                        "annotations": {"a": {"Rating": r}, "b": {"Rating": "N/A"}, "c": {"Rating": "3"}},
                    }
                    for text, r in (("nine", "2"), ("5", "1"), ("4", "5"))
                ],
            },
            "ultrafeedback",
            PreferencePair(ASKED, "4", "5", "", 2.0),
        ),
        (
            {"instruction": "What is 2 + 2?", "generations": ["5", "4", "nine"], "ratings": [1, 5, None]},
            "distilabel",
            PreferencePair(ASKED, "4", "5", "", 4.0),
        ),
        (
            {"instruction": "What is 2 + 2?", "generation-1": "5", "generation-2": "4"}
            | {"preference.responses": ["generation-2", "generation-1", "generation-2"]},
            "argilla",
            PAIR,
        ),
        (
            {"context": [USER], "response1": "4", "response2": "5", "overall_preference": -2},
            "helpsteer3",
            PreferencePair(ASKED, "4", "5", "", 2.0),
        ),
        ({"conversation_a": [USER, FIVE], "conversation_b": [USER, FOUR], "winner": "model_b"}, "arena", PAIR),
        (
            {"system_prompt": "Be brief.", "question": "What is 2 + 2?", "response": "4"},
            "openorca",
            Example((Message("system", "Be brief."), *ASKED), "4", ""),
        ),
    ],
)
def test_rows_are_told_by_their_columns_and_mean_what_their_type_says(tmp_path, row, kind, expected):
    for shown in (row, {name.upper(): value for name, value in row.items()}):  # the case of a column does not matter
        found = read(tmp_path, [shown | {"annotator": "anna"}])
        assert [str(tmp_path / "rows.jsonl:1")] == [row.source for row in found.rows]
        (made,) = found.rows
        assert made == replace(expected, source=made.source)
        assert getattr(made, "columns", {"annotator": "anna"}) == {"annotator": "anna"}
        assert found.files[0].kind == kind
        assert any(f"rows of {kind}" in note for note in found.notes)
    named = read(tmp_path, [row], f"data.format={kind}")
    assert len(named.rows) == 1 and not any(f"rows of {kind}" in note for note in named.notes)


PAIRS = [{"prompt": f"Q{n}?", "chosen": "Yes, it is.", "rejected": "No."} for n in range(3)]
CODE = {"test_cases": ["f(1) == 2"], "solution": "def f(x): return x + 1"}


@pytest.mark.parametrize(
    ("rows", "type_", "beside"),
    [
        (
            [row | {"id": 1, "annotator": "anna", "created_at": "2025-03-01"} for row in PAIRS],
            PreferencePair,
            ["id", "annotator", "created_at"],
        ),
        (PAIRS, PreferencePair, []),
        ([{"chosen": [USER, FOUR], "rejected": [USER, FIVE]}], PreferencePair, []),
        (
            [
                {
                    "prompt": USER["content"],
                    "prompt_id": "da4d",
                    "chosen": [USER, FOUR],
                    "rejected": [USER, FIVE],
                    "messages": [USER, FOUR],
                    "score_chosen": 8.0,
                    "score_rejected": 5.0,
                }
            ],
            PreferencePair,
            ["prompt_id", "messages"],
        ),
        (
            [
                {
                    "instruction": "Q?",
                    "generations": ["a", "b"],
                    "ratings": [1, 5],
                    "model_name": "m",
                    "rationales": ["r"],
                    "distilabel_metadata": {"raw_output": "r"},
                }
            ],
            PreferencePair,
            ["model_name", "rationales", "distilabel_metadata"],
        ),
        (
            [
                {
                    "id": "0e",
                    "status": "completed",
                    "_server_id": "c1",
                    "instruction": "Q?",
                    "generation-1": "a",
                    "generation-2": "b",
                    "preference.responses": ["generation-1"],
                    "metadata": {"length": 4},
                }
            ],
            PreferencePair,
            ["id", "status", "_server_id", "metadata"],
        ),
        (
            [{"messages": [USER, FOUR, THANKS, BYE], "metadata": {"lang": "en", "tags": ["tech"]}}],
            Example,
            ["metadata"],
        ),
        (
            [{"prompt": "Q?", "completion": "a", "label": True, "user_id": "u", "timestamp": 17, "model": "v1"}],
            Example,
            ["user_id", "timestamp", "model"],
        ),
        (
            [{"question": "Q?", "answer": "-30", "difficulty": "easy", "topic": "sums"}],
            Example,
            ["difficulty", "topic"],
        ),
        ([{"id": "x", "model": "gpt", "conversations": SHARED}], Example, ["id", "model"]),
        ("instruction,input,output,category\nSay a,,a,words\n", Example, ["category"]),
        ('\ufeffPrompt;Chosen;Rejected\r\nQ?;"Yes,\r\nit is.";No.\r\n', PreferencePair, []),
        ([{"prompt": "Write f."} | CODE], PromptOnly, ["test_cases", "solution"]),
    ],
    ids=[
        "pairs with columns",
        "explicit",
        "implicit",
        "ultrafeedback",
        "distilabel",
        "argilla",
        "chat",
        "kto",
        "grpo",
        "sharegpt",
        "alpaca csv",
        "excel",
        "code",
    ],
)
def test_files_as_people_have_them_are_read_at_the_first_attempt(tmp_path, rows, type_, beside):
    found = read(tmp_path, rows, name="rows.csv" if isinstance(rows, str) else "rows.jsonl")
    assert found.rows and all(isinstance(row, type_) for row in found.rows)
    assert all(list(row.columns) == beside for row in found.rows if not isinstance(row, Document))
    notes = " ".join(found.notes)
    assert all(name in notes for name in beside)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"id": "0e", "fields": {"instruction": "Q?", "generation-1": "a"}, "responses": {}}], ["fields"]),
        ("prompt,completion,label\nQ?,a,thumbs_up\n", ["label", "thumbs_up", "data.labels"]),
        (
            [{"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]}],
            ["messages[2].tool_calls"],
        ),
    ],
    ids=["nested argilla", "thumbs", "tool calls"],
)
def test_three_kinds_of_files_are_refused_with_their_place(tmp_path, rows, named):
    name = "rows.csv" if isinstance(rows, str) else "rows.jsonl"
    message = refusal(tmp_path, rows, name=name)
    assert message.startswith(f"{tmp_path / name}:{2 if name == 'rows.csv' else 1}: ")
    assert all(word in message for word in named)


def test_what_was_refused_is_read_once_it_is_declared(tmp_path):
    thumbs = "prompt,completion,label\nQ?,a,Thumbs_Up\nQ?,b,thumbs_down\n"
    rows = read(tmp_path, thumbs, "data.labels.thumbs_up=true", "data.labels.thumbs_down=false", name="rows.csv").rows
    assert [row.good for row in rows if isinstance(row, Example)] == [True, False]
    weighted = [{"messages": [USER, FOUR | {"weight": 1, "id": "m1"}], "tools": ["calculator"]}]
    assert len(read(tmp_path, weighted, "data.ignore=[weight,id,tools]").rows) == 1
    odd = [{"ask": "What is 2 + 2?", "good": "4", "bad": "5", "prompt": "unused"}]
    changes = "data.columns.prompt=ask", "data.columns.chosen=good", "data.columns.rejected=bad"
    assert pairs(read(tmp_path, odd, *changes))[0].prompt == ASKED
    assert "'ask'" in refusal(tmp_path, [{"good": "4"}], *changes)


@pytest.mark.parametrize("name", ["tools", "images", "image", "videos", "audio", "documents"])
def test_six_columns_that_templates_read_refuse_their_row(tmp_path, name):
    row = {"prompt": "Q?", "chosen": "a", "rejected": "b"}
    assert f"'{name}'" in refusal(tmp_path, [row | {name: ["x"]}])
    assert len(read(tmp_path, [row | {name: None}, row | {name: []}]).rows) == 2


@pytest.mark.parametrize("field", ["tool_calls", "weight", "reasoning_content", "name", "whatever_comes_next"])
@pytest.mark.parametrize("value", [0, "x", [1], False])
def test_a_field_of_a_message_that_has_a_value_refuses_its_row(tmp_path, field, value):
    message = refusal(tmp_path, [{"messages": [USER, FOUR | {field: value}]}])
    assert f"messages[2].{field}" in message and f"data.ignore=[{field}]" in message
    assert len(read(tmp_path, [{"messages": [USER, FOUR | {field: None}]}]).rows) == 1


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([USER, {"role": "tool", "content": "4"}], "messages[2]"),
        ([USER, {"role": "assistant", "content": [{"type": "image", "url": "x"}]}], "messages[2].content[1]"),
        ([USER, FOUR, {"role": "system", "content": "Be brief."}, FOUR], "messages[3]"),
        ([USER, {"role": "assistant", "content": 4}], "messages[2].content"),
        ([USER, {"role": "assistant", "content": "\ud83d"}], "messages[2].content"),
        (["What is 2 + 2?"], "messages[1]"),
        ([USER], "messages"),
        ([FOUR], "messages"),
        ({"role": "user"}, "messages"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(tmp_path, messages, place):
    assert f"'{place}'" in refusal(tmp_path, [{"messages": messages}])


def test_parts_of_text_are_joined_and_turns_behind_the_last_answer_teach_nothing(tmp_path):
    parts = {"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "!"}]}
    (row,) = read(tmp_path, [{"messages": [USER, parts, THANKS]}]).rows
    assert isinstance(row, Example) and (row.prompt, row.response) == (ASKED, "4!")


@pytest.mark.parametrize(("turns", "earlier"), [("all", ["4"]), ("last", [])])
def test_every_answer_of_a_conversation_is_imitated_unless_the_last_alone_is_wanted(tmp_path, turns, earlier):
    (row,) = read(tmp_path, [{"messages": [USER, FOUR, THANKS, BYE]}], f"data.turns={turns}").rows
    assert isinstance(row, Example) and row.response == "Bye."
    assert [answer.response for answer in row.earlier()] == earlier
    assert [answer.prompt for answer in row.earlier()] == [ASKED for _ in earlier]
    (row,) = read(tmp_path, [{"prompt": [USER, FOUR, THANKS], "completion": [BYE]}]).rows
    assert isinstance(row, Example) and not row.earlier(), "what the prompt has is context"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Q?", "chosen": "a", "rejected": ""}, "empty"),
        ({"prompt": "Q?", "chosen": "a", "rejected": None}, "empty"),
        ({"prompt": "Q?", "chosen": "a  b", "rejected": "a\u00a0b "}, "identical"),
        ({"chosen": [USER, FOUR], "rejected": [THANKS, FOUR]}, "prompts_differ"),
        ({"prompt": "Q?", "completion": "\u200b"}, "empty"),
        ({"instruction": "Q?", "generations": ["a", "b"], "ratings": [3, 3]}, "not_made"),
        ({"conversation_a": [USER, FOUR], "conversation_b": [USER, FIVE], "winner": "tie"}, "not_made"),
    ],
)
def test_rows_that_can_teach_nothing_are_left_out_and_counted(tmp_path, row, reason):
    found = read(tmp_path, [row])
    assert not found.rows and found.counts()[reason] == 1
    assert [source for _, source, _ in found.left_out] == [str(tmp_path / "rows.jsonl:1")]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"prompt": "Q?", "completion": "a", "label": "billing"}], ["'label'", "billing"]),
        ([{"prompt": "Q?"}, {"prompt": "Q?", "chosen": "a", "rejected": "b"}], [":2", "preference"]),
        ([{"chosen": "a", "rejected": "b"}], ["'chosen'"]),
        ([{"story": "Once", "id": 1}], ["'story'", "data.columns", "data.format"]),
        ([{"prompt": "", "completion": "a"}], ["'prompt'"]),
        ([{"prompt": [USER, FOUR]}], ["'prompt'"]),
        ([{"prompt": "Other?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]}], ["'chosen'", "'prompt'"]),
        ([{"system": "a", "messages": [{"role": "system", "content": "b"}, USER, FOUR]}], ["'system'"]),
        ("[1, 2]", ["row 1"]),
        ('{"prompt": "a", "prompt": "b"}\n', [":1", "twice"]),
        ('{"prompt": "a"\n', [":1", "JSON"]),
        ('[{"prompt": "a"}', ["rows.jsonl"]),
        ("", ["no rows"]),
        (b"\xff\xfe{", ["UTF-8"]),
        (gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:40], ["UTF-8"]),
    ],
)
def test_whatever_cannot_be_used_is_one_line_that_names_it(tmp_path, rows, named):
    message = refusal(tmp_path, rows)
    assert str(tmp_path / "rows.jsonl") in message and all(word in message for word in named)


def test_bad_rows_may_be_skipped_and_are_listed(tmp_path):
    rows = [{"prompt": "Q?", "completion": "a"}] * 3 + [{"prompt": "Q?"}]
    found = read(tmp_path, rows, "data.on_bad_row=skip")
    ((source, problem),) = found.malformed
    assert len(found.rows) == 3 and source.endswith(":4") and "'completion'" in problem
    assert "malformed" in refusal(tmp_path, [*rows[-1:], {}, {}], "data.on_bad_row=skip")


def test_tables_keep_texts_and_lines(tmp_path):
    table = io.StringIO()
    writer = csv.writer(table, delimiter="\t")
    writer.writerows([["prompt", "answer"], ["two\nlines", "007"], ["Q?", ""], ["cut"]])
    found = read(tmp_path, table.getvalue(), "data.on_bad_row=skip", name="rows.tsv")
    assert [row.right_answer for row in found.rows if isinstance(row, PromptOnly)] == ["007", None]
    assert [row.source.rpartition(":")[2] for row in found.rows] == ["2", "4"]
    assert found.malformed[0][0].endswith(":5")
    assert ":1" in refusal(tmp_path, "a,a\n1,2\n", name="rows.csv")


def test_every_container_gives_the_same_rows(tmp_path):
    import datasets

    expected = [(row.chosen, row.rejected) for row in pairs(read(tmp_path, PAIRS))]
    table = datasets.Dataset.from_list(PAIRS)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "rows.json").write_text(json.dumps(PAIRS))
    (tmp_path / "rows.jsonl.gz").write_bytes(
        gzip.compress("".join(map(json.dumps, PAIRS)).replace("}{", "}\n{").encode())
    )
    for name in ("rows.parquet", "saved", "rows.json", "rows.jsonl.gz"):
        assert [(row.chosen, row.rejected) for row in pairs(formats.read([tmp_path / name]))] == expected, name
    (tmp_path / "bad.parquet").write_text("no table")
    with pytest.raises(UserError, match=r"bad\.parquet"):
        formats.read([tmp_path / "bad.parquet"])


def test_turns_of_one_speaker_in_a_row_are_one_turn_of_a_transcript(tmp_path):
    chosen = TRANSCRIPT + "Well.\n\nAssistant: 4\n\nHuman: Thanks!\n\nAssistant: Bye.\n\nAssistant: Bye!"
    (pair,) = pairs(read(tmp_path, [{"chosen": chosen, "rejected": chosen.replace("Bye!", "No.")}]))
    assert [message.content for message in pair.prompt] == ["What is 2 + 2?", "Well.\n\n4", "Thanks!"]
    assert (pair.chosen, pair.rejected) == ("Bye.\n\nBye!", "Bye.\n\nNo.")
    copy = {"prompt": TRANSCRIPT, "chosen": " 4", "rejected": " 5"}
    assert pairs(read(tmp_path, [copy], "data.format=hh"))[0].prompt == ASKED


def test_a_function_of_ones_own_reads_any_rows_and_its_file_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "my_rows_of_a_test.py"
    source.write_text("def to_rows(row):\n    return [{'prompt': row['q'], 'completion': a} for a in row['a']]\n")
    found = read(tmp_path, [{"q": "What is 2 + 2?", "a": ["4", "four"]}], "data.format=my_rows_of_a_test:to_rows")
    assert [row.response for row in of_kind(found.rows, Example)] == ["4", "four"]
    assert [(Path(file.name).name, file.rows) for file in found.files] == [("rows.jsonl", 1), (source.name, 0)]
    assert "KeyError" in refusal(tmp_path, [{"question": 1}], "data.format=my_rows_of_a_test:to_rows")
    assert "my_rows_of_a_test:other" in refusal(tmp_path, [{}], "data.format=my_rows_of_a_test:other")


@pytest.mark.parametrize(
    "change", ["data.format=no_such_set", "data.turns=first", "data.labels={a: maybe}", "rm.steps=3"]
)
def test_settings_that_are_none_are_refused_by_their_key(tmp_path, change):
    assert change.partition("=")[0].rpartition(".")[2] in refusal(tmp_path, PAIRS, change)
