"""Readers: every kind of row in every kind of file, and every way in which data can be unusable."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf import files
from rlhf.data import formats, raw
from rlhf.data.formats import CHECK_ADVICE, CONVERT_ADVICE, RECIPE_ADVICE, read, read_hub
from rlhf.data.rows import Document, Example, Message, PreferencePair, PromptOnly
from rlhf.data.transcripts import parse_hh, render_hh
from rlhf.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SKIP = formats.RECIPE_ADVICE.skip


def tar(content: bytes) -> bytes:
    """An archive with one file in it."""
    made = io.BytesIO()
    with tarfile.open(mode="w", fileobj=made) as archive:
        entry = tarfile.TarInfo("rows.jsonl")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


TEXT = {"text": "Rain fell.\n"}
HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: A joke?\n\nAssistant: Knock, knock.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: A joke?\n\nAssistant: No.",
}
INSTRUCTION = {"instruction": "Add the numbers.", "input": "2, 3", "output": "5"}
PREFERENCE = {"prompt": "Capital of Peru?", "chosen": "Lima.", "rejected": "Quito."}
COMPLETION = {"prompt": "Capital of Peru?", "completion": "Lima."}
MESSAGES = {"messages": [{"role": "user", "content": "Capital of Peru?"}, {"role": "assistant", "content": "Lima."}]}
ROWS = {
    "text": TEXT,
    "hh": HH,
    "instruction": INSTRUCTION,
    "preference": PREFERENCE,
    "completion": COMPLETION,
    "question": {"question": "Half of 48?", "answer": "48/2 = <<48/2=24>>24\n#### 24"},
    "messages": MESSAGES,
    "prompt": {"prompt": "Capital of Peru?"},
}


COLUMNS = (  # the refusal of a table that is written as one object
    "whole columns in one object; write one object for each row, as `to_json(FILE, orient='records', lines=True)` of "
    "pandas and `to_json(FILE)` of datasets do"
)


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file and stands in its folder, so that sources are short."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: bytes) -> str:
        Path(name).write_bytes(content)
        return name

    return write


def refusal(*args, call=read, **options) -> str:
    """The message of the UserError, which must be one line."""
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pair_of(write, row: dict[str, Any]) -> PreferencePair:
    (pair,) = read([write("one.jsonl", lines(row))]).pairs
    return pair


# Kinds of rows


def test_text_is_kept_as_it_stands(write):
    rows = read([write("a.jsonl", lines(TEXT))])
    assert rows.documents == (Document("Rain fell.\n", "a.jsonl:1"),)
    assert not rows.examples and not rows.pairs


def test_a_prompt_alone_is_a_row_for_ppo(write):
    row = {"prompt": "Capital of Peru?", "prompt_id": "x7", "source": "web", "n": 3}
    rows = read([write("a.jsonl", lines(row, row))])
    assert rows.bare_prompts[0] == PromptOnly((user("Capital of Peru?"),), "a.jsonl:1")
    assert rows.report.notes == (
        "a.jsonl: not used in training: source, n; --set data.ignore=[source,n] (`rlhf data`, `rlhf new`: --ignore "
        "source,n) says that no answer needs them",
    )
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of Peru?"}]
    assert read([write("b.jsonl", lines({"prompt": turns}))]).bare_prompts[0].prompt[1] == user("Capital of Peru?")
    transcript = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: A joke?\n\nAssistant:"
    (asked,) = read([write("c.jsonl", lines({"prompt": transcript}))]).bare_prompts
    assert asked.prompt == (user("Hi"), assistant("Hello!"), user("A joke?"))


def test_a_prompt_beside_an_unknown_text_is_not_taken_for_a_prompt_alone(write):
    """The other text may be its answer."""
    file = write("a.jsonl", lines({"prompt": "Capital of Peru?", "reply": "Lima."}))
    assert "unknown columns: 'prompt', 'reply'" in refusal([file])
    assert "Prompts without answers: data.format: prompt (--format prompt) ignores" in refusal([file])
    assert len(read([file], kind="prompt").bare_prompts) == 1


def test_a_question_with_a_worked_answer_is_a_demonstration_that_rewards_can_check(write):
    worked = "48/2 = <<48/2=24>>24\n#### 24"
    rows = read([write("a.jsonl", lines({"question": "Half of 48?", "answer": worked, "id": 3}))])
    assert rows.examples == (Example((user("Half of 48?"),), worked, "a.jsonl:1", worked),)
    short = read([write("b.jsonl", lines({"prompt": "Half of 48?", "completion": worked, "answer": 24}))])
    assert short.examples == (Example((user("Half of 48?"),), worked, "b.jsonl:1", "24"),)
    assert read([write("c.jsonl", lines(COMPLETION))]).examples[0].right_answer is None


def test_a_question_about_a_passage_is_not_taken_for_a_question_alone(write):
    (number,) = read([write("n.jsonl", lines({"question": "Half of 48?", "answer": 24}))]).examples
    assert (number.response, number.right_answer) == ("24", "24")
    file = write("a.jsonl", lines({"question": "Who?", "answer": "Ann.", "passage": "Ann left."}))
    assert "unknown columns: 'question', 'answer', 'passage'" in refusal([file])
    assert refusal([file], kind="question").startswith("a.jsonl:1: 'passage' would be lost")


@pytest.mark.parametrize("prompt", ["", "  ", [], [{"role": "assistant", "content": "Hi"}], 7])
def test_a_prompt_that_asks_nothing_is_malformed(write, prompt):
    assert "a.jsonl:1: 'prompt'" in refusal([write("a.jsonl", lines({"prompt": prompt}))], kind="prompt")


def test_hh_splits_at_the_last_assistant_turn(write):
    prompt = (user("Hi"), assistant("Hello!"), user("A joke?"))
    assert pair_of(write, HH) == PreferencePair(prompt, "Knock, knock.", "No.", "one.jsonl:1")


def test_hh_with_two_assistant_turns_in_a_row_keeps_both(write):
    start = "\n\nHuman: Hi\n\nAssistant: Wait.\n\nAssistant:"
    pair = pair_of(write, {"chosen": start + " Hello!", "rejected": start + " Go."})
    assert pair.prompt == (user("Hi"), assistant("Wait.")) and pair.chosen == "Hello!"


def test_hh_drops_one_space_before_a_turn_and_white_space_after_a_response(write):
    start = "\n\nHuman:  two spaces \n\nAssistant:"
    pair = pair_of(write, {"chosen": start + "  a b \n", "rejected": start + "none\t"})
    assert (pair.prompt, pair.chosen, pair.rejected) == ((user(" two spaces "),), " a b", "none")


@pytest.mark.parametrize(
    ("extra", "content"),
    [
        ({"input": "2, 3"}, "Add.\n2, 3"),
        ({"input": ""}, "Add."),
        ({"input": " \n"}, "Add."),
        ({"input": None}, "Add."),
        ({}, "Add."),
    ],
)
def test_instruction_with_and_without_input(write, extra, content):
    rows = read([write("a.jsonl", lines({"instruction": "Add.", "output": " 5 \n", **extra}))])
    assert rows.examples == (Example((user(content),), "5", "a.jsonl:1"),)


SHAREGPT = {"conversations": [{"from": "human", "value": "Capital of Peru?"}, {"from": "gpt", "value": "Lima."}]}


@pytest.mark.parametrize(
    "row",
    [
        COMPLETION,
        {"prompt": "Capital of Peru?", "response": " Lima. "},
        {"prompt": "Capital of Peru?", "completion": None, "response": "Lima."},
        {"prompt": MESSAGES["messages"][:1], "completion": MESSAGES["messages"][1:]},
        {"prompt": "\n\nHuman: Capital of Peru?\n\nAssistant:", "completion": " Lima."},
        MESSAGES,
        {"conversations": [{"role": None, "content": None, **turn} for turn in SHAREGPT["conversations"]]},
        {**MESSAGES, "prompt": "Capital of Peru?", "prompt_id": "7"},
        SHAREGPT,
    ],
)
def test_demonstrations_as_completions_and_conversations(write, row):
    (example,) = read([write("one.jsonl", lines(row))]).examples
    assert (example.prompt, example.response) == ((user("Capital of Peru?"),), "Lima.")


def test_earlier_turns_and_a_system_message_belong_to_the_prompt(write):
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "Ciao")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (example,) = read([write("one.jsonl", lines(row))]).examples
    assert example.prompt == (Message("system", "Be brief."), user("Hi"), assistant("Hello"), user("Bye"))
    assert example.response == "Ciao"


SYSTEM = Message("system", "Be brief.")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Capital of Peru?", "completion": "Lima."},
        {"instruction": "Capital of Peru?", "output": "Lima."},
        {"conversations": [{"from": "human", "value": "Capital of Peru?"}, {"from": "gpt", "value": "Lima."}]},
        {"prompt": "Capital of Peru?", "chosen": "Lima.", "rejected": "Quito."},
    ],
)
def test_texts_beside_a_prompt_are_its_system_message_or_refused(write, row):
    """What a row says elsewhere must not be lost: the answer may depend on it."""
    beside = {"system": "Be brief.", "history": [], "context": " "}
    (parsed,) = read([write("one.jsonl", lines(row | beside))]).rows
    assert not isinstance(parsed, Document) and parsed.prompt == (SYSTEM, Message("user", "Capital of Peru?"))
    for key, value in (("history", [["Hi", "Hello"]]), ("context", "Peru's capital is Lima."), ("passage", "Lima.")):
        message = refusal([write("one.jsonl", lines(row | {key: value}))])
        assert message.startswith(f"one.jsonl:1: '{key}' would be lost; put it into the prompt, or take the column out")


def test_a_system_message_beside_another_is_refused_unless_it_is_the_same(write):
    own = [{"role": "system", "content": "Be kind."}, *({"role": r, "content": r} for r in ("user", "assistant"))]
    assert "'system' differs" in refusal([write("one.jsonl", lines({"messages": own, "system": "Be brief."}))])
    (parsed,) = read([write("one.jsonl", lines({"messages": own, "system": "Be  kind."}))]).rows
    assert not isinstance(parsed, Document)
    assert [m.content for m in parsed.prompt] == ["Be kind.", "user"]


def test_a_completion_that_brings_another_conversation_is_refused(write):
    row = {"prompt": "Capital of Peru?", "completion": "\n\nHuman: Hi\n\nAssistant: Hello"}
    message = refusal([write("one.jsonl", lines(row))])
    assert message.startswith("one.jsonl:1: 'completion' holds a conversation that does not begin with 'prompt'")


@pytest.mark.parametrize("label", [True, False, 1, 0, 1.0, 0.0, "True", "0", "1.0", "0.0"])
def test_labelled_answers_keep_their_label(write, label):
    file = write("kto.jsonl", lines({**COMPLETION, "label": label}))
    (example,) = read([file]).examples
    assert example.good is (str(label).lower() in ("true", "1", "1.0"))
    assert read([file], kind="labelled").examples == (example,)


@pytest.mark.parametrize("missing", [{"label": None}, {"label": "good"}, {}])
def test_an_answer_without_a_label_among_labelled_ones_is_a_bad_row(write, missing):
    rows = lines(COMPLETION | {"label": True}, COMPLETION | missing, COMPLETION | {"label": False})
    assert refusal([write("a.jsonl", rows)]).startswith("a.jsonl:2: ")
    assert [row.good for row in read([write("b.jsonl", rows)], on_bad_row="skip").examples] == [True, False]
    assert "'label'" in refusal([write("c.jsonl", rows)], kind="labelled")


@pytest.mark.parametrize("missing", [{"label": None}, {"label": ""}, {"label": float("nan")}, {}])
@pytest.mark.parametrize("on_bad_row", ["stop", "skip"])
def test_answers_without_a_label_among_labelled_ones_are_no_demonstrations(write, missing, on_bad_row):
    """A table cannot tell a label that is null from one that is not there."""
    unlabelled, labelled = COMPLETION | missing, COMPLETION | {"label": False}
    message = refusal([write("kto.jsonl", lines(*[unlabelled] * 6, *[labelled] * 4))], on_bad_row=on_bad_row)
    assert message.startswith("kto.jsonl:7: an answer that is labelled good or bad by itself (KTO)")
    assert message.endswith("label all of them, or none"), "to leave out bad rows would not help"
    assert len(read([write("none.jsonl", lines(unlabelled, unlabelled))]).examples) == 2, "nobody has labelled these"


@pytest.mark.parametrize("label", ["yes", "good", 2, -1, [True], -0.0])
def test_a_label_that_is_neither_true_nor_false_is_asked_about(write, label):
    """Otherwise SFT would imitate bad answers too. A named kind says that the column means something else."""
    file = write("a.jsonl", lines({**COMPLETION, "label": label}, COMPLETION, COMPLETION))
    assert refusal([file]).startswith(f"a.jsonl:1: the label {str(label).lower()!r} is neither true nor false")
    rows = read([file], on_bad_row="skip")
    assert (len(rows.examples), rows.report.malformed[0][0]) == (2, "a.jsonl:1")
    assert len(read([file], kind="completion").examples) == 3


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), True, ["4"]])
def test_an_answer_that_no_reward_can_compare_with_is_malformed(write, answer):
    file = write("a.jsonl", lines({"prompt": "2+2?", "answer": 4}, {"prompt": "3+3?", "answer": answer}))
    assert refusal([file]).startswith("a.jsonl:2: 'answer' is ")
    assert [row.right_answer for row in read([file], on_bad_row="skip").bare_prompts] == ["4"]


@pytest.mark.parametrize(("answer", "written"), [(7.0, "7"), (-0.0, "0"), (8.5, "8.5"), (7, "7"), ("7.0", "7.0")])
def test_a_whole_answer_is_written_as_one_also_where_a_table_made_it_a_float(write, answer, written):
    """pandas makes 7 of a column with an empty cell 7.0, and `exact_answer` would give each right answer of 7 a 0."""
    rows = read([write("a.jsonl", lines({"prompt": "3+4?", "answer": answer}))])
    assert rows.bare_prompts[0].right_answer == written


def test_an_empty_answer_of_a_prompt_is_none(write):
    rows = read([write("a.csv", b"prompt,answer\n2+2?,4\n3+3?,\n4+4?,  \n")])
    assert [row.right_answer for row in rows.bare_prompts] == ["4", None, None]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "prompt,chosen,rejected\n"),
        ("a.data", "\ufeffprompt,chosen,rejected\r\n"),
        ("a.tsv", "prompt\tchosen\trejected\n"),
    ],
)
def test_a_table_is_read_with_quotes_and_line_breaks_in_its_cells(write, name, content):
    comma = "\t" if name.endswith("tsv") else ","
    content += f'"Two ""lines""\n\nhere?"{comma}Yes.{comma}No\nShort?{comma}No.{comma}Yes\n'
    pairs = read([write(name, content.encode())]).pairs
    assert [pair.prompt[0].content for pair in pairs] == ['Two "lines"\n\nhere?', "Short?"]
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [("Yes.", "No"), ("No.", "Yes")]
    assert [pair.source for pair in pairs] == [f"{name}:2", f"{name}:5"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "prompt,,\nHi,a,b\n", "a.csv:1: the column '' is named twice"),
        ("a.csv", "prompt,chosen,chosen\nHi,a,b\n", "a.csv:1: the column 'chosen' is named twice"),
        (
            "a.csv",
            "question;the answer?\nHi, you;4\n",
            "a.csv:1: one column, 'question;the answer?': columns must be separated by",
        ),
        ("a.jsonl", '{"prompt": "a", "prompt": "b", "response": "c"}\n', "a.jsonl:1: the key 'prompt' is given twice"),
        ("a.jsonl", '{"a": 1, "c": 2, "b": 3, "c": 4}', "a.jsonl:1: the key 'c' is given twice"),
        ("a.jsonl", '{"x": [{"b": 1, "b": 2}]}', "a.jsonl:1: the key 'b' is given twice"),
        ("a.json", '[\n{"a": 1, "a": 2}]', "a.json:row 1: the key 'a' is given twice"),
        ("a.jsonl", '{"prompt": "a"}\r{"prompt": "b"}\r', "a.jsonl:1: a carriage return inside of a line"),
        ("a.csv", "prompt,response\ra,b\rc,d\r", "a.csv:1: a carriage return inside of a line"),
        ("a.tsv", 'prompt\tresponse\na\t"b" c\n', "a.tsv:2: not a table of values between tabs"),
    ],
)
def test_what_a_reader_would_take_by_halves_is_refused(write, name, text, said):
    assert refusal([write(name, text.encode())]).startswith(said)


def test_a_table_s_faults_are_named(write):
    text = "prompt,completion\nHi,Hello\nHi,Hello,more\nWhy?,\n"
    assert refusal([write("a.csv", text.encode())]).startswith(
        "a.csv:3: 3 cells in a table of 2 columns. Repair it, or"
    )
    rows = read(["a.csv"], on_bad_row="skip")
    assert [example.response for example in rows.examples] == ["Hello"]
    assert rows.report.left_out["empty"] == ("a.csv:4",)
    assert refusal([write("b.csv", b'prompt,completion\nHi,"Hello\n')]).startswith(
        "b.csv:2: not a table of values between commas"
    )


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt"])
def test_a_header_says_what_parts_the_columns(write, delimiter, name):
    text = delimiter.join(["prompt", "completion"]) + "\n" + delimiter.join(['"Hi; you, | all"', "Hello"]) + "\n"
    rows = read([write(name, text.encode())])
    assert [(row.prompt[0].content, row.response) for row in rows.examples] == [("Hi; you, | all", "Hello")]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", ["stream", "file", "folder", "split", "empty"])
def test_arrow_files_and_folders_of_save_to_disk_are_read(tmp_path, monkeypatch, kind, compression):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}?", "completion": "So."} for n in range(0 if kind == "empty" else 5)]
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema([("prompt", "string"), ("completion", "string")]))
    if kind in ("folder", "split"):
        saved = datasets.Dataset(table)
        if kind == "split":
            datasets.DatasetDict(train=saved).save_to_disk("a", num_shards={"train": 2})
        else:
            saved.save_to_disk("a", num_shards=2)
        Path("a/cache-0.arrow").write_text("of a map")
    else:
        writer = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with writer("a", table.schema, options=options) as file:
            file.write_table(table, 2)
    if kind == "empty":
        assert "no rows" in refusal(["a"])
        return
    found = read(["a"])
    assert [row.prompt[0].content for row in found.examples] == [row["prompt"] for row in rows]
    assert found.examples[-1].source == ("a/train:row 5" if kind == "split" else "a:row 5")
    assert found.report.files[0].sha256 == files.sha256(Path("a"))


def test_what_looks_like_a_saved_set_is_named(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    saved = datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}])
    datasets.DatasetDict(train=saved, test=saved).save_to_disk("two")
    assert refusal(["two"]) == "two: splits of a set, as save_to_disk writes them: name one, two/train, two/test"
    (file,) = Path("two/test").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-200])
    assert refusal(["two/test"]).startswith("two/test: Arrow file damaged after 0 rows")
    file.unlink()
    assert "two/test: Arrow file damaged" in refusal(["two/test"])


def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "link.jsonl"):
        message = refusal([tmp_path / name])
        assert message == f"{tmp_path / name}: a pipe or a device, which may never end; write the rows to a file first"


def test_what_would_fill_the_memory_is_refused(write, monkeypatch):
    monkeypatch.setattr(raw, "MAX_LINE", 1000)
    message = refusal([write("long.jsonl", lines(TEXT) + b'{"text": "' + b"a" * 2000 + b'"}')])
    assert message.startswith("long.jsonl:2: a line of more than 0 MiB")
    monkeypatch.setattr(raw, "FREE_INFLATION", 10_000)
    bomb = gzip.compress(lines(*[{"text": "a" * 900}] * 10_000))
    message = refusal([write("bomb.jsonl.gz", bomb)])
    assert message.startswith("bomb.jsonl.gz: unpacks to more than 250 times its size after ")
    monkeypatch.setattr(raw, "MAX_ARRAY", 1000)
    message = refusal([write("array.json", b"[" + b'{"text": "a"},\n' * 100 + b"{}]")])
    assert message.endswith("write one object on each line")
    for letter, fits in (("e", True), ("é", False)):  # bytes count, not characters
        file = write("letters.json", f'[\n{{"text": "{letter * 400}"}},\n{{"text": "{letter * 400}"}}\n]'.encode())
        assert len(read([file]).documents) == 2 if fits else refusal([file]) == message.replace("array.j", "letters.j")


def test_a_preference_row_of_texts_is_a_pair(write):
    assert pair_of(write, PREFERENCE) == PreferencePair((user("Capital of Peru?"),), "Lima.", "Quito.", "one.jsonl:1")


@pytest.mark.parametrize("end", ["\n\nAssistant:", "\n\nAssistant: ", "\n\nAssistant:\n", ""])
def test_preference_whose_prompt_is_a_transcript(write, end):
    prompt = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Go" + end
    pair = pair_of(write, {"prompt": prompt, "chosen": " Ok", "rejected": "No"})
    assert pair.prompt == (user("Hi"), assistant("Hello!"), user("Go")) and pair.chosen == "Ok"


def test_a_prompt_that_quotes_a_transcript_is_one_message(write):
    prompt = "Continue:\n\nHuman: Hi\n\nAssistant: Hello!"
    assert pair_of(write, {"prompt": prompt, "chosen": "Ok", "rejected": "No"}).prompt == (user(prompt),)


def test_preference_whose_answers_are_transcripts_with_the_prompt(write):
    prompt = "\n\nHuman: Hi\n\nAssistant:"
    row = {"prompt": prompt, "chosen": f"{prompt} Hello!", "rejected": f"{prompt} Go."}
    assert pair_of(write, row) == PreferencePair((user("Hi"),), "Hello!", "Go.", "one.jsonl:1")


PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
HELLO, GO = {"role": "assistant", "content": "Hello!"}, {"role": "assistant", "content": "Go."}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "chosen": [HELLO], "rejected": [GO]},
        {"prompt": PROMPT, "chosen": "Hello!", "rejected": "Go."},
        {"chosen": [*PROMPT, HELLO], "rejected": [*PROMPT, GO]},
        {"prompt": None, "chosen": [*PROMPT, HELLO], "rejected": [*PROMPT, GO]},
        {"prompt": PROMPT, "chosen": [*PROMPT, HELLO], "rejected": [*PROMPT, GO]},
        {
            "prompt": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}],
            "chosen": [{"from": "gpt", "value": "Hello!"}],
            "rejected": [{"role": "gpt", "content": "Go."}],
        },
    ],
)
def test_preference_as_conversations(write, row):
    prompt = (Message("system", "Be brief."), user("Hi"))
    assert pair_of(write, row) == PreferencePair(prompt, "Hello!", "Go.", "one.jsonl:1")


def test_text_prompt_with_whole_conversations(write):
    start = [{"role": "user", "content": "Hi"}]
    pair = pair_of(write, {"prompt": "Hi", "chosen": [*start, HELLO], "rejected": [*start, GO], "id": 7})
    assert pair == PreferencePair((user("Hi"),), "Hello!", "Go.", "one.jsonl:1")


def test_other_keys_are_ignored_and_the_more_specific_kind_wins(write):
    row = {**INSTRUCTION, "text": " | ".join(INSTRUCTION.values()), "id": 3}
    assert len(read([write("a.jsonl", lines(row))]).examples) == 1


@pytest.mark.parametrize("absent", ["text", "messages", "instruction"])
@pytest.mark.parametrize("row", [{"question": "2+2?", "answer": "4"}, {"prompt": "2+2?", "answer": "4"}])
def test_questions_and_prompts_may_have_columns_filled_with_null(write, row, absent):
    rows = read([write("a.jsonl", lines({**row, absent: None}))])
    answered: list[Example | PromptOnly] = [*rows.examples, *rows.bare_prompts]
    assert [row.right_answer for row in answered] == ["4"]


@pytest.mark.parametrize("answers", [("completion",), ("response",), ("chosen", "rejected")])
def test_a_prompt_whose_answers_are_null_is_no_bare_prompt(write, answers):
    file = write("a.jsonl", lines({"prompt": "2+2?", **dict.fromkeys(answers)}))
    assert refusal([file]).startswith(("a.jsonl:1: no 'completion' key", f"a.jsonl:1: '{answers[0]}' is null"))


def test_columns_filled_with_null_count_as_absent(write):
    assert (
        read([write("a.jsonl", lines({**TEXT, "instruction": None, "chosen": None}))]).documents[0].text
        == "Rain fell.\n"
    )


def test_a_data_column_is_no_array_of_rows(write):
    assert len(read([write("a.json", lines({**TEXT, "data": "x"}, TEXT))]).documents) == 2
    assert len(read([write("b.jsonl", lines({**TEXT, "data": [1]}, TEXT))]).documents) == 2
    assert len(read([write("c.json", lines({"data": [TEXT, TEXT]}))]).documents) == 2


def test_a_key_given_twice_is_named_with_its_row(write):
    """A parser would take the last value without a word."""
    twice = b'{"text": "a", "text": "b"}'
    assert refusal([write("a.jsonl", lines(TEXT) + twice + b"\n")]).startswith("a.jsonl:2: the key 'text' is given twi")
    array = write("a.json", b"[" + json.dumps(TEXT).encode() + b",\n" + twice + b"]")
    assert refusal([array]) == "a.json:row 2: the key 'text' is given twice; leave one out"
    outside = write("b.json", b'{"n": 1, "n": 2,\n"data": [' + json.dumps(TEXT).encode() + b"]}")
    assert refusal([outside]) == "b.json: the key 'n' is given twice; leave one out"
    rows = b'"data": [' + json.dumps(TEXT).encode() + b",\n"
    before = write("c.json", b'{"meta": [{"n": 1, "n": 2}],\n' + rows + b"{}]}")
    assert refusal([before]) == "c.json: the key 'n' is given twice; leave one out"
    inside = write("d.json", b"{ " + rows + b'{"id": 1, "text": "a", "text": "b"}]}')
    assert refusal([inside]) == "d.json:row 2: the key 'text' is given twice; leave one out"
    long = b"k" * 3000
    assert len(refusal([write("c.jsonl", b'{"' + long + b'": 1, "' + long + b'": 2}\n')])) < 500


def test_a_parquet_file_with_values_that_python_cannot_hold_is_named(write):
    def parquet(table: pyarrow.Table) -> str:
        pyarrow.parquet.write_table(table, "a.parquet")
        return refusal(["a.parquet"])

    texts = pyarrow.array(["a"])
    twice = pyarrow.Table.from_arrays([texts, texts], names=["text", "text"])
    assert parquet(twice) == "a.parquet: the column 'text' is there twice; rename one of them"
    fields = pyarrow.StructArray.from_arrays([texts, texts], names=["x", "x"])
    far = pyarrow.array([2**62], pyarrow.timestamp("us"))
    for column in (fields, far):
        message = parquet(pyarrow.table({"text": texts, "more": column}))
        assert message.startswith("a.parquet: a row behind row 0 has a value that Python cannot hold")


def test_a_path_that_no_file_can_have_is_named():
    assert "cannot be read (embedded null byte)" in refusal(["a\0.jsonl"])


def test_a_named_format_overrules_detection(write):
    row = {**HH, "prompt": "unrelated"}
    assert len(read([write("a.jsonl", lines(row))], kind="hh").pairs) == 1
    assert "do not begin with 'prompt'" in refusal(["a.jsonl"])


# Left out


def test_pairs_with_differing_prompts_and_identical_answers_are_left_out_under_either_policy(write):
    differ = {"chosen": "\n\nHuman: a\n\nAssistant: x\n\nAssistant: y", "rejected": "\n\nHuman: a\n\nAssistant: x"}
    same = {"chosen": "\n\nHuman: a\n\nAssistant: x ", "rejected": "\n\nHuman: a\n\nAssistant: x\n"}
    file = write("a.jsonl", lines(HH, differ, same, HH))
    for policy in ("stop", "skip"):
        rows = read([file], on_bad_row=policy)
        assert [pair.source for pair in rows.pairs] == ["a.jsonl:1", "a.jsonl:4"]
        assert rows.report.left_out["prompts_differ"] == ("a.jsonl:2",)
        assert rows.report.left_out["identical"] == ("a.jsonl:3",)
        assert rows.report.malformed == ()


def test_rows_with_an_empty_answer_are_left_out_under_either_policy(write):
    no_answer = {**HH, "chosen": HH["chosen"].removesuffix("Knock, knock.")}
    pairs, examples = (
        write("a.jsonl", lines(HH, no_answer)),
        write("b.jsonl", lines(INSTRUCTION, {**INSTRUCTION, "output": " "})),
    )
    for policy in ("stop", "skip"):
        rows = read([pairs, examples], on_bad_row=policy)
        assert ([p.source for p in rows.pairs], [e.source for e in rows.examples]) == (["a.jsonl:1"], ["b.jsonl:1"])
        assert rows.report.left_out["empty"] == ("a.jsonl:2", "b.jsonl:2")
        assert rows.report.malformed == ()


def test_conversations_whose_shared_part_differs_are_left_out(write):
    other = [PROMPT[0], {"role": "user", "content": "Hey"}]
    rows = read([write("a.jsonl", lines({"chosen": [*PROMPT, HELLO], "rejected": [*other, GO]}))])
    assert rows.report.left_out["prompts_differ"] == ("a.jsonl:1",) and not rows.pairs


def test_the_report_names_hashes_counts_and_sums_up(write):
    content = lines(HH, {"chosen": None, "rejected": "x"}, HH)
    files = [write("a.jsonl", content), write("b.jsonl.gz", gzip.compress(lines(INSTRUCTION)))]
    report = read(files, on_bad_row="skip").report
    first, second = report.files
    assert (first.name, first.kind, first.rows) == ("a.jsonl", "hh", 3)
    assert first.sha256 == hashlib.sha256(content).hexdigest()
    assert (second.kind, second.rows) == ("instruction", 1)
    assert report.malformed == (("a.jsonl:2", "'chosen' is null; it must be text"),)
    assert report.summary() == (
        "3 of 4 rows kept from a.jsonl, b.jsonl.gz; "
        "left out: malformed 1, prompts differ 0, identical answers 0, empty answer 0, no answer to train on 0"
    )


# Kinds of files


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", lambda rows: lines(*rows), "{}"),
        ("a.jsonl.gz", lambda rows: gzip.compress(lines(*rows)), "{}"),
        ("gzipped.jsonl", lambda rows: gzip.compress(lines(*rows)), "{}"),
        ("unpacked.jsonl.gz", lambda rows: lines(*rows), "{}"),
        ("lines.json", lambda rows: lines(*rows), "{}"),
        ("a.json", lambda rows: json.dumps(rows, indent=1).encode(), "row {}"),
        ("one-line.json", lambda rows: json.dumps(rows).encode(), "row {}"),
        ("a.json.gz", lambda rows: gzip.compress(json.dumps(rows).encode()), "row {}"),
        ("indented.json.gz", lambda rows: gzip.compress(json.dumps({"data": rows}, indent=1).encode()), "row {}"),
        ("data.json", lambda rows: json.dumps({"data": rows}).encode(), "row {}"),
        ("indented.json", lambda rows: json.dumps({"data": rows}, indent=1).encode(), "row {}"),
        ("a.parquet", parquet, "row {}"),
        ("parquet.bin", parquet, "row {}"),
    ],
)
def test_every_kind_of_file_gives_the_same_rows(write, kind, name, content, place):
    rows = read([write(name, content([ROWS[kind]] * 2))])
    expected = read([write("expected.jsonl", lines(ROWS[kind], ROWS[kind]))])
    for mine, theirs in zip(
        rows.documents + rows.examples + rows.pairs,
        expected.documents + expected.examples + expected.pairs,
        strict=True,
    ):
        number = theirs.source.removeprefix("expected.jsonl:")
        assert mine.source == f"{name}:{place.format(number)}"
        assert replace(mine, source="") == replace(theirs, source="")


def test_parquet_conversations_and_null_columns(write):
    row = {"prompt": PROMPT, "chosen": [HELLO], "rejected": [GO], "text": None}
    assert read([write("a.parquet", parquet([row]))]).pairs[0].prompt[1] == user("Hi")


def test_byte_order_mark_blank_lines_and_windows_line_ends(write):
    content = b"\xef\xbb\xbf\r\n" + lines(TEXT).replace(b"\n", b"\r\n") + b"\r\n  \n" + lines(TEXT).rstrip()
    assert [row.source for row in read([write("a.jsonl", content)]).documents] == ["a.jsonl:2", "a.jsonl:5"]
    assert read([write("b.jsonl", b"\xef\xbb\xbf" + lines(TEXT))]).documents[0].source == "b.jsonl:1"
    assert read([write("b.json", b"\xef\xbb\xbf" + json.dumps([TEXT]).encode())]).documents[0].source == "b.json:row 1"


def test_files_are_read_in_the_order_given(write):
    files = [write("b.jsonl", lines(TEXT)), write("a.jsonl", lines(TEXT, TEXT))]
    assert [row.source for row in read(files).documents] == ["b.jsonl:1", "a.jsonl:1", "a.jsonl:2"]


# Files that cannot be used: these stop under either policy


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize(
    ("name", "content", "start", "way_out"),
    [
        ("empty.jsonl", b"", "empty.jsonl: the file is empty", "download or write it again"),
        ("blank.jsonl", b"\n \n", "blank.jsonl: no rows in it", "add some (docs/data.md)"),
        ("heads.csv", b"prompt,chosen\n", "heads.csv: no rows in it", "add some (docs/data.md)"),
        ("empty.json", b"[]", "empty.json: no rows in it", "name another file"),
        ("lfs.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "lfs.jsonl: a git-LFS pointer", "git lfs pull"),
        (
            "latin.jsonl",
            b'{"text": "caf\xc3\xa9"}\n{"text": "caf\xe9"}\n',
            "latin.jsonl:2: byte 0xe9 at offset 31 is not",
            "UTF-8",
        ),
        ("cut.jsonl", lines(TEXT, TEXT)[:-9], "cut.jsonl:2: invalid JSON (", "cut off; download or write it again"),
        ("cut.json", b'[\n\n{"text": "a"},\n{"te', "cut.json:4: invalid JSON (", "if it ends early, download it again"),
        ("comma.json", b'[\n{"text": "a",}\n]', "comma.json:2: invalid JSON (", ": repair it there; if it ends early"),
        ("two.json", b'{\n"text": "a"\n}\n{\n"text": "b"\n}\n', "two.json:4: a second JSON value", "on each line, or"),
        ("zip.jsonl", b"PK\x03\x04\x14\0", "zip.jsonl: a zip archive, or a spreadsheet", "unpack it, or save"),
        ("zstd.jsonl", b"\x28\xb5\x2f\xfd\x04", "zstd.jsonl: a zstd file", "unpack it first"),
        ("a.jsonl.bz2", bz2.compress(lines(TEXT)), "a.jsonl.bz2: a bzip2 file", "unpack it first"),
        ("a.jsonl.xz", lzma.compress(lines(TEXT)), "a.jsonl.xz: an xz file", "unpack it first"),
        ("a.tar", tar(lines(TEXT)), "a.tar: a tar archive", "unpack it, and name the files in it"),
        ("a.tar.gz", gzip.compress(tar(lines(TEXT))), "a.tar.gz: a tar archive", "unpack it, and name the files in it"),
        ("a.pkl", pickle.dumps([TEXT]), "a.pkl: a pickle of Python, which may run code", "write its rows as JSON"),
        ("a.npy", b"\x93NUMPY\x01\0", "a.npy: an array of numpy", "write its rows as JSON lines"),
        ("odd.json", b'{\n"rows": []\n}', "odd.json:row 1: the rows are under 'rows'", "on each line"),
        ("number.json", b"[]\n[]", "number.json:2: a second JSON value", "on each line, or"),
        (
            "two.jsonl",
            b'{\n"text": "a"\n}\n{\n"text": "b"\n}\n',
            "two.jsonl:1: an object over several lines",
            "on each",
        ),
        ("le.jsonl", '{"text": "a"}\n'.encode("utf-16-le"), "le.jsonl: zero bytes in its first line", "to UTF-8"),
        ("be.csv", "text,id\na,1\n".encode("utf-16-be"), "be.csv: zero bytes in its first line", "to UTF-8"),
        ("html.parquet", b"<!DOCTYPE html>", "html.parquet: not a Parquet file", "download it again"),
        (
            "cut.parquet",
            b"PAR1 and then nothing",
            "cut.parquet: Parquet file damaged after 0 rows",
            "download it again",
        ),
        ("digits.json", b'[\n{"text": ' + b"9" * 5000 + b"}]", "digits.json: invalid JSON (", "write it again"),
    ],
)
def test_a_damaged_file_is_named_with_the_way_out(write, policy, name, content, start, way_out):
    message = refusal([write(name, content)], on_bad_row=policy)
    assert message.startswith(start) and way_out in message


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_gzip_that_ends_early_or_is_damaged(write, policy):
    whole = gzip.compress(lines(*({"text": f"row {n}, {hashlib.sha256(b'%d' % n).hexdigest()}"} for n in range(5000))))
    message = refusal([write("a.jsonl.gz", whole[: len(whole) // 2])], on_bad_row=policy)
    count = int(message.split("after ")[1].split(" lines")[0].replace(",", ""))
    assert message.startswith("a.jsonl.gz: gzip stream ends early after") and message.endswith("; download it again")
    assert 0 < count < 5000
    refusal([write("a.jsonl.gz", whole[:-4])], on_bad_row=policy)
    damaged = whole[:-8] + b"\0" * 8
    assert "a.jsonl.gz: gzip stream damaged after 5,000 lines" in refusal([write("a.jsonl.gz", damaged)])
    no_block = whole[:10] + b"\xff" + whole[11:]
    assert "a.jsonl.gz: gzip stream damaged after 0 lines" in refusal([write("a.jsonl.gz", no_block)])


def test_missing_file_directory_and_no_files(write, tmp_path):
    assert refusal(["none.jsonl"]) == "none.jsonl: no such file; check its path"
    Path("folder").mkdir()
    assert refusal(["folder"]) == "folder: a directory, and none that save_to_disk wrote; name the files in it"
    assert "name the files in data.files" in refusal([])
    assert "name the files in data.files" in refusal("a.jsonl")
    assert refusal([write("a.jsonl", lines(TEXT)) + "/b.jsonl"]).startswith("a.jsonl/b.jsonl: cannot be read")


# Rows that cannot be used: they stop, or are skipped and listed


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        (TEXT, b'{"text": }', "invalid JSON (Expecting value at column 10)"),
        (TEXT, b'{"text": ' + b"9" * 5000 + b"}", "invalid JSON (a whole number of more than 4,300 digits)"),
        (TEXT, b"[" * 100_000, "invalid JSON (lists or objects nested too deeply)"),
        (TEXT, [1, 2], "a row must be a JSON object; this one is a list"),
        (TEXT, None, "a row must be a JSON object; this one is null"),
        (TEXT, {"body": "x"}, "no 'text' key; each text row needs text"),
        (TEXT, {"text": None}, "'text' is null; it must be text"),
        (TEXT, {"text": 3.5}, "'text' is a number; it must be text"),
        (TEXT, {"text": " \n"}, "'text' is empty"),
        (TEXT, {"text": "\ud83d!"}, "'text' holds half a surrogate pair at character 0"),
        (
            TEXT,
            INSTRUCTION,
            "one instruction row among text rows, which have text; this one has 'instruction', 'input'",
        ),
        (
            HH,
            {"chosen": "Hello", "rejected": "Go"},
            "'chosen' has no assistant turn; without a 'prompt' it must be a tr",
        ),
        (HH, {**HH, "rejected": "\n\nHuman: Hi"}, "'rejected' has no assistant turn"),
        (HH, {**HH, "rejected": HH["rejected"] + "\n\nHuman: Why?"}, "'rejected' ends with a user turn; the answer"),
        (
            HH,
            {"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"},
            "no user turn with text before the answer",
        ),
        (HH, {"chosen": HH["chosen"]}, "no 'rejected' key; each hh row needs chosen, rejected"),
        (INSTRUCTION, {"instruction": "Add."}, "no 'output' key; each instruction row needs instruction, output"),
        (INSTRUCTION, {"instruction": "Add.", "output": ["5"]}, "'output' is a list; it must be text"),
        (INSTRUCTION, {"instruction": "", "output": "5"}, "'instruction' is empty"),
        (INSTRUCTION, {"instruction": "Add.", "input": 5, "output": "5"}, "'input' is a number; it must be text"),
        (
            PREFERENCE,
            {"prompt": "a", "chosen": "b"},
            "no 'rejected' key; each preference row needs prompt, chosen, reje",
        ),
        (PREFERENCE, {"rejected": [HELLO]}, "no 'chosen' key; each preference row needs prompt, chosen, rejected"),
        (PREFERENCE, {**PREFERENCE, "rejected": None}, "'rejected' is null; it must be text"),
        (PREFERENCE, {**PREFERENCE, "prompt": True}, "'prompt' is a boolean; it must be text"),
        (PREFERENCE, {**PREFERENCE, "prompt": ""}, "no user turn with text before the answer"),
        (PREFERENCE, {**PREFERENCE, "prompt": []}, "no user turn with text before the answer"),
        (PREFERENCE, {**PREFERENCE, "chosen": []}, "'chosen' has no assistant turn"),
        (PREFERENCE, {**PREFERENCE, "chosen": [{"role": "user", "content": "x"}]}, "'chosen' has no assistant turn"),
        (PREFERENCE, {**PREFERENCE, "chosen": ["x"]}, "'chosen[1]' is text; a message is an object with role and con"),
        (
            PREFERENCE,
            {**PREFERENCE, "prompt": [{"role": "tool"}]},
            "'prompt[1]' is a tool's turn; tool calls and tool turns are not trained on",
        ),
        (PREFERENCE, {**PREFERENCE, "prompt": [{"role": []}]}, "'prompt[1]' has the role '[]'"),
        (PREFERENCE, {**PREFERENCE, "prompt": [{"role": "user"}]}, "'prompt[1].content' is null; it must be text"),
        (PREFERENCE, {**PREFERENCE, "prompt": PROMPT[::-1]}, "'prompt[2]' is a system message; only the first can be"),
        (
            PREFERENCE,
            {**PREFERENCE, "chosen": [*PROMPT, HELLO], "rejected": [*PROMPT, GO]},
            "'chosen' and 'rejected' h",
        ),
    ],
)
def test_malformed_row_stops_or_is_skipped_and_listed(write, good, bad, reason):
    bad_line = bad + b"\n" if isinstance(bad, bytes) else lines(bad)
    file = write("a.jsonl", lines(good) + b"\n" + bad_line + lines(good))
    message = refusal([file])
    assert message.startswith(f"a.jsonl:3: {reason}") and message.endswith(SKIP)
    rows = read([file], on_bad_row="skip")
    assert [row.source for row in rows.documents + rows.examples + rows.pairs] == ["a.jsonl:1", "a.jsonl:4"]
    ((source, listed),) = rows.report.malformed
    assert source == "a.jsonl:3" and listed.startswith(reason)
    assert rows.report.files[0].rows == 3


def test_named_format_asks_for_its_own_keys(write):
    file = write("a.jsonl", lines({"chosen": "x", "rejected": "y"}))
    assert "no 'prompt' key; each preference row needs" in refusal([file], kind="preference")


def test_unknown_columns_name_what_was_found_and_what_is_known(write):
    message = refusal([write("a.jsonl", lines({"riddle": "a", "answer": "b"}))])
    assert message.startswith(
        "a.jsonl:1: unknown columns: 'riddle', 'answer'. If 'riddle' is question: `rlhf data convert a.jsonl --rename "
        "riddle=question --to new.jsonl`. Otherwise rename them to those of a known kind: text"
    )
    assert "instruction (instruction, output); preference (prompt, chosen, rejected)" in message
    assert message.count("prompt (prompt)") == 1 and "skip" not in message, "there is no other row"
    two = write("c.jsonl", lines({"riddle": "a"}, {"riddle": "b"}, {"riddle": "c"}))
    assert refusal([two]).endswith("The next 2 rows are malformed too")
    later = write("d.jsonl", lines({"riddle": "a"}, {"riddle": "b"}, TEXT))
    assert "leave such rows out: --set data.on_bad_row=skip" in refusal([later])
    assert "unknown columns: no keys" in refusal([write("b.jsonl", lines({}))])


def test_the_first_row_that_is_of_a_kind_decides(write):
    rows = read([write("a.jsonl", lines({"id": 1}, TEXT, TEXT))], on_bad_row="skip")
    assert len(rows.documents) == 2 and rows.report.malformed[0][0] == "a.jsonl:1"


def test_one_row_is_counted_in_the_singular(write):
    assert read([write("a.jsonl", lines(TEXT))]).report.summary().startswith("1 of 1 row kept from a.jsonl")
    assert read([write("a.jsonl", lines(TEXT, TEXT))]).report.summary().startswith("2 of 2 rows kept from a.jsonl")


def test_rows_of_arrays_are_counted_not_lines(write):
    message = refusal([write("a.json", json.dumps([TEXT, {"text": 1}]).encode())])
    assert message.startswith("a.json:row 2: 'text' is a number")


def test_more_than_half_malformed_stops_even_when_skipping(write):
    half = write("half.jsonl", lines(TEXT, {"text": 1}))
    assert len(read([half], on_bad_row="skip").documents) == 1
    message = refusal([write("most.jsonl", lines({"text": 1}, TEXT, {"text": 2}))], on_bad_row="skip")
    assert message == (
        "most.jsonl: 2 of 3 rows are malformed, more than half. Repair the file; the first is most.jsonl:1: 'text' is "
        "a number; it must be text"
    )
    other = write("other.jsonl", lines(TEXT, {"body": "x"}, {"body": "y"}))
    message = refusal([other], on_bad_row="skip")
    assert (
        "or name its kind of rows: --set data.format=KIND (docs/data.md); the first is other.jsonl:2: no 'te" in message
    )
    answers = lines(*({"question": str(n), "chosen": "Yes.", "rejected": "No."} for n in range(3)))
    for on_bad_row in ("stop", "skip"):  # naming the kind would not help
        message = refusal([write("answers.jsonl", answers)], on_bad_row=on_bad_row)
        assert "--rename OLD=prompt" in message and "data.format" not in message
    for row, start in (
        ({"id": 1}, "one.jsonl:1: unknown columns: 'id'"),
        ({"text": 1}, "one.jsonl:1: 'text' is a num"),
    ):
        message = refusal([write("one.jsonl", lines(row))], on_bad_row="skip")
        assert message.startswith(start) and "1 of 1" not in message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": }\n'),
        ("a.csv", b"prompt,chosen,rejected\na,b,c,d\n"),
        ("a.jsonl", lines({"prompt": "a", "answer": float("inf")})),
        ("a.jsonl", lines({**PREFERENCE, "context": "a passage"})),
        ("a.parquet", parquet([{"prompt": b"a", "chosen": "b", "rejected": "c"}])),
        ("a.jsonl", lines([1, 2])),
    ],
)
def test_where_no_kind_would_help_none_is_advised(write, name, content):
    for advice in (RECIPE_ADVICE, CONVERT_ADVICE, CHECK_ADVICE):
        message = refusal([write(name, content)], advice=advice)
        assert message.endswith(". Repair the file") and advice.kind not in message


def test_where_a_kind_may_help_it_is_advised_unless_it_is_named(write):
    rename = "rename its columns (`rlhf data convert FILE --rename OLD=NEW --to new.jsonl`)"
    for kind, row, advice in (
        ("preference", {"question": "q", "chosen": "x", "rejected": "y"}, f"or {rename}"),
        ("auto", {"prompt": "x", "chosen": "y"}, f"{rename}, or name its kind of rows with --format KIND"),
    ):
        message = refusal([write("a.jsonl", lines(row))], kind=kind, advice=CHECK_ADVICE)
        assert message.endswith(f". Repair the file, {advice}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train": [TEXT, TEXT]}, "the rows are under 'train'; write that list alone, or a row on each line"),
        (
            {"train": [PREFERENCE], "test": [PREFERENCE, PREFERENCE]},
            "the rows are under 'train', 'test'; write one of these lists alone, or a row on each line",
        ),
        ({"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]}, COLUMNS),
        ({"prompt": {"0": "a", "1": "b"}, "completion": {"0": "c", "1": None}, "id": {"0": 1, "1": 2}}, COLUMNS),
        ({"messages": [MESSAGES["messages"]]}, COLUMNS),
        ({"text": ["a"]}, COLUMNS),
    ],
)
def test_an_object_that_holds_all_rows_is_recognised(write, content, message):
    for name, indent, place in (("a.jsonl", None, 1), ("a.json", None, 1), ("b.json", 2, "row 1")):
        text = json.dumps(content, indent=indent).encode() + b"\n"
        for policy in ("stop", "skip"):
            assert refusal([write(name, text)], on_bad_row=policy) == f"{name}:{place}: {message}"


@pytest.mark.parametrize("row", [PREFERENCE, TEXT, {**MESSAGES, "ids": ["a1", "b2"]}])
def test_a_file_of_one_object_is_one_row_on_one_line_or_on_several(write, row):
    (one,) = read([write("a.json", json.dumps(row).encode())]).rows
    (other,) = read([write("b.json", json.dumps(row, indent=2).encode())]).rows
    assert replace(one, source="") == replace(other, source="") and other.source == "b.json:row 1"


@pytest.mark.parametrize("option", [{"on_bad_row": "ignore"}, {"kind": "csv"}])
def test_unknown_options_are_refused(write, option):
    with pytest.raises(ValueError, match=r"is one of .*, not '(ignore|csv)'"):
        read([write("a.jsonl", lines(TEXT))], **option)


# Hub


@pytest.fixture
def folder(write, monkeypatch, tmp_path):
    import datasets  # slow to import, and only needed here

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Path("sets/small").mkdir(parents=True)
    write("sets/small/train.jsonl", lines(PREFERENCE, {**PREFERENCE, "chosen": None}, PREFERENCE))
    write("sets/small/test.jsonl", lines(PREFERENCE))
    Path("sets/other").mkdir()
    write("sets/other/test.jsonl", lines(PREFERENCE, PREFERENCE))
    return "sets/small"


def test_a_set_of_the_hub_is_read_from_a_local_folder(folder):
    rows = read_hub(folder, COMMIT, on_bad_row="skip")
    assert [pair.source for pair in rows.pairs] == ["sets/small/train:row 1", "sets/small/train:row 3"]
    assert rows.report.malformed == (("sets/small/train:row 2", "'chosen' is null; it must be text"),)
    (file,) = rows.report.files
    assert (file.name, file.kind, file.rows) == ("sets/small/train", "preference", 3)
    assert file.sha256 == read_hub(folder, COMMIT, on_bad_row="skip").report.files[0].sha256
    inner = read_hub("sets", COMMIT, split="test", data_dir="small")
    assert [pair.source for pair in inner.pairs] == ["sets/small/test:row 1"] and inner.report.files[
        0
    ].sha256 != file.sha256
    assert refusal(folder, COMMIT, call=read_hub).endswith(SKIP)


def test_hub_set_that_cannot_be_loaded(folder):
    message = refusal(folder, COMMIT, split="validation", call=read_hub)
    assert message.startswith("sets/small/validation: not loaded: Unknown split") and "check data.name" in message
    Path(folder, "train.jsonl").write_bytes(b'{"text": "a"}\n{"text": ')
    assert "JSON parse error" in refusal(folder, COMMIT, call=read_hub)


@pytest.mark.parametrize("revision", ["main", "", COMMIT[:12], COMMIT.upper(), COMMIT + "\n"])
def test_hub_revision_must_be_a_commit(revision):
    message = refusal("Anthropic/hh-rlhf", revision, call=read_hub)
    assert message.startswith("Anthropic/hh-rlhf: revision") and "could not be repeated" in message


# Transcripts

ENDING = "\n\nAssistant:"
content = st.text(st.sampled_from("ab: \n\t😀HumanAssist"), max_size=30).filter(
    lambda text: "\n\nHuman:" not in text and ENDING not in text
)
turns = st.lists(st.builds(Message, st.sampled_from(["user", "assistant"]), content), min_size=1, max_size=6)
systems = content.filter(lambda text: text.strip() and not text.lstrip().startswith(("Human:", "Assistant:")))


@settings(deadline=None)
@given(turns, st.none() | systems)
def test_parsing_a_rendered_prompt_gives_the_messages_back(messages, system):
    prompt = (*([Message("system", system)] if system else []), *messages)
    assert parse_hh(render_hh(prompt)) == (*prompt, assistant(""))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["Human", "Assistant"]), content), min_size=1, max_size=6))
def test_rendering_a_parsed_transcript_gives_the_text_back(turns):
    text = "".join(f"\n\n{speaker}: {content}" for speaker, content in turns)
    assert render_hh(parse_hh(text)) == text + ENDING


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", ":", " ", "\n", "\n\nHuman:", ENDING]), max_size=20))
def test_rendering_normalises_any_text_once(pieces):
    once = render_hh(parse_hh("".join(pieces)))
    assert render_hh(parse_hh(once)[:-1]) == once


def test_transcript_may_start_without_empty_lines_or_with_a_system_text():
    assert parse_hh("Human: Hi\n\nAssistant: Yo") == (user("Hi"), assistant("Yo"))
    assert parse_hh("Be brief.\n\nHuman: Hi") == (Message("system", "Be brief."), user("Hi"))
    assert parse_hh("no turns") == (Message("system", "no turns"),)
    assert parse_hh(" \n") == ()


def test_a_late_system_message_cannot_be_rendered():
    with pytest.raises(ValueError, match="message 2 of the prompt is a system message"):
        render_hh([user("Hi"), Message("system", "Be brief.")])


# The rest


def test_importing_the_readers_loads_nothing_heavy():
    code = "import rlhf.data.quality.check, rlhf.data.split, sys\n"
    code += "print({'torch', 'datasets', 'pyarrow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.skipif("RLHF_REAL_DATA" not in os.environ, reason="RLHF_REAL_DATA names no folder of real data files")
def test_real_files_are_read():
    files = [path for path in sorted(Path(os.environ["RLHF_REAL_DATA"]).iterdir()) if ".json" in path.name]
    assert files
    for file in files:
        rows = read([file], on_bad_row="skip")
        report = rows.report
        unused = sum(report.counts().values())
        assert len(rows.documents) + len(rows.examples) + len(rows.pairs) == report.rows - unused
        for pair in rows.pairs:
            if rows.report.files[0].kind == "hh":
                assert parse_hh(f"{render_hh(pair.prompt)} {pair.chosen}") == (*pair.prompt, assistant(pair.chosen))
