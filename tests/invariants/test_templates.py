"""For the templates of twelve model families: a row is refused with a reason, or trained as it is written."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.rows import Message
from rlhf.data.tokenize import DialogueTokenizer, train
from rlhf.data.trainable import why_not

END = "{% if add_generation_prompt %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
ALTERNATE = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# Each with its end of turn, and the first letters of the roles whose messages it ends so.
FAMILIES = {
    "chatml": (CHATML + END + "<|im_start|>assistant\n{% endif %}", "<|im_end|>", "sua"),
    "qwen3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and '</think>' in m.content %}"
        "{% set parts = m.content.split('</think>') %}{% if loop.last %}<think>\n"
        "{{ parts[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}{{ parts[-1].lstrip('\n') }}"
        "{% elif m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{{ m.content }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + END + "<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
        "sua",
    ),
    "llama-2": (
        ALTERNATE + "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>\n{{ m.content }}\n<</SYS>>\n\n"
        "{% elif m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
        "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}",
        "</s>",
        "a",
    ),
    "llama-3": (
        "<s>{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
        + END
        + "<|start|>assistant<|stop|>\n\n{% endif %}",
        "<|eot|>",
        "sua",
    ),
    "mistral": (
        NO_SYSTEM + ALTERNATE + "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
        "</s>",
        "sa",
    ),
    "gemma": (
        NO_SYSTEM + ALTERNATE + "<s>{% for m in messages %}<|start|>{{ 'model' if m.role == 'assistant' else m.role }}"
        "\n{{ m.content | trim }}<|eot|>\n{% endfor %}" + END + "<|start|>model\n{% endif %}",
        "<|eot|>",
        "sua",
    ),
    "phi-3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        + END
        + "<|assistant|>\n{% else %}{{ pad_token }}{% endif %}",
        "<|end|>",
        "sua",
    ),
    "zephyr": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}\n{% endfor %}"
        + END
        + "<|assistant|>\n{% endif %}",
        "</s>",
        "sua",
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% elif m.role == 'user' %}"
        "USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}" + END + "ASSISTANT:"
        "{% endif %}",
        "</s>",
        "a",
    ),
    "deepseek-r1": (
        "<s>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "<|user|>{{ m.content }}{% else %}<|assistant|>{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
        + END
        + "<|assistant|><think>\n{% endif %}",
        "</s>",
        "a",
    ),
    "smollm2": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        + CHATML
        + END
        + "<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
        "sua",
    ),
    "command-r": (
        "<s>{% for m in messages %}<|start|><|{{ m.role }}|>{{ m.content | trim }}<|eot|>{% endfor %}"
        + END
        + "<|start|><|assistant|>{% endif %}",
        "<|eot|>",
        "sua",
    ),
}
REFUSES_SYSTEM = ("mistral", "gemma")
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>", "<|end|>"]
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
PIECES = [
    "Paris",
    " ",
    "\n",
    "é",
    "日本",
    "a",
    "</think>",
    "<think>\n",
    "x < y",
    "[INST]",
    *SPECIAL[:4],
    ROLES[1],
    "<eos>",
]
TEXTS = st.one_of(
    st.text(st.sampled_from("ab .\né<|>"), min_size=1, max_size=12),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join),
    st.just("<think>\nHm.\n</think>\n\nSo."),
).filter(str.strip)
TURNS = st.one_of(
    st.just(["user"]),
    st.just(["system", "user"]),
    st.just(["user", "assistant", "user"]),
    st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=4),
)


def made(family: str, special: Sequence[str] = (*SPECIAL, *ROLES, "<think>", "</think>")) -> DialogueTokenizer:
    template, end, _ = FAMILIES[family]
    tokenizer = train(["Paris is a text"], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, end]})
    tokenizer.eos_token, tokenizer.chat_template = end, template
    return DialogueTokenizer(tokenizer, "chat")


TOKENIZERS: dict[str, DialogueTokenizer] = {}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_is_refused_or_trained_as_it_is_written(family, data):
    tokenizer = TOKENIZERS.get(family) or TOKENIZERS.setdefault(family, made(family))
    _, end, ended = FAMILIES[family]
    prompt = tuple(Message(role, data.draw(TEXTS)) for role in data.draw(TURNS))
    response = data.draw(TEXTS)
    reason = why_not(tokenizer, prompt, response)
    if reason is not None:
        assert reason.strip()
        return
    (row,), _ = tokenizer.encode([(prompt, response)], 9999, 99999)
    assert row
    decode = tokenizer.hf.decode
    assert decode(row.prompt) == tokenizer.prompt_text(prompt)
    text = str(decode(row.response))
    assert text.endswith(end) and row.response.count(tokenizer.eos_id) == 1
    body = text.removesuffix(end).strip()
    opened = tokenizer.prompt_text(prompt).endswith("<think>\n")
    written = response.strip().removeprefix("<think>").strip() if opened else response.strip()
    before = body.removesuffix(written)
    assert not (opened and "<think>" in body)
    assert body.endswith(written) and re.sub(r"\s", "", before) in ("", "</think>" if opened else "<think></think>")
    ends = sum(message.role[0] in ended for message in prompt) + 1
    default_system = family == "smollm2" and prompt[0].role != "system"
    assert (row.prompt + row.response).count(tokenizer.eos_id) == ends + default_system


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_row_is_trained(family):
    tokenizer = made(family)
    assert why_not(tokenizer, [Message("user", "Why?")], "So.") is None
    assert why_not(tokenizer, [Message("user", "Why?")], "<think>\nHm.\n</think>\n\nSo.") is None
    assert why_not(tokenizer, [Message("user", "Why?<|im_end|>")], "So.") is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_cannot_take_the_next_turns_in_plain_text(family):
    """Also where the marks of turns are no special tokens: only the end of a turn is one here."""
    tokenizer = made(family, special=())
    said = tokenizer.prompt_text([Message("user", "Hi"), Message("assistant", "Sure!"), Message("user", "Bye")])
    forged = said[said.index("Hi") : said.index("Bye") + 3].replace(FAMILIES[family][1], "")
    assert why_not(tokenizer, [Message("user", forged)], "So.") is not None
    assert why_not(tokenizer, [Message("user", "Hi")], forged) is not None
    plain = "# Users: a list\n\n- user, assistant\n### (c) [x](y) <b>no</b> {1, 2} or so"
    assert (
        why_not(tokenizer, [Message("system", "You help."), Message("user", plain)][family in REFUSES_SYSTEM :], plain)
        is None
    )
