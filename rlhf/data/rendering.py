"""How the text of a response follows the prompt that a chat template writes, so that nothing of the response is lost.

Templates are made to render what was said before. Some rewrite an answer: they strip its white space, or remove its
reasoning. What is trained is the response as written, between what the template writes before and after an answer.
"""

import re
from collections.abc import Callable

from rlhf.data import chat_template

THINK, END_THINK = "<think>", "</think>"  # the marks of reasoning


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends where reasoning begins."""
    return prompt.rstrip().endswith(THINK)


def closes_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends with a block of reasoning that is closed, so that only an answer can follow."""
    return prompt.rstrip().endswith(END_THINK)


def is_ambiguous_reasoning(response: str) -> bool:
    """Return whether it is open what of a response, which follows a prompt that opens reasoning, is reasoning.

    Clear is a response that begins with `<think>`, one with one `</think>` on a line of its own, and one without marks.
    """
    response = response.strip()
    if THINK in response.removeprefix(THINK):
        return True
    if response.startswith(THINK) or END_THINK not in response:
        return False
    return response.count(END_THINK) > 1 or not re.search(rf"^[ \t]*{END_THINK}[ \t]*$", response, re.MULTILINE)


def answer_text(prompt: str, response: str, render: Callable[[str], str], end: str) -> str | None:
    """Return what follows a prompt's text: the response, with what the template writes around it, without `end`.

    White space at the two ends of the response is the template's: many templates strip it. `render` returns the whole
    conversation's text with a given response. `end` is the end-of-sequence token. Returns
    None where the template does not continue the prompt with the answer.
    """
    if opens_reasoning(prompt):
        return _after_open_reasoning(prompt, response, render, end)
    answer = _continuation(prompt, render(response), end)
    frame = _continuation(prompt, render(chat_template.WORD), end)
    if answer is None or frame is None or chat_template.WORD not in frame:
        return None
    before, after = frame.partition(chat_template.WORD)[0], frame.rpartition(chat_template.WORD)[2]  # it may repeat it
    if THINK in response or END_THINK in response:  # its own reasoning stands in place of the template's empty one
        before = before.partition(THINK)[0]
    written = answer.removeprefix(before).removesuffix(after)
    if answer == f"{before}{written}{after}" and written.strip() == response.strip():
        return answer
    return f"{before}{response.strip()}{after}"  # the template rewrites this response


def _after_open_reasoning(prompt: str, response: str, render: Callable[[str], str], end: str) -> str | None:
    """Return the response as it continues a prompt that opened reasoning; one without reasoning closes it at once."""
    opened, _, gap = prompt.rpartition(THINK)
    frame = _continuation(opened.rstrip(), render(chat_template.WORD), end)
    if frame is None or chat_template.WORD not in frame:
        return None
    response = response.strip()
    if response.startswith(THINK):
        response = response.removeprefix(THINK).removeprefix(gap)
    elif END_THINK not in response:
        response = f"{'' if gap else chr(10)}\n{END_THINK}\n\n{response}"
    return response + frame.rpartition(chat_template.WORD)[2]


def _continuation(prompt: str, whole: str, end: str) -> str | None:
    """Return what a whole conversation has after its prompt, up to the last `end`; None if it begins otherwise."""
    if not whole.startswith(prompt):
        return None
    answer = whole[len(prompt) :]
    return (answer.rpartition(end)[0] or answer).rstrip()
