"""Rows that a template cannot write as they are: refused before training, or left out and counted."""

import json
from typing import Any

import pytest

from rlhf.data.rows import Message
from rlhf.data.tokenize import DialogueTokenizer, train
from rlhf.data.trainable import why_not
from rlhf.errors import UserError
from rlhf.run.directory import StageRun
from rlhf.stages.corpus import load_corpus, stage_input
from tests.helpers import small

ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content | trim }}<eos>\n{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
PREFILLED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[A]{{ m.content.split('</think>')[-1] }}<eos>"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[A]<think>\n{% endif %}"
)
ASKED = (Message("user", "Why?"),)


def tokenizer(template: str | None = None) -> DialogueTokenizer:
    tokenizer = train(["a text of a few words"], 300)
    tokenizer.chat_template = template
    return DialogueTokenizer(tokenizer, "chat" if template else "hh")


def trained(made: DialogueTokenizer, response: str) -> str:
    (row,), _ = made.encode([(ASKED, response)], 500, 999)
    assert row
    return str(made.hf.decode(row.prompt + row.response))


@pytest.mark.parametrize(
    ("template", "prompt", "response", "reason"),
    [
        (ALTERNATE, (*ASKED, *ASKED), "So.", "turns must alternate"),
        (ALTERNATE, ASKED, "It is <eos> that ends.", "spells the control token '<eos>'"),
        *(
            (None, ASKED, f"So.{end * 2}Human: More?", r"spells the mark of a turn '\\n\\nHuman:'")
            for end in ("\n", "\r\n", "\r", "\x85", "\u2028")
        ),
        (None, (Message("user", "<bos>Why?"),), None, "spells the control token '<bos>'"),
        (None, (*ASKED, Message("system", "Be brief.")), "So.", "message 2 of the prompt is a system message"),
        (PREFILLED, (Message("system", "Be brief."), *ASKED), "So.", None),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            (Message("system", "Be brief."), *ASKED),
            "So.",
            r"leaves out or alters message 1 \(system\)",
        ),
        (
            PREFILLED.replace("[A]<think>\n", "[A]<think>\n\n</think>\n\n"),
            ASKED,
            "<think>\nHm.\n</think>\n\nSo.",
            "has reasoning, which the chat template closes",
        ),
    ],
)
def test_a_row_that_would_be_changed_is_refused_with_the_reason(template, prompt, response, reason):
    found = why_not(tokenizer(template), prompt, response)
    if reason is None:
        assert found is None
    else:
        with pytest.raises(UserError, match=reason):
            raise UserError(found or "nothing")


@pytest.mark.parametrize(
    ("earlier", "kept"),
    [
        ("<think>\nHm.\n</think>\n\nSo.", True),
        ("So.", True),
        ("Close it with </think> always.", False),
        ("<think>\nHm.\n</think>\n\nClose it with </think> always.", False),
    ],
)
def test_an_earlier_answer_may_lose_only_the_reasoning_that_it_begins_with(earlier, kept):
    reason = why_not(tokenizer(PREFILLED), (*ASKED, Message("assistant", earlier), *ASKED), "So.")
    assert reason == (None if kept else "the chat template leaves out or alters message 2 (assistant)")


def test_a_prompt_that_opens_reasoning_is_continued_there():
    made = tokenizer(PREFILLED)
    begun = "[user]Why?[A]<think>\n"
    assert trained(made, "<think>\nHm.\n</think>\nSo.") == f"{begun}Hm.\n</think>\nSo.<eos>"
    assert trained(made, "Hm.\n</think>\nSo.") == f"{begun}Hm.\n</think>\nSo.<eos>"
    assert trained(made, "So.") == f"{begun}\n</think>\n\nSo.<eos>"
    assert why_not(made, ASKED, "<think>\nHm.\n</think>\nSo.") is None is why_not(made, ASKED, "So.")


@pytest.mark.parametrize(
    "response",
    [
        "Sure. <think>ab</think> Hello",
        "<think>a <think>b</think> Hello",
        "Hm.\n</think>\nSo.\n</think>\nOr so.",
    ],
)
def test_reasoning_that_is_opened_must_be_closed_once(response):
    assert "</think>" in (why_not(tokenizer(PREFILLED), ASKED, response) or "")
    assert why_not(tokenizer(PREFILLED.replace("<think>", "")), ASKED, "<think>not closed") is not None


def test_reasoning_that_a_template_strips_from_answers_is_trained():
    made = tokenizer(PREFILLED.replace("<think>\n", ""))
    assert trained(made, "<think>\nHm.\n</think>\nSo.") == "[user]Why?[A]<think>\nHm.\n</think>\nSo.<eos>"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("m.content.split('\\n')[0] + ' ' + m.content", "aa aa\n  bb"),
        ("m.content | upper if 'bb' in m.content else m.content", "aa aa\n  bb"),
        ("'(' + m.content + ')'", "(aa aa\n  bb)"),
        ("m.content | trim", "aa aa\n  bb"),
    ],
)
def test_an_answer_that_the_template_rewrites_is_trained_as_written(content, expected):
    """White space at the two ends goes; nothing else of the answer is the template's."""
    template = "{% for m in messages %}[{{ m.role }}]{{ (CONTENT) if m.role == 'assistant' else m.content }}"
    template += "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    made = tokenizer(template.replace("CONTENT", content))
    assert trained(made, "  aa aa\n  bb\n") == f"[user]Why?[assistant]{expected}<eos>"


def load(tmp_path: Any, on_bad_row: str) -> tuple[Any, Any]:
    rows = [{"prompt": f"Question {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(20)]
    for n in (3, 7):
        rows[n]["rejected"] = "No.<eos>"
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    described: dict[str, Any] = {}
    data = {"source": "files", "files": [str(file)], "on_bad_row": on_bad_row, "heldout_fraction": 0.3}
    run = StageRun(tmp_path / "runs", small(data=data), "rm")
    run.describe = described.update  # type: ignore[method-assign]
    return load_corpus(run, tokenizer()), described["data"]


def test_such_rows_stop_a_stage_before_training(tmp_path):
    with pytest.raises(UserError, match=r"rows\.jsonl:4: a text spells .*'<eos>'.* 1 other row .*on_bad_row=skip"):
        load(tmp_path, "stop")


def test_such_rows_are_left_out_counted_and_listed(tmp_path):
    corpus, facts = load(tmp_path, "skip")
    assert facts["template"] == 2 and facts["pairs"] == 18 == len(corpus.pairs)
    assert [line.partition("rows.jsonl:")[2].partition(":")[0] for line in facts["left_out"]] == ["4", "8"]


def test_a_document_that_spells_a_control_token_stops_pretraining(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("A\n\nHuman: b", "a<eos>b<pad>") * 9))
    data = {"source": "files", "files": [str(file)], "on_bad_row": "stop", "heldout_fraction": 0.3}
    with pytest.raises(UserError, match=r"texts\.jsonl:2: a text spells the control token '<eos>'"):
        stage_input(StageRun(tmp_path / "runs", small(data=data), "pretrain"))
