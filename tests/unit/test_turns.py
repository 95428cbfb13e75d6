"""Every answer of a conversation is imitated: which tokens these are, counted by hand, by prefix and by TRL."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from rlhf.data.rows import Example, Message, MessageRole
from rlhf.data.tokenize import UNCUT, DialogueTokenizer, Imitated, train
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.stages.supervised.forward import IGNORED, LabelStatistics
from tests import models

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_MARKS = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
STRIPS = WITHOUT_MARKS.replace(  # the reasoning of earlier answers, as many templates do
    "{{ m.content }}<|im_end|>{% else %}",
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>{% else %}",
)


def tokenizer(template: str) -> DialogueTokenizer:
    made: PreTrainedTokenizerFast = train(["a text of a few words"], 300)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template, made.eos_token = template, "<|im_end|>"
    return DialogueTokenizer(made, "chat")


def conversation(*texts: str, system: str = "") -> Example:
    roles: tuple[MessageRole, ...] = ("user", "assistant")
    turns = [Message(roles[i % 2], text) for i, text in enumerate(texts)]
    first = [Message("system", system)] if system else []
    return Example((*first, *turns[:-1]), turns[-1].content, "here:1", turns_from=0)


def decoded(made: DialogueTokenizer, ids: list[int]) -> str:
    return str(made.hf.decode(ids))


def imitated_text(made: DialogueTokenizer, row: Imitated) -> str:
    return decoded(made, [i for i, marked in zip(row.ids, row.imitated, strict=True) if marked])


def test_the_imitated_tokens_of_a_conversation_counted_by_hand():
    made = tokenizer(WITHOUT_MARKS)
    rows = [conversation("Hi", "ab", "more", "cde", system="S"), conversation("x", "f")]
    (first, second), counts = made.encode_turns(rows, 500, 500)
    # No merge of the vocabulary is in these answers: a token for each letter, and one for each end.
    assert (sum(first.imitated), sum(second.imitated)) == (2 + 1 + 3 + 1, 1 + 1)
    assert imitated_text(made, first) == "ab<|im_end|>cde<|im_end|>" and not counts["dropped"]
    whole = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n"
    assert decoded(made, first.ids).startswith(whole)


@pytest.mark.parametrize("template", [CHATML, WITHOUT_MARKS])
def test_the_imitated_tokens_are_those_of_trl(template, tmp_path):
    """TRL finds them by the marks of the template; without marks they are what follows each prompt."""
    made = tokenizer(template)
    row = conversation("Hi", "ab", "more", "cde f", "and", "g", system="S")
    ((ids, marks),), _ = made.encode_turns([row], 500, 500)
    messages = [{"role": m.role, "content": m.content} for m in (*row.prompt, Message("assistant", row.response))]
    if template == CHATML:
        arguments = SFTConfig(
            output_dir=str(tmp_path), assistant_only_loss=True, max_length=None, report_to=[], use_cpu=True, bf16=False
        )
        data = Dataset.from_list([{"messages": messages}])
        trainer = SFTTrainer(
            models.model("llama", len(made.hf)), arguments, train_dataset=data, processing_class=made.hf
        )
        assert isinstance(trainer.train_dataset, Dataset)
        example = trainer.train_dataset[0]
        theirs = example["input_ids"], [label != IGNORED for label in example["labels"]]
        assert (ids, marks) == (theirs[0][: len(ids)], theirs[1][: len(ids)]) and not any(theirs[1][len(ids) :])
    expected = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = (len(made.hf.encode(made.prompt_text(row.prompt[:i]), add_special_tokens=False)), 0)
            end = start + len(made.hf.encode(f"{message['content']}<|im_end|>", add_special_tokens=False))
            expected[start:end] = [True] * (end - start)
    assert marks == expected


def test_an_answer_that_the_template_writes_in_another_way_later_has_its_own_sequence():
    made = tokenizer(STRIPS)
    row = conversation("Hi", "<think>\nm\n</think>\nab", "more", "c", "and", "d")
    rows, _ = made.encode_turns([row], 500, 500)
    assert [imitated_text(made, r) for r in rows] == ["<think>\nm\n</think>\nab<|im_end|>", "c<|im_end|>d<|im_end|>"]
    assert "<think>" not in decoded(made, rows[1].ids)


@pytest.mark.parametrize("length", [500, 40, 30])
def test_no_answer_is_lost_where_a_conversation_is_too_long(length):
    made = tokenizer(WITHOUT_MARKS)
    row = conversation("Hi", "ab", "m" * 20, "cde")
    rows, counts = made.encode_turns([row], 15, length)
    assert "".join(imitated_text(made, r) for r in rows) == "ab<|im_end|>cde<|im_end|>"
    assert all(len(r.ids) <= length for r in rows) and not counts["dropped"]


def test_an_answer_with_a_row_of_its_own_is_imitated_once():
    made = tokenizer(WITHOUT_MARKS)
    rows, _ = made.encode_turns([conversation("Hi", "ab"), conversation("Hi", "ab", "more", "cde")], UNCUT, UNCUT)
    assert [imitated_text(made, r) for r in rows] == ["ab<|im_end|>", "cde<|im_end|>"]


def test_the_lean_trunk_scores_labels_with_gaps_as_the_library_does():
    torch.manual_seed(0)
    model: Any = get_peft_model(models.model("llama", 50), LoraConfig(r=2, target_modules="all-linear"))
    ids = torch.randint(0, 50, (2, 12))
    labels = ids.clone()
    labels[:, :3] = labels[0, 5:8] = labels[1, 9:] = IGNORED
    with torch.no_grad():
        found = LabelStatistics(LeanTrunk(model.get_base_model()), pairs=False)(ids, labels, fused_lm_head=True)
        logp = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    scored = labels[:, 1:] != IGNORED
    assert found.label_mask is not None and found.label_mask.equal(scored)
    torch.testing.assert_close(found.log_probs, logp.masked_fill(~scored, 0), rtol=1e-4, atol=1e-5)
