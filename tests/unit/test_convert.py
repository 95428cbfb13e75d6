"""Conversion: any known kind of rows becomes one plain form that reads back as the same rows."""

import errno
import json
import re
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data import convert, formats
from rlhf.data.prepare import Preparation
from rlhf.errors import OptionError, UserError
from tests.helpers import rlhf

ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "Rain fell.\n"},
    "hh": {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: Hi\n\nAssistant: No."},
    "instruction": {"instruction": "Add the numbers.", "input": "2, 3", "output": "5"},
    "preference": {"prompt": "Capital of Peru?", "chosen": "Lima.", "rejected": "Quito."},
    "completion": {"prompt": "Capital of Peru?", "completion": "Lima."},
    "question": {"question": "Half of 48?", "answer": "24 is half of it.\n#### 24"},
    "prompt": {"prompt": "Capital of Peru?", "id": "7"},
    "messages": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
}


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def content(rows: formats.ParsedRows) -> list[Any]:
    kept: tuple[Any, ...] = (*rows.documents, *rows.examples, *rows.pairs, *rows.bare_prompts)
    return [[getattr(row, name) for name in row.__slots__ if name != "source"] for row in kept]


@pytest.mark.parametrize("kind", ROWS)
def test_a_converted_file_holds_the_same_rows(tmp_path, kind):
    before = convert.convert([write(tmp_path / "a.jsonl", ROWS[kind], ROWS[kind])]).rows
    assert convert.write(before, tmp_path / "b.jsonl") == 2
    assert content(formats.read([tmp_path / "b.jsonl"])) == content(before)


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


STARTS = ["", " ", "    ", "\n\nHuman:", "\r\n\r\nHuman:", "\n\nAssistant: ", "\n", "Human: "]
TEXTS = st.tuples(st.sampled_from(STARTS), st.text()).map("".join)


WORDS = TEXTS.map(lambda text: f"{text}+")  # with a letter at the end, which no reader strips

PLAIN = (  # without turns of a transcript
    st.tuples(st.sampled_from(["", " ", "  ", "\n"]), st.text())
    .map(lambda parts: f"{''.join(parts)}+")
    .filter(lambda text: not re.search("Human|Assistant", text))
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, str]]:
    """Return messages with a user's turn among them; assistant turns may follow each other, and come last."""
    system = [message("system", draw(WORDS))] if draw(st.booleans()) else []
    roles = draw(st.lists(st.sampled_from(["user", "assistant"]), max_size=2))
    behind = draw(st.lists(st.just("assistant"), max_size=2))
    return system + [message(role, draw(WORDS)) for role in (*roles, "user", *behind)]


@st.composite
def rows_of(draw: st.DrawFn, kind: str) -> list[dict[str, Any]]:
    """Return rows of one kind, each of which can be used; answers stand in texts or behind their conversations."""
    messages, good, bad = draw(conversations()), f"{draw(PLAIN)}a", f"{draw(PLAIN)}b"
    asked = next(n for n, turn in reversed([*enumerate(messages, 1)]) if turn["role"] == "user")
    chosen, rejected = ([*messages, message("assistant", draw(WORDS) + end)] for end in "ab")
    prompt = (
        {"prompt": messages[:asked]}
        if draw(st.booleans())
        else {"prompt": draw(st.sampled_from(["", "\n\nHuman:"])) + draw(PLAIN)}
    )
    right = draw(st.one_of(st.just({}), st.fixed_dictionaries({"answer": WORDS})))
    own = st.just(messages[0]["content"]) if messages[0]["role"] == "system" else WORDS  # another one is refused
    system = draw(st.one_of(st.just({}), st.fixed_dictionaries({"system": own})))
    margin = draw(st.one_of(st.just({}), st.fixed_dictionaries({"margin": st.floats(-9, 9)})))
    if kind == "text":
        return [{"text": good}]
    if kind == "hh":
        start = f"\n\nHuman: {draw(PLAIN)}\n\nAssistant: "
        return [{"chosen": start + good, "rejected": start + bad} | margin | system]
    if kind == "instruction":
        return [{"instruction": draw(WORDS), "input": draw(TEXTS), "output": good} | system]
    if kind == "preference":
        whole = {"chosen": chosen, "rejected": rejected} | draw(st.sampled_from([{}, {"prompt": messages[:asked]}]))
        return [draw(st.sampled_from([whole, prompt | {"chosen": good, "rejected": bad}])) | margin | system]
    if kind == "completion":
        whole = {"prompt": messages[:asked], "completion": chosen}
        return [draw(st.sampled_from([whole, prompt | {"completion": good}])) | right | system]
    if kind == "question":
        return [{"question": draw(WORDS), "answer": good}]
    if kind == "messages":
        return [{"messages": chosen} | system]
    if kind == "prompt":
        return [{"prompt": messages[:asked]} | right]
    if kind == "compared":
        return [{"conversation_a": chosen, "conversation_b": rejected, "winner": "b"} | margin | system]
    side = draw(st.sampled_from([(chosen, rejected), (good, bad)]))
    beside = {"prompt": messages[:asked]} | system
    return [beside | {"completion": text, "label": text is side[0]} for text in side]


@pytest.mark.parametrize("kind", [*ROWS, "compared", "labelled"])
def test_what_is_written_is_read_back(tmp_path, kind):
    @settings(deadline=None, max_examples=25)
    @given(rows=rows_of(kind))
    def check(rows):
        before = convert.convert([write(tmp_path / "a.jsonl", *rows)]).rows
        left_out = before.report.counts()["identical"] + before.report.counts()["prompts_differ"]
        assert len(before.rows) + left_out == 1
        if before.rows:
            (tmp_path / "b.jsonl").unlink(missing_ok=True)
            convert.write(before, tmp_path / "b.jsonl")
            assert content(formats.read([tmp_path / "b.jsonl"])) == content(before)

    check()


def test_an_answer_that_begins_like_a_transcript_stays_one_answer(tmp_path):
    answer = "\r\n\r\nHuman: Hi\r\n\r\nAssistant: Hello"
    row = {"prompt": "A?", "completion": [message("assistant", answer)]}
    convert.write(convert.convert([write(tmp_path / "a.jsonl", row)]).rows, tmp_path / "b.jsonl")
    (example,) = formats.read([tmp_path / "b.jsonl"]).examples
    assert (len(example.prompt), example.response) == (1, answer)


@pytest.mark.parametrize("kind", ["messages", "preference"])
def test_a_prompt_that_ends_with_the_assistant_is_read_back(tmp_path, kind):
    begun = [message("user", "A?"), message("assistant", "Sure,")]
    whole = [[*begun, message("assistant", text)] for text in ("x", "y")]
    row: dict[str, Any] = {"messages": whole[0]} if kind == "messages" else {"chosen": whole[0], "rejected": whole[1]}
    before = convert.convert([write(tmp_path / "a.jsonl", row)]).rows
    convert.write(before, tmp_path / "b.jsonl")
    after = formats.read([tmp_path / "b.jsonl"])
    ((prompt, *_),) = content(after)
    assert [turn.content for turn in prompt] == ["A?", "Sure,"]
    assert content(after) == content(before)


def test_columns_are_renamed(tmp_path):
    file = write(tmp_path / "a.jsonl", {"riddle": "Capital of Peru?", "answer": "Lima.", "id": 3})
    with pytest.raises(UserError, match=r"unknown columns: .* --rename riddle=question --to"):
        convert.convert([file])
    names = convert.parse_names(["riddle=prompt", "answer=completion"])
    (example,) = convert.convert([file], Preparation(names)).rows.examples
    assert (example.prompt[0].content, example.response) == ("Capital of Peru?", "Lima.")
    for names, reason in (
        ({"typo": "prompt"}, r"a\.jsonl:1: no column 'typo' to rename \(--rename\); the row has 'riddle'"),
        ({"riddle": "id"}, r"'id' is another column's name \(--rename\); the row has"),
    ):
        with pytest.raises(UserError, match=reason):
            convert.convert([file], Preparation(names, option="--rename"))
    with pytest.raises(OptionError, match="two columns the same name"):
        convert.parse_names(["riddle=prompt", "answer=prompt"])
    for wrong in ("question", "=prompt", "question="):
        with pytest.raises(UserError, match=f"--rename {wrong}: write OLD=NEW"):
            convert.parse_names([wrong])


def test_two_columns_may_swap_their_names(tmp_path):
    file = write(tmp_path / "a.jsonl", {"chosen": "worse", "rejected": "better", "prompt": "A?"})
    (pair,) = convert.convert([file], Preparation({"chosen": "rejected", "rejected": "chosen"})).rows.pairs
    assert (pair.chosen, pair.rejected) == ("better", "worse")


def test_labelled_answers_become_pairs(tmp_path):
    def row(prompt, completion, label):
        return {"prompt": prompt, "completion": completion, "label": label}

    rows = [row("A?", "a1", True), row("B?", "b", True), row("A?", "a2", False), row("A?", "a3", True)]
    pairs = convert.convert([write(tmp_path / "kto.jsonl", *rows)]).rows.pairs
    assert [(pair.prompt[0].content, pair.chosen, pair.rejected) for pair in pairs] == [("A?", "a1", "a2")]
    bytes_row = row(b"A?", "a1", True), row(b"A?", "a2", False)
    pq.write_table(pa.Table.from_pylist(list(bytes_row)), tmp_path / "bytes.parquet")
    with pytest.raises(UserError, match="prompt"):
        convert.convert([tmp_path / "bytes.parquet"])
    with pytest.raises(UserError, match=r"one\.jsonl: no prompt has a good and a bad answer"):
        convert.convert([write(tmp_path / "one.jsonl", *rows[:2])])
    table = tmp_path / "kto.csv"
    table.write_text("prompt,completion,label\nA?,a1,True\nA?,a2,false\n")
    (pair,) = convert.convert([table]).rows.pairs
    assert (pair.chosen, pair.rejected) == ("a1", "a2")
    assert [row.good for row in formats.read([table]).examples] == [True, False]
    listed = convert.convert([write(tmp_path / "again.jsonl", *rows), table])
    assert [pairing.in_words().split("/")[-1] for pairing in listed.pairings] == [
        "again.jsonl: 4 answers: 1 pair, 2 answers without a partner",
        "kto.csv: 2 answers: 1 pair, 0 answers without a partner",
    ]
    mixed = write(tmp_path / "mixed.jsonl", rows[0], ROWS["text"], rows[2])
    with pytest.raises(UserError, match=r"mixed\.jsonl:2: no 'prompt' with a 'label'"):
        convert.convert([mixed])
    found = convert.convert([mixed], on_bad_row="skip").rows
    assert (len(found.pairs), len(found.report.malformed)) == (1, 1)


@pytest.mark.parametrize("others", [{}, {"completion": None}])
def test_labelled_answers_may_be_named_response(tmp_path, others):
    """Parquet and hub sets fill absent keys with null."""
    rows = [{"prompt": "A?", "response": text, "label": text == "a", **others} for text in ("a", "b")]
    (pair,) = convert.convert([write(tmp_path / "kto.jsonl", *rows)]).rows.pairs
    assert (pair.chosen, pair.rejected) == ("a", "b")
    both = [row | {"completion": f"{row['response']}1"} for row in rows]
    with pytest.raises(UserError, match=r"both\.jsonl:1: answers under 'completion' and 'response'; take one out"):
        convert.convert([write(tmp_path / "both.jsonl", *both)])


def labelled(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": "A?", "completion": text, "label": text.startswith("good")} | more


def test_labelled_answers_keep_their_system_message_and_are_paired_within_it(tmp_path):
    rows = [labelled("good", system="Be kind."), labelled("bad 1", system="Be brief."), labelled("bad 2")]
    with pytest.raises(UserError, match="no prompt has a good and a bad answer"):
        convert.convert([write(tmp_path / "a.jsonl", *rows)])
    rows.append(labelled("bad 3", prompt=" A?\n", system="Be  kind."))
    (pair,) = convert.convert([write(tmp_path / "b.jsonl", *rows)]).rows.pairs
    assert [(turn.role, turn.content) for turn in pair.prompt] == [("system", "Be kind."), ("user", "A?")]
    assert (pair.chosen, pair.rejected) == ("good", "bad 3"), "spellings of one prompt"


@pytest.mark.parametrize("beside", [{"weight": 0}, {"train": False}, {"completion": " "}])
def test_labelled_answers_that_are_not_trained_on_are_left_out_before_pairing(tmp_path, beside):
    rows = [labelled("good 1") | beside, labelled("good 2"), labelled("bad")]
    found = convert.convert([write(tmp_path / "a.jsonl", *rows)])
    assert [(pair.chosen, pair.rejected) for pair in found.rows.pairs] == [("good 2", "bad")]
    words = "2 answers: 1 pair, 0 answers without a partner, 1 empty or untrained left out"
    assert found.pairings[0].in_words().endswith(words)


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"input": "2, 3"}, r"'input' is not used in training.*--ignore input\)"),
        ({"answer": "5"}, "'answer' is not used in training"),
        ({"tools": [{"name": "add"}]}, "'tools' would be lost"),
        ({"context": "Earlier."}, "'context' would be lost"),
    ],
)
def test_no_column_beside_labelled_answers_is_lost(tmp_path, beside, reason):
    file = write(tmp_path / "a.jsonl", labelled("good", **beside), labelled("bad"))
    with pytest.raises(UserError, match=rf"a\.jsonl:1: .*{reason}"):
        convert.convert([file])
    if "--ignore" in reason:
        assert len(convert.convert([file], Preparation(ignore=["input"])).rows.pairs) == 1
        assert len(convert.convert([file], kind="preference").rows.pairs) == 1


def test_an_answer_without_a_label_may_come_before_labelled_ones(tmp_path):
    rows = [{"prompt": "A?", "completion": text, "label": text == "a"} for text in ("a", "b")]
    file = write(tmp_path / "kto.jsonl", ROWS["completion"], *rows)
    found = convert.convert([file], on_bad_row="skip").rows
    assert [(pair.chosen, pair.rejected) for pair in found.pairs] == [("a", "b")]
    assert [source for source, _ in found.report.malformed] == [f"{file}:1"]


@pytest.mark.parametrize("wrong", [{"label": None}, {"prompt": 5}, {"completion": None}, {"completion": ["x"]}])
@pytest.mark.parametrize("place", [0, 2])
def test_a_wrong_row_among_labelled_answers_is_named_wherever_it_stands(tmp_path, wrong, place):
    rows = [{"prompt": "A?", "completion": text, "label": text == "a"} for text in ("a", "b")]
    rows.insert(place, rows[0] | wrong)
    file = write(tmp_path / "kto.jsonl", *rows)
    with pytest.raises(UserError, match=rf"kto\.jsonl:{place + 1}: .* Leave such rows out with --skip-bad-rows"):
        convert.convert([file])
    found = convert.convert([file], on_bad_row="skip")
    assert [(pair.chosen, pair.rejected) for pair in found.rows.pairs] == [("a", "b")]
    assert [source for source, _ in found.rows.report.malformed] == [f"{file}:{place + 1}"]
    assert ": 2 answers: 1 pair" in found.pairings[0].in_words()


def test_pairs_with_a_label_are_not_taken_for_labelled_answers(tmp_path):
    file = write(tmp_path / "a.jsonl", ROWS["preference"] | {"label": 1})
    assert len(convert.convert([file]).rows.pairs) == 1


def test_a_converted_file_has_rows_of_one_kind(tmp_path):
    files = [write(tmp_path / f"{kind}.jsonl", ROWS[kind]) for kind in ("preference", "completion")]
    with pytest.raises(UserError, match=r"rows of different kinds: .*completion\.jsonl:1, .*preference\.jsonl:1; conv"):
        convert.convert(files)


@pytest.mark.parametrize("command", [("data", "check"), ("data", "show"), ("data", "convert", "--to", "b.jsonl")])
def test_pairs_whose_prompt_has_another_name_are_mended_as_the_message_says(tmp_path, monkeypatch, capsys, command):
    rows = [{"question": f"{n}?", "chosen": "Yes, it is.", "rejected": "No."} for n in range(3)]
    file = write(tmp_path / "a.jsonl", *rows)
    monkeypatch.chdir(tmp_path)
    code, _, err = rlhf(monkeypatch, capsys, *command, file)
    assert code == 1 and "without a 'prompt' it must be a transcript" in err
    assert "Repair" not in err
    (advised,) = re.findall("`rlhf (.*)`", err)
    words = advised.replace("FILE", str(file)).replace("OLD", "question").split()
    assert rlhf(monkeypatch, capsys, *words)[0] == 0
    read = formats.read([tmp_path / "new.jsonl"]).pairs
    assert [(pair.prompt[0].content, pair.chosen) for pair in read] == [
        (row["question"], row["chosen"]) for row in rows
    ]


def test_demonstrations_with_other_names_are_mended_as_the_message_says(tmp_path, monkeypatch, capsys):
    row = {"instruction": "Name it.", "context": "Lima is a city.", "response": "Lima", "category": "open"}
    file = write(tmp_path / "a.jsonl", row | {"context": ""}, row)
    monkeypatch.chdir(tmp_path)
    code, _, err = rlhf(monkeypatch, capsys, "data", "check", file)
    assert code == 1 and "no 'output' key" in err
    (advised,) = re.findall("`rlhf (.*)`", err)
    words = advised.replace("FILE", str(file)).replace("OLD=NEW", "response=output --rename context=input").split()
    assert rlhf(monkeypatch, capsys, *words)[0] == 0
    _, second = formats.read([tmp_path / "new.jsonl"]).examples
    assert (second.prompt[0].content, second.response) == ("Name it.\nLima is a city.", "Lima")


def test_a_column_is_renamed_once():
    assert convert.parse_names(["a=prompt", "b=text"]) == {"a": "prompt", "b": "text"}
    with pytest.raises(OptionError, match="--rename a=text: a has the new name prompt already"):
        convert.parse_names(["a=prompt", "a=text"])


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    file = write(tmp_path / "a.jsonl", ROWS["text"])
    with pytest.raises(UserError, match="is there already and is not overwritten"):
        convert.write(convert.convert([file]).rows, file)
    assert file.read_text()


@pytest.mark.parametrize("command", ["check", "show", "convert --to out.jsonl"])
def test_a_kind_may_be_named_for_every_command_as_for_a_run(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", *({"prompt": f"Capital of country {n}?", "reply": "Lima."} for n in range(3)))
    name, *options = command.split()
    code, _, err = rlhf(monkeypatch, capsys, "data", name, "a.jsonl", *options)
    assert code == 1 and "unknown columns: 'prompt', 'reply'" in err
    code, out, err = rlhf(monkeypatch, capsys, "data", name, "a.jsonl", *options, "--format", "prompt")
    assert code in (0, 3) and "3" in out, err
    code, _, err = rlhf(monkeypatch, capsys, "data", name, "a.jsonl", *options, "--format", "prompts")
    assert code == 2 and "prompt" in err


def test_a_name_of_another_kind_of_file_and_nothing_to_write_are_refused(tmp_path):
    rows = convert.convert([write(tmp_path / "a.jsonl", ROWS["text"])]).rows
    for name, kind in (("b.parquet", "parquet"), ("b.jsonl.gz", "gz"), ("b.CSV", "CSV")):
        with pytest.raises(UserError, match=f"JSON lines are written, and no {kind}; give it a name"):
            convert.write(rows, tmp_path / name)
    empty = write(tmp_path / "c.jsonl", ROWS["instruction"] | {"output": ""})
    with pytest.raises(UserError, match="no row is left to write"):
        convert.write(convert.convert([empty]).rows, tmp_path / "d.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "c.jsonl"}


def test_a_file_that_cannot_be_written_to_its_end_leaves_nothing_in_the_way_of_the_next_try(tmp_path, monkeypatch):
    rows = convert.convert([write(tmp_path / "a.jsonl", ROWS["text"], ROWS["text"])]).rows
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(convert, "_plain", Mock(side_effect=[ROWS["text"], OSError(errno.ENOSPC, "no space")]))
        convert.write(rows, tmp_path / "b.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert convert.write(rows, tmp_path / "b.jsonl") == 2


def test_the_command_writes_and_says_what_it_left_out(tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "a.jsonl", ROWS["preference"], ROWS["preference"], {**ROWS["preference"], "chosen": 3})
    arguments = ("data", "convert", file, "--to", tmp_path / "b.jsonl")
    code, _, err = rlhf(monkeypatch, capsys, *arguments)
    assert code == 1 and "a.jsonl:3: 'chosen' is a number" in err
    assert not (tmp_path / "b.jsonl").exists()
    code, out, _ = rlhf(monkeypatch, capsys, *arguments, "--skip-bad-rows")
    assert code == 0 and "malformed 1," in out and "2 rows written to" in " ".join(out.split())


def test_the_commands_advise_what_they_can_do(tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "a.jsonl", {"id": 1}, ROWS["text"], ROWS["text"])
    code, _, err = rlhf(monkeypatch, capsys, "data", "convert", file, "--to", tmp_path / "b.jsonl")
    assert code == 1 and "Leave such rows out with --skip-bad-rows" in err
    assert "on_bad_row" not in err and ".." not in err.replace("...", "")
    typed = ("data", "convert", file, "--rename", "typo=text", "--to", tmp_path / "b.jsonl")
    code, _, err = rlhf(monkeypatch, capsys, *typed)
    assert code == 1 and "--skip-bad-rows" not in err, "no row has that column"
    assert (
        "The next 2 rows are malformed too. Repair the file, rename its columns with --rename OLD=NEW, or name" in err
    )
    most = write(tmp_path / "c.jsonl", {"id": 1}, {"id": 2}, ROWS["text"])
    for words in (("data", "check", most), ("data", "show", most)):
        code, _, err = rlhf(monkeypatch, capsys, *words)
        assert code == 1 and "likely the wrong format. The first is" in err


def test_the_command_counts_labelled_answers_that_find_no_partner(tmp_path, monkeypatch, capsys):
    rows = [{"prompt": "A?", "completion": text, "label": text == "a"} for text in ("a", "b", "c", "d")]
    file = write(tmp_path / "kto.jsonl", *rows)
    code, out, _ = rlhf(monkeypatch, capsys, "data", "convert", file, "--to", tmp_path / "b.jsonl")
    assert code == 0 and "4 answers: 1 pair, 2 answers without a partner" in " ".join(out.split())
