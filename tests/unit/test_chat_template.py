"""A tokenizer's chat template is tried in a child with little time and memory before it is used."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import psutil
import pytest

from rlhf.data import chat_template
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
        pytest.param(
            "{% for i in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3, "MemoryError|more than 2 s", id="loop"
        ),
        pytest.param("{{ 9 ** (9 ** 9) }}" + GOOD, "more than 2 s", id="power"),
        pytest.param("{% set x = messages[0].content * 2 ** 26 %}" + GOOD, "MemoryError", id="memory"),  # a GB
        pytest.param("{{ ''.__class__.__mro__ }}" + GOOD, "unsafe", id="sandbox"),
        pytest.param("{% for m in messages %}", "(?i)end of template", id="syntax"),
        pytest.param("{{ raise_exception('no') }}", "refuses a conversation: no", id="raise"),
        pytest.param(5, "compile non template nodes", id="number"),
        pytest.param("always the same", "leaves out a message", id="constant"),
        pytest.param("{{ messages[0].content }}", "leaves out a message", id="first message only"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(template, message):
    start = time.monotonic()
    with pytest.raises(UserError, match=message) as caught:
        tokenizer(template)
    assert "chat template" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert time.monotonic() - start < 60


def test_a_child_that_waits_for_a_lock_is_ended(monkeypatch):
    """A fork copies locks that threads hold, and not the threads. Waiting takes no CPU time."""
    monkeypatch.setattr(chat_template, "WAIT", 0.3)
    lock = threading.Lock()
    lock.acquire()
    with pytest.raises(UserError, match=r"gives no answer within 0\.3 s; use tokenizer\.template: hh"):
        chat_template.check(lambda messages: str(lock.acquire()))


def test_other_failures_say_what_they_are(monkeypatch):
    def crash(messages: Sequence[Message]) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return ""

    with pytest.raises(UserError, match="cannot be tried: Terminated; use tokenizer"):
        chat_template.check(crash)

    def fail() -> None:
        raise ValueError("no such limit")

    monkeypatch.setattr(chat_template, "_limit", fail)
    with pytest.raises(UserError, match="cannot be tried: no such limit; use tokenizer"):
        chat_template.check(lambda messages: messages[-1].content)


UNDER_A_LIMIT = """
import psutil, resource
from rlhf.data import chat_template
most = psutil.Process().memory_info().vms + chat_template.MEMORY // 2
resource.setrlimit(resource.RLIMIT_AS, (most, most))
chat_template.check(lambda messages: messages[-1].content)
"""


@pytest.mark.skipif(not psutil.LINUX, reason="memory is bounded on Linux only")
def test_a_lower_limit_of_the_process_itself_is_kept():
    subprocess.run([sys.executable, "-c", UNDER_A_LIMIT], check=True)


def test_a_template_that_refuses_a_conversation_says_so():
    only_users = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    refusing = tokenizer(only_users + "{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="chat template refuses a conversation: no system turn"):
        refusing.prompt_text([Message("system", "Be brief."), Message("user", "Hello.")])
    with pytest.raises(UserError, match="no system turn"):
        refusing.encode([([Message("system", "Be brief.")], "answer")], 20, 40)
