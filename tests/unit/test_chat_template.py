"""A tokenizer's chat template is tried before it is used."""

import pytest

from rlhf.data.rows import Message
from rlhf.data.tokenize import DialogueTokenizer, train
from rlhf.errors import UserError

GOOD = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"


def tokenizer(template: object) -> DialogueTokenizer:
    tokenizer = train(["a text of a few words"], 300)
    tokenizer.chat_template = template
    return DialogueTokenizer(tokenizer, "chat")


def test_a_plain_template_is_used_as_it_is():
    assert tokenizer(GOOD).prompt_text([Message("user", "Hello.")]) == "[user] Hello.[assistant]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param("{{ ''.__class__.__mro__ }}" + GOOD, "unsafe", id="sandbox"),
        pytest.param("{% for m in messages %}", "(?i)end of template", id="syntax"),
        pytest.param("{{ raise_exception('no') }}", "refuses a conversation: no", id="raise"),
        pytest.param("always the same", "leaves out a message", id="constant"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(template, message):
    with pytest.raises(UserError, match=message) as caught:
        tokenizer(template)
    assert "chat template" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_template_that_refuses_a_conversation_says_so():
    only_users = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    refusing = tokenizer(only_users + "{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="chat template refuses a conversation: no system turn"):
        refusing.prompt_text([Message("system", "Be brief."), Message("user", "Hello.")])
    with pytest.raises(UserError, match="no system turn"):
        refusing.encode([([Message("system", "Be brief.")], "answer")], 20, 40)
