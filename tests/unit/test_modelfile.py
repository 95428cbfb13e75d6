"""A Modelfile's template writes what the chat template does, or the file says what differs, or there is none."""

import json
import re
from itertools import product
from typing import get_args

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlhf.data import modelfile
from rlhf.data.rows import Message, MessageRole
from rlhf.data.tokenize import BOS, EOS, PAD, DialogueTokenizer, chat_text, train
from rlhf.errors import UserError
from rlhf.recipe.choices import Template
from tests.unit.published_templates import PUBLISHED

SAID = ("What is 2 + 2?", "two\nlines", '"{{ .X }}" <b>', "日本語 🙂 \\n")
TURN: tuple[MessageRole, MessageRole] = ("assistant", "user")
SYSTEM: tuple[tuple[MessageRole, ...], ...] = ((), ("system",))
ROLES: list[tuple[MessageRole, ...]] = [
    (*system, "user", *TURN * turns) for system, turns in product(SYSTEM, [0, 1, 2, 5])
]
CONVERSATIONS = [
    [Message(role, SAID[(place + number) % len(SAID)]) for place, role in enumerate(roles)]
    for number, roles in enumerate(ROLES)
]
CHATML = PUBLISHED["chatml"].jinja
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": 0}
FRAGMENT = re.compile(
    r'if (?:and \(eq \$before ("\w*")\) \(eq \.Role ("\w+")\)|eq \$before ("user")) }}{{ (".*") }}{{ end }}'
)


def tokenizer(template: str | None, kind: Template = "chat", adds_bos: bool = False) -> DialogueTokenizer:
    raw = train(["Hello, what is it? Two words and more."], 300)
    raw.chat_template = template
    if adds_bos:
        raw.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, raw.bos_token_id)]
        )
    made = DialogueTokenizer(raw, kind)
    assert made.write_chat_template()
    return made


def sentence_pieces() -> DialogueTokenizer:
    """A tokenizer as Llama-2's: it adds BOS, and a space before a text that nothing else begins."""
    raw = Tokenizer(models.BPE(unk_token=PAD))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.train_from_iterator(list(SAID), trainers.BpeTrainer(special_tokens=[PAD, BOS, EOS]))
    raw.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    made = DialogueTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=PAD), "hh"
    )
    assert made.write_chat_template()
    return made


def fragments(text: str) -> modelfile.Between:
    """Read back the text between messages from the lines of a Go template."""
    found = {}
    for before, role, last, fragment in FRAGMENT.findall(text):
        plain = re.sub(r"\\U([0-9a-f]{8})", lambda sign: chr(int(sign[1], 16)), fragment)
        found[json.loads(before or last), json.loads(role or '""')] = json.loads(plain)
    return found


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", [*PUBLISHED, "hh", "plain"])
def test_the_text_of_every_conversation_is_that_of_the_chat_template(name, adds_bos):
    kind: Template = name if name in get_args(Template) else "chat"
    template = f"{{{{ bos_token }}}}{PUBLISHED[name].jinja}" if name in PUBLISHED else None
    made = tokenizer(template, kind, adds_bos)
    text = modelfile.modelfile(made, SAMPLING)
    found = fragments(text)
    assert "#" not in text.split("FROM")[0]
    for conversation in CONVERSATIONS:
        written = chat_text(made.hf, conversation, add_generation_prompt=True)
        typed = modelfile.text_of(dict.fromkeys(modelfile.between(made)[0], "") | found, conversation)
        assert typed == written.removeprefix(BOS if adds_bos else "")
        assert made.hf(typed)["input_ids"] == made.encode_prompts([conversation], 1 << 20)[0][0]


def test_a_text_leaves_out_the_space_that_sentencepiece_adds():
    made = sentence_pieces()
    found, _ = modelfile.between(made)
    assert "' '" in made.hf.chat_template and found["", "user"] == "\n\nHuman: "
    for conversation in CONVERSATIONS:
        typed = modelfile.text_of(found, conversation)
        assert made.hf(typed)["input_ids"] == made.encode_prompts([conversation], 1 << 20)[0][0]


def test_stops_and_sampling_are_those_of_training():
    text = modelfile.modelfile(tokenizer(None, "hh"), SAMPLING)
    assert text.startswith('FROM ./model.gguf\nTEMPLATE """{{- $before')
    assert text.endswith(
        f'PARAMETER stop """{EOS}"""\nPARAMETER stop """\n\nHuman:"""\nPARAMETER temperature 0.7\nPARAMETER top_p 1.0\n'
        "PARAMETER top_k 0\nPARAMETER min_p 0\nPARAMETER repeat_penalty 1\n"
    )


def test_signs_that_ollama_drops_are_written_as_escapes():
    made = tokenizer(CHATML.replace("<|im_start|>", "<｜\\u3000🙂|>"))
    text = modelfile.modelfile(made, SAMPLING)
    assert text.isascii() and fragments(text)["", "user"] == "<｜\u3000🙂|>user\n"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML.replace("m.content", "loop.index ~ m.content"), "more than the two roles"),
        (CHATML.replace("m.content", "m.content ~ m.content"), "once and in order"),
        (CHATML.replace("{% for m in messages %}", "{% for m in messages[-3:] %}"), "once and in order"),
    ],
    ids=["numbered", "repeated", "the last three"],
)
def test_what_go_cannot_follow_has_a_reason(template, reason):
    with pytest.raises(UserError, match=reason):
        modelfile.modelfile(tokenizer(template), SAMPLING)


@pytest.mark.parametrize(
    ("template", "comment"),
    [
        (CHATML.replace("m.content", "(m.content | trim)"), "White space around messages"),
        (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), "Reasoning in earlier answers"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML, "no system"),
        (
            "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
            "{% set messages = messages[1:] %}{% endif %}"
            + CHATML.replace("m.content", "(first ~ ': ' if loop.last and first else '') ~ m.content"),
            "System messages are left out: the chat template does not write each message once and in order",
        ),
    ],
    ids=["trimmed", "reasoning", "refused", "before the last"],
)
def test_what_ollama_does_otherwise_stands_in_a_comment(template, comment):
    (line,) = [line for line in modelfile.modelfile(tokenizer(template), SAMPLING).splitlines() if line[0] == "#"]
    assert comment in line
