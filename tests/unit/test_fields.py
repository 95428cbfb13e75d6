"""Every field of a row or a message is used, known to be without influence, or named in a refusal."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rlhf.data import fields, formats
from rlhf.data.prepare import Preparation
from rlhf.data.rows import Example, Message, PreferencePair
from rlhf.errors import UserError
from rlhf.recipe.choices import DataFormat

USER = {"role": "user", "content": "Is 91 prime?"}
NO = {"role": "assistant", "content": "No, 7 divides it."}
YES = {"role": "assistant", "content": "Yes."}
PAIR = {"prompt": "Is 91 prime?", "chosen": "No.", "rejected": "Yes."}


def read(*rows: dict[str, Any], kind: DataFormat = "auto", ignore: Sequence[str] = ()) -> formats.ParsedRows:
    raw = [(f"a.jsonl:{number}", row) for number, row in enumerate(rows, 1)]
    preparation = Preparation(ignore=ignore)
    return formats.parse(
        [("a.jsonl", lambda: raw, lambda: "0" * 64)], on_bad_row="stop", kind=kind, preparation=preparation
    )


def refusal(*rows: dict[str, Any], kind: DataFormat = "auto") -> str:
    with pytest.raises(UserError) as error:
        read(*rows, kind=kind)
    return str(error.value)


def conversation(*messages: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"messages": [*messages], **beside}


CALL = {"id": "c1", "type": "function", "function": {"name": "factor", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (NO | {"tool_calls": [CALL]}, "'messages[2]' has tool calls"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "'messages[2]' has tool calls"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "'messages[2]' has tool calls"),
        (NO | {"reasoning_content": "7 * 13"}, "'messages[2].reasoning_content' would be lost"),
        (NO | {"thinking": "7 * 13"}, "'messages[2].thinking' would be lost"),
        (NO | {"citations": ["a"]}, "'messages[2].citations' is not used in training"),
        (NO | {"weight": 0.5}, "'messages[2].weight' is '0.5'; it must be 0"),
        (
            NO | {"content": [{"type": "image_url", "image_url": {}}]},
            "'messages[2].content[1]' is a part of type 'image",
        ),
    ],
)
def test_a_field_of_a_message_that_is_not_trained_on_refuses_the_row(message, place):
    assert refusal(conversation(USER, message)).startswith(f"a.jsonl:1: {place}")


def test_a_tools_turn_is_named_as_one():
    turn = {"role": "tool", "tool_call_id": "c1", "content": "7, 13"}
    assert refusal(conversation(USER, turn, NO)).startswith("a.jsonl:1: 'messages[2]' is a tool's turn")


def test_pairs_that_differ_in_tool_calls_alone_are_refused_and_not_identical():
    sides = [[NO | {"tool_calls": [CALL | {"id": name}]}] for name in "ab"]
    row = {"prompt": [USER], "chosen": sides[0], "rejected": sides[1]}
    assert "'chosen[1]' has tool calls" in refusal(row)


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_fields_without_a_value_change_nothing(empty):
    row = conversation(USER, NO | {"tool_calls": empty, "thinking": empty, "note": empty}, tools=empty, history=empty)
    (example,) = read(row).examples
    assert example.response == NO["content"]


@pytest.mark.parametrize("key", ["tools", "functions", "documents", "images"])
def test_inputs_beside_the_texts_refuse_the_row_also_where_its_kind_is_named(key):
    row = conversation(USER, NO, **{key: [{"name": "factor"}]})
    assert refusal(row).startswith(f"a.jsonl:1: '{key}' would be lost")
    assert refusal(row, kind="messages").startswith(f"a.jsonl:1: '{key}' would be lost")


def test_a_column_that_nothing_reads_is_refused_unless_the_kind_is_named():
    row = PAIR | {"hint": "7 divides it", "prompt_id": "x7", "score_chosen": 8, "score_rejected": 1, "created": "2026"}
    assert refusal(row).startswith("a.jsonl:1: 'hint' is not used in training")
    assert len(read(row, kind="preference").pairs) == len(read(row | {"hint": None}).pairs) == 1


def test_a_column_that_repeats_another_is_none_that_is_lost():
    messages = {"chosen": [USER, NO], "rejected": [USER, YES], "prompt": USER["content"]}
    assert len(read(messages | {"messages": [USER, NO]}).pairs) == 1
    assert "'messages' is not used" in refusal(messages | {"messages": [USER, {"role": "user", "content": "Sure?"}]})
    assert len(read(conversation(USER, NO, prompt=USER["content"])).examples) == 1
    assert "'prompt' is not used" in refusal(conversation(USER, NO, prompt="Is 97 prime?"))
    assert len(read({"instruction": "a", "output": "b", "text": "### a\n### b"}).examples) == 1


# Weights


def test_the_answer_is_the_last_turn_that_is_trained_on():
    again = {"role": "user", "content": "Sure?"}
    (example,) = read(conversation(USER, YES | {"weight": 0}, again, NO | {"weight": 1})).examples
    assert [m.content for m in example.prompt] == ["Is 91 prime?", "Yes.", "Sure?"]
    assert example.response == NO["content"]
    (first,) = read(conversation(USER, NO, again, YES | {"train": False})).examples
    assert first == Example((Message("user", "Is 91 prime?"),), NO["content"], "a.jsonl:1")


@pytest.mark.parametrize(
    "row",
    [
        conversation(USER, NO | {"weight": 0}),
        conversation(USER, NO | {"loss_mask": 0.0}),
        conversation(USER, NO, train=False),
        PAIR | {"weight": "0"},
        {"prompt": [USER], "chosen": [NO | {"train": False}], "rejected": [YES]},
    ],
)
def test_a_row_without_an_answer_to_train_on_is_left_out_and_counted(row):
    good = PAIR if "chosen" in row else conversation(USER, NO)
    rows = read(row, good)
    assert rows.report.left_out["untrained"] == ("a.jsonl:1",) and rows.report.counts()["untrained"] == 1
    assert [kept.source for kept in rows.rows] == ["a.jsonl:2"]


def test_a_weight_on_a_users_turn_is_refused():
    assert "'messages[1].train' asks to train on a user turn" in refusal(conversation(USER | {"train": True}, NO))
    assert len(read(conversation(USER | {"weight": 0}, NO | {"weight": 1})).examples) == 1


# Contents, prompts and files


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Is 91 "}, {"type": "text", "text": "prime?"}]
    (example,) = read(conversation({"role": "user", "content": parts}, NO)).examples
    assert example.prompt == (Message("user", "Is 91 prime?"),)


def test_a_prompt_that_begins_the_answer_is_refused():
    begun = [USER, {"role": "assistant", "content": "No, "}]
    row = {"prompt": begun, "completion": [{"role": "assistant", "content": "7 divides it."}]}
    assert "'prompt' ends with the beginning of the answer" in refusal(row)
    assert "'prompt' ends with the beginning of the answer" in refusal(
        {"prompt": begun, "chosen": "a", "rejected": "b"}
    )


def test_answers_of_several_turns_with_a_common_beginning_are_a_pair_behind_it():
    beginning = [{"role": "assistant", "content": "Let me see."}, {"role": "user", "content": "And?"}]
    row = {"prompt": [USER], "chosen": [*beginning, NO], "rejected": [*beginning, YES]}
    (pair,) = read(row).pairs
    before = (Message("user", "Is 91 prime?"), Message("assistant", "Let me see."), Message("user", "And?"))
    assert pair == PreferencePair(before, NO["content"], YES["content"], "a.jsonl:1")
    other = row | {"rejected": [beginning[0], {"role": "user", "content": "So?"}, YES]}
    assert read(other, row).report.left_out["prompts_differ"] == ("a.jsonl:1",)


POEM = "Human: Hi\n\nAssistant: Hello.\n\nContinue this as a poem."
QUOTED = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Bye.\n\nContinue this as a poem."


def test_the_file_decides_whether_prompts_are_transcripts():
    plain = [PAIR | {"prompt": prompt} for prompt in (QUOTED, "Is 91 prime?", POEM, "Is 97 prime?")]
    for rows in (plain, plain[::-1], plain[:2]):
        assert [p.prompt for p in read(*rows).pairs] == [(Message("user", str(row["prompt"])),) for row in rows]
    asked = [PAIR | {"prompt": f"\n\nHuman: Is {n} prime?\n\nAssistant:"} for n in range(2)]
    read_rows = read(plain[1], *asked).pairs
    assert [pair.prompt[0].content for pair in read_rows] == ["Is 91 prime?", "Is 0 prime?", "Is 1 prime?"]
    assert read(PAIR | {"prompt": POEM}).pairs[0].prompt == (Message("user", POEM),), "no one answers it there"


def test_an_answer_that_is_a_dialogue_stays_as_it_is_beside_answers_that_are_none():
    dialogue = "\n\nHuman: Hi\n\nAssistant: Hello."
    rows = [{"prompt": f"Write {n}.", "completion": text} for n, text in enumerate([dialogue, "A tree.", "A stone."])]
    assert [example.response for example in read(*rows).examples] == [dialogue, "A tree.", "A stone."]
    assert "that does not begin with 'prompt'" in refusal(rows[0])


@pytest.mark.parametrize("end", ["\r\n", "\r", "\u2028", "\u2029", "\x85"])
def test_every_line_end_counts_in_a_transcript(end):
    prompt = f"{end}{end}Human: Hi{end}you{end}{end}Assistant:"
    asked = (Message("user", "Hi\nyou"),)
    assert read(PAIR | {"prompt": prompt}).pairs[0].prompt == asked
    assert read({side: f"{prompt} {side}" for side in ("chosen", "rejected")}).pairs[0].prompt == asked


@pytest.mark.parametrize("prompt", ["Human: Nature's Last Error? Discuss.", "Write on:\n\nAssistant:", "Human:"])
def test_a_text_with_one_mark_of_a_transcript_stays_as_it_is(prompt):
    assert read(PAIR | {"prompt": prompt}).pairs[0].prompt == (Message("user", prompt),)


@pytest.mark.parametrize("prompt", ["\n\nHuman: Hi\n\nAssistant:", "Human: Hi\n\nAssistant:", "\n\nHuman: Hi"])
def test_a_transcript_is_read_as_turns(prompt):
    assert read(PAIR | {"prompt": prompt}).pairs[0].prompt == (Message("user", "Hi"),)


def test_openais_file_of_preferences_is_read():
    row = {
        "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [NO],
        "non_preferred_output": [YES],
    }
    (pair,) = read(row).pairs
    assert (pair.chosen, pair.rejected) == (NO["content"], YES["content"])
    row["input"]["tools"] = [CALL]  # type: ignore[index]
    assert "'tools' would be lost" in refusal(row)


def test_a_spreadsheets_line_on_its_separator_is_no_row(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("sep=;\nprompt;chosen;rejected\nIs 91 prime?;No.;Yes, it is.\n")
    (pair,) = formats.read([file], on_bad_row="stop").pairs
    assert pair.rejected == "Yes, it is." and pair.source.endswith("a.csv:3")


def test_a_row_says_the_same_through_json(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(conversation(USER, NO | {"weight": 1})) + "\n")
    assert formats.read([file], on_bad_row="stop").examples[0].response == NO["content"]


# Switches of training


@pytest.mark.parametrize("off", [False, 0, 0.0, "0", "false", " False ", "0.0"])
@pytest.mark.parametrize(
    "name",
    ["trainable", "include_in_loss", "loss", "train", "weight", "lossMask", "is-trained", "computeLoss", "learn"],
)
def test_what_says_by_its_name_that_it_is_not_trained_on_is_context(name, off):
    again = {"role": "user", "content": "Sure?"}
    (example,) = read(conversation(USER, YES | {name: off}, again, NO | {name: 1})).examples
    assert example.response == NO["content"] and not example.prompt[1].trained
    for row in (conversation(USER, NO | {name: off}), conversation(USER, NO, **{name: off}), PAIR | {name: off}):
        good = PAIR if "chosen" in row else conversation(USER, NO)
        for kind in ("auto", "preference" if "chosen" in row else "messages"):
            assert read(row, good, kind=kind).report.counts()["untrained"] == 1


@pytest.mark.parametrize("value", [False, 0, True, 1, "true", 0.0])
@pytest.mark.parametrize(
    "name", ["mask", "masked", "ignore", "no_loss", "mask_loss", "skip_training", "is_target", "draft", "ok"]
)
def test_a_field_of_a_message_that_may_switch_training_off_is_never_silent(name, value):
    rows = [conversation(USER, NO | {name: value})] * 3
    for kind in ("auto", "messages"):
        assert f"a.jsonl:1: 'messages[2].{name}' is not used in training" in refusal(*rows, kind=kind)
    assert "a switch of training is written as train: true or false" in refusal(*rows)
    assert f"--set data.ignore=[{name}] (`rlhf data`, `rlhf new`: --ignore {name})" in refusal(*rows)
    assert len(read(*rows, ignore=[name]).examples) == 3
    assert f"'{name}' is not used" in refusal(PAIR | {name: value}, PAIR | {name: value})


def test_an_empty_switch_of_a_message_is_no_absent_one():
    assert "'messages[2].train' is ''; it must be 0" in refusal(conversation(USER, NO | {"train": ""}))
    assert len(read(conversation(USER, NO | {"train": None}), conversation(USER, NO, train="")).examples) == 2


def test_a_weight_between_is_refused_with_the_way_out():
    row = {"prompt": "q", "completion": "a", "loss": 2.31}
    assert "'loss' is '2.31'; it must be 0 (context only) or 1" in refusal(row)
    assert len(read(row, ignore=["loss"]).examples) == 1


# Names and values


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("image_url", "http://x/cat.jpg"),
        ("look", "https://x.org/a/cat.webp"),
        ("look", "https://x.org/a/cat.HEIC?size=2#top"),
        ("look", "https://x.org/a/cat.7z"),
        ("image_id", 17),
        ("previous_turns", [{"role": "user", "content": "Tell me."}]),
        ("turns", [{"role": "user", "content": "Tell me."}]),
        ("source", "guten Tag"),
        ("source", "Bonjour"),
        ("id", "guten Tag"),
        ("prompt_id", "hallo"),
        ("created_at", "the day before"),
        ("url", "see the page"),
        ("topic", "cats"),
        ("language", "French"),
        ("level", 5),
        ("source", "早上好"),
        ("metadata", {"anything": ["may", {"stand": "here"}]}),
        ("reward_model", {"style": "rule", "ground_truth": "72"}),
        ("is_correct", False),
        ("label", "bad"),
        ("", "in French"),
        ("Unnamed: 3", "in French"),
    ],
)
def test_a_column_that_an_answer_may_depend_on_is_refused_in_every_kind(column, value):
    for row in (PAIR, conversation(USER, NO), {"instruction": "Is 91 prime?", "output": "No."}):
        message = refusal(row | {column: value}, row | {column: f"{value}!"})
        assert message.startswith(f"a.jsonl:1: '{column}' is ") and f"--set data.ignore=[{column}]" in message
        assert len(read(row | {column: value}, ignore=[column]).rows) == 1
    if column == "source" and value != "Bonjour":  # words are a text, also where they are always the same
        assert f"'{column}' is " in refusal(PAIR | {column: value}, PAIR | {column: value})


def test_one_refusal_names_all_such_columns_and_fields_of_the_file():
    rows = [conversation(USER, NO | {"mood": "calm"}, topic="x"), conversation(USER, NO, topic="y", more="of it")]
    assert refusal(*rows).endswith(
        "--set data.ignore=[mood,topic,more] (`rlhf data`, `rlhf new`: --ignore mood,topic,more)"
    )
    assert len(read(*rows, ignore=["mood", "topic", "more"]).examples) == 2
    nested = PAIR | {"meta": {"id": "a1", "lang": "de"}}
    assert "data.ignore=[meta]" in refusal(nested) and len(read(nested, ignore=["meta.lang"]).pairs) == 1


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("sourceUrl", ["http://x/very/long", "https://y.org/a?b=c", "https://y.org", "https://y.org/a.html?b=c.png"]),
        ("paper", ["https://arxiv.org/abs/2402.14740v2", "https://y.org/St._Louis", "https://y.org/v1.2/"]),
        ("prompt_id", ["x7", 17]),
        ("post.id", ["hgkpq7", "hgkpqz", "a8"]),
        ("anything", ["550e8400-e29b-41d4-a716-446655440000", "0123456789abcdef" * 2]),
        ("when", ["2026-11-27T16:00:00Z", "2026-11-27"]),
        ("timestamp", [1700000000, 1700000001.5]),
        ("uids", [["a1", "b2"], ["c3"]]),
        ("metadata", [{"id": "a1", "time": "2026-01-01"}, {"id": 3, "time": ""}]),
        ("", ["17", "18"]),
        ("Unnamed: 0", [17, 18]),
        ("Unnamed: 0.1", [17, 18]),
        ("__index_level_0__", [17, 18]),
    ],
)
def test_ids_hashes_times_and_pages_are_without_influence(column, values):
    rows = [PAIR | {column: value} for value in values]
    assert len(read(*rows).pairs) == len(values) and read(*rows).report.notes == ()


@pytest.mark.parametrize("value", ["general", "gpt-4", 2.5, ["a", "b"]])
def test_one_word_throughout_a_file_is_named_with_the_key_that_says_so(value):
    read_rows = read(*[PAIR | {"domain": value}] * 2)
    (note,) = read_rows.report.notes
    assert note.startswith("a.jsonl: not used in training: domain; --set data.ignore=[domain]")
    messages = read(*[conversation(USER, NO | {"model": "gpt-4"})] * 2)
    assert "not used in training: model;" in messages.report.notes[0]
    assert read(*[PAIR | {"domain": value}] * 2, ignore=["domain"]).report.notes == ()
    assert "'domain' is not used" in refusal(*[PAIR | {"domain": value}] * 2, PAIR), "not in all rows"


def test_what_a_pair_says_of_each_answer_is_about_them_and_a_text_is_not():
    rows = [PAIR | {"chosen_model": f"m{n}", "rejected_model": "b", "safe.chosen": n == 1} for n in range(2)]
    rows = [row | {"safe.rejected": False} for row in rows]
    assert "chosen_model, rejected_model, safe.chosen" in read(*rows).report.notes[0]
    inputs = {"chosen_input": "2, 3", "rejected_input": "3, 4"}
    assert "'chosen_input' is not used" in refusal(PAIR | inputs)


@pytest.mark.parametrize(
    ("column", "value"), [("winner", "rejected"), ("label", False), ("preferred", 0), ("best", "0")]
)
def test_a_pair_whose_verdict_is_for_the_other_answer_is_refused_with_the_right_way(column, value):
    for kind in ("auto", "preference"):
        message = refusal(PAIR | {column: value}, kind=kind)
        assert "the better answer is not the one under 'chosen': swap the two" in message and "ename" not in message
    assert len(read(PAIR | {column: "chosen"}, PAIR | {column: True}).pairs) == 2


def test_fields_as_deep_as_they_can_be_are_refused_and_ignored():
    deep: dict[str, Any] = {"a": "some text"}
    for _ in range(2000):
        deep = {"a": deep}
    for row in (PAIR | {"m": deep}, conversation(USER, NO | {"m": deep}), PAIR | {"m": [deep]}):
        assert "--set data.ignore=[m] (" in refusal(row) and len(read(row, ignore=["m"]).rows) == 1


def test_what_is_constant_in_the_rows_that_were_looked_at_is_compared_in_the_others(monkeypatch):
    monkeypatch.setattr(fields, "SURVEYED", 2)
    rows = [PAIR | {"domain": "general"}] * 3
    assert len(read(*rows).pairs) == 3
    assert refusal(*rows, PAIR | {"domain": "code"}).startswith("a.jsonl:4: 'domain' is not used")


def test_documents_answer_nothing_and_other_columns_are_named():
    rows = read({"text": "Rain.", "topic": "of rain", "id": "a1"}, {"text": "Sun.", "topic": "sun", "trainable": 0})
    assert rows.report.notes[0].startswith("a.jsonl: not used in training: topic;")
    assert rows.report.counts()["untrained"] == 1


@pytest.mark.parametrize("place", ["message", "part"])
def test_an_address_in_a_message_is_no_label(place):
    message: dict[str, Any] = USER | {"image_url": "cat.png"}
    if place == "part":
        message = {"role": "user", "content": [{"type": "text", "text": "What is it?", "source": "cat.png"}]}
    assert "is not used in training" in refusal(conversation(message, NO))


def test_a_system_text_beside_a_row_is_never_lost():
    system = Message("system", "Answer in French.")
    rows = read({"prompt": "Why?"}, {"prompt": "Why?", "system": system.content}).bare_prompts
    assert [row.prompt[0] for row in rows] == [Message("user", "Why?"), system]
    assert read({"prompt": "Why?", "system": system.content}).bare_prompts[0].prompt[0] == system
    (question,) = read({"question": "2+2?", "answer": 4, "system": system.content}).examples
    assert question.prompt[0] == system
    parts = [{"type": "text", "text": system.content}]
    assert read(PAIR | {"system": parts}).pairs[0].prompt[0] == system
    assert "'system' is an object" in refusal(PAIR | {"system": {"content": "x"}})
    (empty,) = read(conversation({"role": "system", "content": ""}, USER, NO, system=system.content)).examples
    assert empty.prompt[0] == system and len(empty.prompt) == 2


def test_two_columns_for_one_thing_are_refused_where_they_differ():
    own = [USER, NO]
    assert "'messages' and 'conversations' differ" in refusal({"messages": own, "conversations": [USER, YES]})
    assert read({"messages": [], "conversations": own}).examples == read({"messages": own}).examples
    assert "'completion' and 'response' differ" in refusal({"prompt": "q", "completion": "A", "response": "B"})
    assert read({"prompt": "q", "completion": "", "response": "B"}).examples[0].response == "B"


def test_a_repeated_beginning_may_be_spelled_another_way():
    sides = {"chosen": [USER, NO], "rejected": [{"role": "user", "content": "Is  91\r\nprime?"}, YES]}
    assert read(sides | {"prompt": "Is 91 prime?\n"}).pairs[0].prompt == (Message("user", "Is 91 prime?"),)
    system = {"role": "system", "content": "Be brief."}
    (pair,) = read({"prompt": "Is 91 prime?", "chosen": [system, USER, NO], "rejected": [system, USER, YES]}).pairs
    assert pair.prompt[0].role == "system"


@pytest.mark.parametrize("written", [str, json.dumps, lambda turns: str(turns).replace("}, {", "}\n {")])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Is 91 prime?", "chosen": [USER, NO], "rejected": [USER, YES]},
        {"chosen": [USER, NO], "rejected": [USER, YES]},
        {"prompt": [USER], "completion": "No."},
        {"prompt": "Is 91 prime?", "completion": [NO]},
        {"prompt": [USER]},
    ],
)
def test_a_list_of_messages_as_a_table_holds_it_is_no_text(row, written):
    """Pandas and datasets write lists into CSV as Python shows them; a model would learn to answer with brackets."""
    as_text = {key: written(value) if isinstance(value, list) else value for key, value in row.items()}
    assert "is a list of messages written as text" in refusal(as_text)


def test_an_answer_that_quotes_messages_stays_as_it_is():
    answer = 'Send this:\n[{"role": "user", "content": "Hi"}]'
    assert read({"prompt": "How?", "completion": answer}).examples[0].response == answer
